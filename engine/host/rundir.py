"""The run directory: which files a run has on the host, and what they say about its state."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.host.files import private_folder, read_json
from engine.wire.durable import atomic_bytes
from engine.wire.errors import Refused
from engine.wire.ids import check_run
from engine.wire.procid import ProcessId, boot_id

OF_ATTEMPT = ("sup.json", "child.json", "stop.json", "exit.json", "result.json")
"""What belongs to one attempt and is set aside when the next one begins."""
STREAMS = ("events.jsonl", "stdio.log")
"""What goes on over all attempts."""


def state_root() -> Path:
    """``$HOME/.local/state/hsx``, private. Raises Refused."""
    home = os.environ.get("HOME", "")
    if not home.startswith("/"):
        raise Refused(
            "the host gives no HOME", f"HOME is {home!r}", "log in as a user that has a home folder"
        )
    return private_folder(Path(home) / ".local" / "state" / "hsx")


@dataclass(frozen=True)
class RunDir:
    """One run's files. ``path`` need not exist."""

    run: str
    path: Path

    @classmethod
    def of(cls, run: object) -> RunDir:
        """The directory of ``run``. Raises SpecError for a bad run id."""
        name = check_run(run)
        return cls(name, private_folder(state_root() / "runs") / name)

    def record(self, name: str) -> dict[str, Any] | None:
        """One of OF_ATTEMPT of the latest attempt; None if it is not there.

        A crash between setting an attempt aside and beginning the next leaves it the latest, already set
        aside.
        """
        found = read_json(self.path / name)
        if found is None and name != "spec.json" and self.set_aside(self.attempt):
            found = read_json(self.path / "attempts" / str(self.attempt) / name)
        return found

    @property
    def attempt(self) -> int:
        """The number of the latest attempt that was begun; 0 for none."""
        spec = read_json(self.path / "spec.json")
        number = spec.get("attempt") if spec else None
        return number if isinstance(number, int) else 0

    def set_aside(self, attempt: int) -> bool:
        """Whether that attempt's records are in attempts/."""
        return (self.path / "attempts" / str(attempt)).is_dir()

    def archive(self) -> None:
        """Set the ended attempt aside, so that its records are not taken for the next one's. Safe to
        repeat."""
        folder = private_folder(self.path / "attempts" / str(self.attempt))
        atomic_bytes(folder / "spec.json", (self.path / "spec.json").read_bytes())
        for name in OF_ATTEMPT:
            if (self.path / name).exists():
                (self.path / name).replace(folder / name)
        (self.path / "heartbeat").unlink(missing_ok=True)


def _state(spec: Any, sup: Any, child: Any, exit_record: Any, result: Any) -> str:
    if exit_record is not None:
        return "exited"
    if spec is None or sup is None:
        return "never-started"
    supervisor, engine = ProcessId.from_json(sup), ProcessId.from_json(child)
    if supervisor is not None and supervisor.alive():
        return "starting" if child is None else "running"
    if engine is not None and engine.alive():
        return "orphaned"
    if result is not None:
        return "exited"  # the engine ended in order, and said so itself, after its supervisor had died
    if supervisor is not None and supervisor.boot != boot_id():
        return "lost-reboot"
    return "lost-killed"


def _files(path: Path) -> dict[str, dict[str, int]]:
    found = {}
    for name in STREAMS:
        try:
            status = os.lstat(path / name)
        except OSError:
            continue
        found[name] = {"size": status.st_size, "inode": status.st_ino}
    return found


def _heartbeat_age(path: Path) -> float | None:
    try:
        return max(0.0, round(time.time() - os.lstat(path / "heartbeat").st_mtime, 3))
    except OSError:
        return None


def run_status(rundir: RunDir) -> dict[str, Any]:
    """RunStatus as engine.wire.verbs describes it. Changes nothing."""
    spec, sup, child, stop, exit_record, result = (
        rundir.record(n)
        for n in ("spec.json", "sup.json", "child.json", "stop.json", "exit.json", "result.json")
    )
    return {
        "run": rundir.run,
        "kind": spec.get("kind") if spec else None,
        "attempt": rundir.attempt,
        "state": _state(spec, sup, child, exit_record, result),
        "pid": child.get("pid") if child else None,
        "started_at": spec.get("at") if spec else None,
        "heartbeat_age_s": _heartbeat_age(rundir.path),
        "exit": exit_record,
        "result": result,
        "stop": stop,
        "output": spec.get("output") if spec else None,
        "files": _files(rundir.path),
        "now": time.time(),
    }


def all_runs() -> list[RunDir]:
    """Every run on this host, by name."""
    root = private_folder(state_root() / "runs")
    return [RunDir(p.name, p) for p in sorted(root.iterdir()) if (p / "spec.json").exists()]
