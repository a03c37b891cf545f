"""The engine process as its supervisor sees it: its own child, or an orphan that was adopted."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.host.files import read_json
from engine.host.rundir import state_root
from engine.wire.procid import ProcessId, parent_of

if TYPE_CHECKING:
    import subprocess

BURY_S = 5.0
"""How long killed leftovers may take to go."""


@dataclass(frozen=True)
class Ended:
    """How an engine ended. ``reaped``: how many processes it had left behind."""

    rc: int | None
    signal: int | None
    reaped: int
    note: str = ""


class Engine(Protocol):
    """A running engine."""

    @property
    def id(self) -> ProcessId: ...

    def ended(self) -> bool:
        """Whether it has ended. Must be asked often."""

    def bury(self) -> Ended:
        """After it has ended: kill what it left behind and say how it ended."""


def _supervisors() -> set[ProcessId]:
    """Recorded supervisors. One that an engine of ours started (a server, by a job) becomes this process's
    child when its starter ends, and is no leftover."""
    records = (state_root() / "runs").glob("*/sup.json")
    return {found for found in map(ProcessId.from_json, map(read_json, records)) if found is not None}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class OwnEngine:
    """An engine that this process launched; as a subreaper this process also inherits the engine's
    orphans."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        # Not yet reaped, so the pid is certainly its own; a zombie has no start time any more.
        self.id = ProcessId.of(process.pid) or ProcessId(process.pid, 0, "ended")

    def ended(self) -> bool:
        """Also reaps orphans that ended meanwhile. The engine itself stays a zombie until ``bury``: its pid,
        and so its group's, cannot be reused before the group is killed."""
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return False
            if info.si_pid == self._process.pid:
                return True
            os.waitpid(info.si_pid, os.WNOHANG)

    def bury(self) -> Ended:
        """Kill its group, reap it, then kill and reap whoever escaped from the group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nobody but the zombie was in it
        _, status = os.waitpid(self._process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        return Ended(code if code >= 0 else None, -code if code < 0 else None, _reap_children())


def _reap_children() -> int:
    """Kill and reap every child of this process; returns how many there were."""
    seen: set[int] = set()
    end, kept = time.monotonic() + BURY_S, _supervisors()
    while time.monotonic() < end:
        mine = [pid for pid in _pids() if parent_of(pid) == os.getpid()]
        children = [pid for pid in mine if ProcessId.of(pid) not in kept]
        if not children:
            break
        for pid in children:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue
        time.sleep(0.02)
    return len(seen)


class AdoptedEngine:
    """An engine whose supervisor died: no exit status can be had, and its orphans went to init."""

    def __init__(self, child: ProcessId, run_path: str) -> None:
        self.id = child
        self._mark = b"HSX_RUN=" + os.fsencode(run_path)

    def ended(self) -> bool:
        return not self.id.alive()

    def bury(self) -> Ended:
        """Kill everything that still carries this run's HSX_RUN."""
        seen: set[int] = set()
        end, kept = time.monotonic() + BURY_S, {process.pid for process in _supervisors()}
        while (left := [p for p in _pids() if p not in kept and self._is_ours(p)]) and time.monotonic() < end:
            for pid in left:
                process = ProcessId.of(pid)
                if process is not None and process.send(signal.SIGKILL):
                    seen.add(pid)
            time.sleep(0.02)
        return Ended(None, None, len(seen), "its first supervisor had died, so its exit status is unknown")

    def _is_ours(self, pid: int) -> bool:
        """Whether a living process has our mark in its environment (readable for our own user only)."""
        if pid == os.getpid():
            return False
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return self._mark in environment.split(b"\0") and ProcessId.of(pid) is not None
