"""One job on a server: identify, save, stop, wait, start, follow, verify. It runs on the host under a
supervisor, so that a restart is never two steps of a console that may vanish in between."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.host.files import private_folder, try_lock
from engine.host.rundir import RunDir, run_status, state_root
from engine.host.servers.beacons import live_beacons
from engine.host.servers.description import (
    LAUNCH,
    ORIGINAL,
    SAVED,
    Description,
    describe,
    difference,
    info_of,
    read_description,
)
from engine.host.servers.journal import Journal
from engine.host.servers.ours import systemctl, unit_of
from engine.host.servers.plan import Plan, plan
from engine.host.servers.ports import server_at
from engine.host.servers.starting import follow, launch, log_size, next_attempt
from engine.host.servers.stopping import stop_server, tree_of, wait_released
from engine.wire.errors import HsxError, LockedError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.host.events import EventLog
    from engine.host.processes import ServerProcess
    from engine.host.servers.target import Target
    from engine.host.servers.wanted import Order

SYSTEMCTL_S = 180.0


@contextmanager
def _only_job(target: Target) -> Iterator[None]:
    """Hold the lock of the server's port: one job at a time, whatever the server is called."""
    folder = private_folder(state_root() / "locks")
    fd = try_lock(folder / f"port-{target.port}.lock")
    if fd is None:
        raise LockedError(
            f"another job works on the server at port {target.port}", "one at a time", "wait for its end"
        )
    try:
        yield
    finally:
        os.close(fd)


def run_job(order: Order, job: str, events: EventLog | None) -> dict[str, Any]:
    """Do what ``order`` says, going on where a killed job of the same order left off.

    Args:
        job: its id, for the journal.

    Returns:
        {"outcome": "done" | "already", "server", "action", "process", "url", "differs", ...}.

    Raises:
        HsxError: Refused when nothing was done; else how far it came is in the journal.
    """
    with _only_job(order.target):
        found = plan(order)
        if found.noop and not found.resumes:
            return {"outcome": "already", "server": order.target.name, "action": order.action,
                    "detail": found.noop, "process": _shown(found.running)}  # fmt: skip
        try:
            journal = Journal(order.target.folder, order.key, job, events)
            try:
                result = _Job(order, journal).run(found)
            except HsxError as error:
                journal.end("failed", str(error)[:500])
                raise
            journal.end("done")
        except OSError as error:
            raise RemoteError(
                f"the job on server {order.target.name} cannot write its records", str(error),
                "make room in the home folder, then give the same command: it goes on from its journal",
            ) from error  # fmt: skip
        return result


def _shown(server: ServerProcess | None) -> dict[str, Any] | None:
    return None if server is None else server.to_json()


class _Job:
    """The steps of one order. Each looks into the journal first."""

    def __init__(self, order: Order, journal: Journal) -> None:
        self.order, self.target, self.journal = order, order.target, journal
        self.folder = order.target.folder

    def run(self, found: Plan) -> dict[str, Any]:
        """All steps."""
        server = self._save(found)
        self._stop(found.running)
        result: dict[str, Any] = {
            "outcome": "done",
            "server": self.target.name,
            "action": self.order.action,
            "resumed": self.journal.resumes,
            "url": self.target.url,
        }
        if self.order.action == "stop":
            return {**result, "process": None}
        assert server is not None
        return {**result, **self._start(server)}

    def _save(self, found: Plan) -> Description | None:
        """Write what was and what shall be, before anything is done. Returns what shall be."""
        if self.journal.done("save"):
            return read_description(self.folder / LAUNCH)
        running = found.running
        with self.journal.step(
            "save",
            running=running.id.to_json() if running is not None else None,
            workers=[p.to_json() for p in tree_of(running)] if running is not None else [],
            unit=unit_of(running) if running is not None else self.target.unit,
            user_unit=running.user_unit if running is not None else os.geteuid() != 0,
        ):
            if found.before is not None:
                found.before.write(self.folder / SAVED)
                if self.order.taps is not None and read_description(self.folder / ORIGINAL) is None:
                    found.before.write(self.folder / ORIGINAL)
            if found.after is not None:
                found.after.write(self.folder / LAUNCH)
        return found.after

    def _stop(self, running: ServerProcess | None) -> None:
        """End the process that was saved, and no other: what runs after a resumed start is the new one."""
        journal = self.journal
        saved = journal.fact("save", "running")
        if saved is None or journal.done("release"):
            return
        if not journal.done("stop"):
            with journal.step("stop"):
                self._end(running, saved)
        pids = {int(worker["pid"]) for worker in journal.fact("save", "workers")}
        with journal.step("release"):
            wait_released(self.target.port, pids, journal.say)

    def _end(self, running: ServerProcess | None, saved: dict[str, Any]) -> None:
        if running is None or running.id.to_json() != saved:
            self.journal.say("the process has ended meanwhile")
            return
        unit = self.journal.fact("save", "unit")
        if unit is not None:
            self._systemctl("stop", unit)
        else:
            stop_server(running, tree_of(running), self.order.grace, self.journal.say)

    def _start(self, server: Description) -> dict[str, Any]:
        journal, target = self.journal, self.target
        unit = journal.fact("save", "unit")
        attempt = journal.fact("start", "attempt")
        if unit is None and attempt is None:
            attempt = next_attempt(target)
        offset = journal.fact("start", "offset")
        offset = self._log_size(unit) if offset is None else offset
        if not journal.done("start"):
            with journal.step("start", attempt=attempt, offset=offset):
                if unit is not None:
                    self._systemctl("start", unit)
                else:
                    launch(target, server, attempt)
        with journal.step("load"):
            log = self._log(unit)
            follow(target, server, (log, offset), self.order.deadline_s, journal.say, attempt)
        with journal.step("verify"):
            return self._verify(server, attempt)

    def _log(self, unit: str | None) -> Path | None:
        if unit is None:
            return RunDir.of(self.target.run).path / "stdio.log"
        return Path(self.target.log) if self.target.log else None

    def _log_size(self, unit: str | None) -> int:
        if unit is None:
            return log_size(self.target)
        try:
            return Path(self.target.log).stat().st_size if self.target.log else 0
        except OSError:
            return 0

    def _verify(self, server: Description, attempt: int | None) -> dict[str, Any]:
        """The process that answers is the one that was started, with the model that was meant."""
        now = server_at(self.target.port)
        if now is None:
            raise RemoteError(f"server {self.target.name} is ready, but no process of it is found")
        pid = run_status(RunDir.of(self.target.run))["pid"] if attempt is not None else now.id.pid
        if pid not in (now.id.pid, *now.parents):
            raise RemoteError(
                f"another server answers at port {self.target.port}",
                f"pid {now.id.pid}, not {pid}",
                "stop it",
            )
        model, was = info_of(self.target.url).get("model_path"), server.info.get("model_path")
        if was is not None and model is not None and model != was:
            raise RemoteError(f"server {self.target.name} serves {model}", f"it was {was}", "see its argv")
        beacons = live_beacons(self.target.dump_dir)
        if self.order.taps is not None and not [b for b in beacons if not b.get("failed")]:
            raise RemoteError(
                f"server {self.target.name} is ready but does not capture",
                f"no sign of the plugin in {self.target.dump_dir}",
                "put it back with server restart --restore",
            )
        self._forget_original(server)
        return {
            "process": now.to_json(),
            "differs": difference(server, describe(now, self.target.url)),
            "capture": beacons,
        }

    def _forget_original(self, server: Description) -> None:
        original = read_description(self.folder / ORIGINAL)
        if original is not None and (original.argv, dict(original.env)) == (server.argv, dict(server.env)):
            (self.folder / ORIGINAL).unlink(missing_ok=True)

    def _systemctl(self, verb: str, unit: str) -> None:
        """Drive the unit, in the manager that it was found in. Raises RemoteError."""
        argv = systemctl(verb, unit, user=bool(self.journal.fact("save", "user_unit")))
        try:
            done = subprocess.run(argv, capture_output=True, timeout=SYSTEMCTL_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise RemoteError(f"{' '.join(argv)} failed", str(error)) from error
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise RemoteError(f"{' '.join(argv)} failed", said, f"see journalctl -u {unit}")
