"""Starting, resuming and aborting runs: idempotent, ordered by a lock per run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from engine.host import args as arg
from engine.host.files import atomic_json, private_folder, read_json, try_lock
from engine.host.rundir import RunDir, run_status, state_root
from engine.host.supervisor import adopt, start_supervisor
from engine.wire.durable import atomic_bytes
from engine.wire.errors import LockedError, Refused, SpecError
from engine.wire.events import now_iso
from engine.wire.procid import ProcessId
from engine.wire.verbs import LIVE

Args = Mapping[str, Any]
Answer = dict[str, Any]

KINDS = ("extract", "complete", "verify", "server", "server-job", "traffic")
START_WAIT_S = 10.0
RESERVE_BYTES = 64 << 10
"""Kept on the run's disk, to be spent on writing exit.json when it is full."""


def _hold_start(rundir: RunDir) -> int:
    """The lock that orders starts and adoptions of one run; a repeated start waits for the one before it."""
    path = private_folder(state_root() / "locks") / f"{rundir.run}.lock"
    end = time.monotonic() + START_WAIT_S
    while (fd := try_lock(path)) is None:
        if time.monotonic() > end:
            raise Refused(f"run {rundir.run} is being started by another call", str(path), "ask again")
        time.sleep(0.05)
    return fd


def _hold_output(rundir: RunDir, output: str) -> int:
    """Lock the output folder. Raises LockedError that names the holder, Refused if it cannot be made."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = try_lock(folder / ".hsx.lock")
    except OSError as error:
        raise Refused(f"the output {output} cannot be used", str(error), "name another folder") from error
    if fd is None:
        owner = read_json(folder / ".hsx.owner") or {}
        holder = f"run {owner.get('run', 'unknown')} since {owner.get('at', 'unknown')}"
        raise LockedError(
            f"the output {output} is in use", f"{holder} holds it", "abort that run or name another"
        )
    try:
        atomic_json(folder / ".hsx.owner", {"run": rundir.run, "at": now_iso(), "run_dir": str(rundir.path)})
    except OSError as error:
        os.close(fd)
        raise Refused(f"the output {output} cannot be written", str(error), "make room there") from error
    return fd


def _spec_from(args: Args, run: str) -> Answer:
    argv = arg.texts(args, "argv")
    if not argv or not argv[0].startswith("/"):
        raise SpecError("bad argv", "its first item is the absolute path of an interpreter")
    kind = arg.text(args, "kind")
    if kind not in KINDS:
        raise SpecError(f"bad kind {kind!r}", f"it is one of {', '.join(KINDS)}")
    arg.key_env(args)
    return {
        "format_version": 1,
        "run": run,
        "attempt": arg.integer(args, "attempt", 1, 1),
        "kind": kind,
        "argv": argv,
        "env": arg.env(args),
        "cwd": arg.path(args, "cwd") if args.get("cwd") else os.environ["HOME"],
        "output": arg.path(args, "output") if args.get("output") else None,
        "spec": args.get("spec"),
        "grace": list(arg.grace(args)),
        "at": now_iso(),
    }


def start(args: Args, _: BinaryIO) -> Answer:
    """Begin attempt 1 of a run, or resume it as attempt n+1. The same call twice launches once."""
    rundir = RunDir.of(args.get("run"))
    spec = _spec_from(args, rundir.run)
    attempt, start_lock = spec["attempt"], _hold_start(rundir)
    output_lock = None
    try:
        latest, state = rundir.attempt, run_status(rundir)["state"]
        begun = state != "never-started" or rundir.set_aside(latest)
        if attempt < latest or (attempt == latest and begun):
            return {"status": run_status(rundir), "already": True}
        if attempt > latest + 1:
            raise Refused(f"run {rundir.run} has no attempt {attempt - 1}", f"its latest is {latest}")
        if state in LIVE:
            raise Refused(f"run {rundir.run} is {state}", f"attempt {latest} has not ended", "abort it first")
        if spec["output"] is not None:
            output_lock = _hold_output(rundir, spec["output"])
        _begin(rundir, spec, attempt > latest > 0)
        start_supervisor(rundir, spec, start_lock, output_lock)
    finally:
        os.close(start_lock)
        if output_lock is not None:
            os.close(output_lock)
    return {"status": run_status(rundir), "already": False}


def _begin(rundir: RunDir, spec: Answer, resumes: bool) -> None:
    """Make room and write what the attempt is to do; a first one that cannot be written leaves nothing."""
    try:
        private_folder(rundir.path)
        if resumes:
            rundir.archive()
        atomic_bytes(rundir.path / ".reserve", bytes(RESERVE_BYTES))
        atomic_json(rundir.path / "spec.json", spec)
    except OSError as error:
        if spec["attempt"] == 1:
            shutil.rmtree(rundir.path, ignore_errors=True)
        raise Refused(
            f"run {rundir.run} cannot be written", str(error), "make room in the home folder"
        ) from error


def abort(args: Args, _: BinaryIO) -> Answer:
    """Ask a run to stop: first the durable intent, then the signal. A second, less patient abort is
    heeded."""
    rundir = RunDir.of(args.get("run"))
    before = run_status(rundir)
    if before["state"] not in LIVE:
        return {"status": before, "noop": True}
    spec = rundir.record("spec.json") or {}
    first = (before["stop"] or {}).get("at", now_iso())
    grace = list(arg.grace(args, arg.grace(spec)))
    try:
        atomic_json(rundir.path / "stop.json", {"at": first, "grace": grace})
    except OSError as error:  # a full disk must not keep a run from being stopped
        sys.stderr.write(f"stop.json: {error}\n")
    if before["state"] == "orphaned":
        _adopt(rundir, spec)
    supervisor = ProcessId.from_json(rundir.record("sup.json"))
    if supervisor is not None:
        supervisor.send(signal.SIGTERM)
    return {"status": run_status(rundir), "noop": False}


def _adopt(rundir: RunDir, spec: Answer) -> None:
    lock = _hold_start(rundir)
    try:
        child = ProcessId.from_json(rundir.record("child.json"))
        if child is not None and run_status(rundir)["state"] == "orphaned":
            adopt(rundir, {"grace": list(arg.grace(spec)), "argv": spec.get("argv", [""])}, child, lock)
    finally:
        os.close(lock)
