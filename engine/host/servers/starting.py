"""Starting a server as a supervised run of its own, and following it until it is ready."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from engine.host.lifecycle import start
from engine.host.rundir import RunDir, run_status
from engine.host.server import server_facts
from engine.host.servers import loads
from engine.host.servers.description import LAUNCH, Description
from engine.host.servers.ports import listeners, server_at
from engine.host.servers.program import engine_command
from engine.host.servers.watching import LogWatch
from engine.wire.errors import DeadlineExceeded, Refused, RemoteError
from engine.wire.verbs import ENDED, LIVE

if TYPE_CHECKING:
    from pathlib import Path

    from engine.host.servers.stopping import Say
    from engine.host.servers.target import Target

POLL_S = 0.3
READY_EVERY = 2
RECORD_S = 10.0


def next_attempt(target: Target) -> int:
    """The attempt that a start of its run would be. Raises Refused while one lives.

    The supervisor of a server that was just stopped may take a moment to record its end.
    """
    end = time.monotonic() + RECORD_S
    while (status := run_status(RunDir.of(target.run)))["state"] in LIVE and time.monotonic() < end:
        time.sleep(POLL_S)
    if status["state"] in LIVE:
        raise Refused(
            f"run {target.run} is {status['state']}", "the server was started before", "see its log"
        )
    return int(status["attempt"]) + 1


def log_size(target: Target) -> int:
    """Bytes in the log of the server's run: a new start's lines come after them."""
    files = run_status(RunDir.of(target.run))["files"]
    return int(files["stdio.log"]["size"]) if "stdio.log" in files else 0


def launch(target: Target, server: Description, attempt: int) -> dict[str, Any]:
    """Start attempt ``attempt`` of the server's run, once however often it is asked. Returns RunStatus.

    Raises Refused when the port is in use or it cannot be launched.
    """
    status = run_status(RunDir.of(target.run))
    if status["attempt"] >= attempt and status["state"] != "never-started":
        return status
    if listeners(target.port):
        other = server_at(target.port)
        who = "another process" if other is None else f"pid {other.id.pid} of {other.user}"
        raise Refused(f"port {target.port} is in use", f"{who} listens there", "stop it or take another port")
    path = target.folder / LAUNCH
    server.write(path)
    answer = start(
        {
            "run": target.run,
            "attempt": attempt,
            "kind": "server",
            "argv": engine_command("server-exec", str(path)),
            "cwd": "/",
            "spec": {"server": target.name, "url": target.url},
            "grace": [60, 15],
        },
        io.BytesIO(),
    )
    status = answer["status"]
    return dict(status)


def follow(
    target: Target,
    server: Description,
    log: tuple[Path | None, int],
    deadline_s: float,
    say: Say,
    attempt: int | None,
) -> LogWatch:
    """Wait for /ready, and record the load.

    Args:
        attempt: of the server's run; None for a server that a unit started.
        log: the log file, and the offset from which on it is this server's.

    Raises:
        RemoteError: it died; told by the log's own line at once, not when the process has gone.
        DeadlineExceeded: it is not ready in time; it is left as it is.
    """
    watch, began, phase, round_ = LogWatch(*log), time.monotonic(), "", 0
    while True:
        loading = watch.look()
        current = loading.current
        name = loading.phases[current].name if current is not None else ""
        if name and name != phase:
            phase = name
            say(f"loading: {phase} ({current} of {len(loading.phases)})" if current is not None else phase)
        if watch.death:
            raise RemoteError(f"server {target.name} died while loading", watch.death, "see its log")
        if attempt is not None:
            _check_run(target, attempt)
        # Ready is what /ready says, not the log's "fired up".
        if round_ % READY_EVERY == 0 and server_facts_ready(target.url):
            break
        if time.monotonic() - began > deadline_s:
            quiet = f"in phase {phase or 'before the first'}; last line: {loading.last[:200]!r}"
            raise DeadlineExceeded(
                f"server {target.name} is not ready after {deadline_s:g} s", quiet,
                "it was left running: look at its log, nvidia-smi and the disk of the model; "
                "stop it with server stop",
            )  # fmt: skip
        round_ += 1
        time.sleep(POLL_S)
    watch.look()
    total = time.monotonic() - began
    loads.record(target.folder, server, watch.loading, total)
    say(f"ready after {total:.1f} s")
    return watch


def server_facts_ready(url: str) -> bool:
    """Whether /ready answers 200."""
    return bool(server_facts(url)["ready"])


def _check_run(target: Target, attempt: int) -> None:
    status = run_status(RunDir.of(target.run))
    if status["attempt"] == attempt and status["state"] in ENDED:
        ended = status["exit"] or {}
        why = ended.get("error") or f"exit status {ended.get('rc')}, signal {ended.get('signal')}"
        raise RemoteError(f"server {target.name} ended while loading", str(why)[:500], "see its log")
