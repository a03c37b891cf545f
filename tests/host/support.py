"""A home folder on "a host", and its verbs called as the console calls them: one process a call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine
from engine.host.rundir import RunDir, run_status
from engine.wire.errors import from_json
from engine.wire.procid import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(engine.__file__).parent.parent

SERVE = (
    "import json, sys\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from engine.host.verbs import main\n"
    "sys.exit(main(json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer, sys.stdout.buffer))\n"
)


def wait_for(what: Callable[[], Any], limit_s: float = 10) -> Any:
    """The first true value of ``what``; fails after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not (value := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return value


@dataclass
class Home:
    """One user's home on a host."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)

    def spawn(self, verb: str, **args: Any) -> subprocess.Popen[bytes]:
        """A call that is under way; its stdin is open."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(self.path), **self.env},
        )
        assert process.stdin is not None
        process.stdin.write(
            json.dumps({"nonce": "n0", "engine": "", "verb": verb, "args": args}).encode() + b"\n"
        )
        process.stdin.flush()
        return process

    def call(self, verb: str, payload: bytes = b"", **args: Any) -> dict[str, Any]:
        """The answer of a verb; its error raised."""
        out, err = self.spawn(verb, **args).communicate(payload, timeout=30)
        answer, end, rest = out.decode().split("\n")
        assert (end, rest) == (">>n0", ""), err.decode()
        data: dict[str, Any] = json.loads(answer)
        if not data["ok"]:
            raise from_json(data["error"])
        return data

    def start(self, run: str, program: str, attempt: int = 1, *argv: str, **more: Any) -> dict[str, Any]:
        """Start ``program`` (Python source) as a run."""
        args = {
            "kind": "extract",
            "argv": [sys.executable, "-I", "-u", "-c", program, *argv],
            "spec": {},
            **more,
        }
        return self.call("start", run=run, attempt=attempt, **args)

    def status(self, run: str) -> dict[str, Any]:
        """As the verb tells it, without the cost of a process."""
        return run_status(RunDir(run, self.dir(run)))

    def wait_state(self, run: str, *states: str) -> dict[str, Any]:
        """The status once it is one of ``states``."""
        found: dict[str, Any] = wait_for(lambda: (s := self.status(run))["state"] in states and s)
        return found

    def dir(self, run: str) -> Path:
        return self.path / ".local/state/hsx/runs" / run

    def process(self, run: str, record: str) -> ProcessId:
        """Whom sup.json or child.json means."""
        found = ProcessId.from_json(json.loads((self.dir(run) / record).read_bytes()))
        assert found is not None
        return found

    def kill(self, run: str, record: str) -> None:
        """kill -9, and wait until it is gone."""
        process = self.process(run, record)
        assert process.send(signal.SIGKILL)
        wait_for(lambda: not process.alive())

    def end_all(self) -> None:
        """End whatever this home's runs still have, by their records."""
        for record in sorted(
            self.path.glob(".local/state/hsx/runs/*/*.json"), key=lambda p: p.name == "child.json"
        ):
            process = ProcessId.from_json(json.loads(record.read_bytes()))
            if record.name in ("sup.json", "child.json") and process is not None:
                process.send(signal.SIGKILL)


def lines_of(path: Path) -> list[str]:
    """The lines of a file that may not be there yet."""
    return path.read_text().splitlines() if path.exists() else []


def on_small_disk(folder: Path, kib: int, argv: list[str]) -> dict[str, Any]:
    """Run ``argv`` (it prints JSON) with a tmpfs of ``kib`` KiB mounted on ``folder``."""
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    mount = f'mount -t tmpfs -o size={kib}k,mode=700 tmpfs "$0" && exec "$@"'
    done = subprocess.run(
        [*unshare, "/bin/sh", "-c", mount, str(folder), *argv], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"this test needs to mount a tmpfs (unshare --mount): {done.stderr.decode()}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found
