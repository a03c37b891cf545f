"""A home on a host with a server of its own, ended by its records and pids."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.host.processes import ServerProcess, find_servers
from engine.host.servers.program import engine_command
from engine.wire.procid import ProcessId

from ..support import Home, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = engine_command("server-job")


@dataclass
class Place:
    """One server's name, port and program on a host. ``flags``: the stand-in's, in the configuration."""

    home: Home
    script: Path
    port: int
    flags: tuple[str, ...] = ()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    attempts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def argv(self, *flags: str) -> list[str]:
        return [sys.executable, "-S", str(self.script), "--port", str(self.port), *self.flags, *flags]

    def target(self, **more: Any) -> dict[str, Any]:
        return {"name": "small", "url": self.url, "launch": self.argv(), **more}

    def by_hand(self, *flags: str, env: dict[str, str] | None = None) -> ServerProcess:
        """A server that a person started, ready."""
        process = subprocess.Popen(
            self.argv(*flags), cwd=self.script.parent, env={"PATH": "/usr/bin:/bin", **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        wait_for(self.answers)
        found = self.running()
        assert found is not None
        return found

    def answers(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def running(self) -> ServerProcess | None:
        found = [s for s in find_servers() if s.port == self.port and str(self.script) in s.argv]
        assert len(found) <= 1, "a second server was started"
        return found[0] if found else None

    def order(self, action: str, **more: Any) -> dict[str, Any]:
        return {"server": self.target(), "action": action, "grace": [5, 2], "deadline_s": 20, **more}

    def begin(self, action: str, **more: Any) -> None:
        """Start a job and do not wait."""
        self.attempts += 1
        self.home.call(
            "start", run="job-small", attempt=self.attempts, kind="server-job", argv=JOB, grace=[5, 2],
            spec=self.order(action, **more),
        )  # fmt: skip

    def job(self, action: str, **more: Any) -> dict[str, Any]:
        """Run a job to its end; its result, or {"error": ...}."""
        self.begin(action, **more)
        return self.ended()

    def ended(self) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            status = self.home.status("job-small")
            return status if status["state"] not in ("running", "starting") else None

        status = wait_for(over, 30)
        for process in self.started:
            process.poll()  # reap what the job has stopped
        result: dict[str, Any] = status["result"] or {"killed": status}
        return result

    def plan(self, action: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.home.call("server_plan", **self.order(action, **more))["plan"]
        return found

    def state(self, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.home.call("server_status", servers=[self.target(**more)])["servers"][0]
        return found

    @property
    def folder(self) -> Path:
        return self.home.path / ".local/state/hsx/servers/small"

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.home.end_all()
        record = self.home.path / ".local/state/hsx/runs/server-small/child.json"
        if record.exists():
            child = ProcessId.from_json(json.loads(record.read_bytes()))
            if child is not None:
                child.send(signal.SIGKILL)


@pytest.fixture
def place(home: Home, tmp_path: Path) -> Iterator[Place]:
    script = tmp_path / "hsx_capture" / "launch.py"
    script.parent.mkdir()
    shutil.copy(Path(__file__).with_name("standin.py"), script)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    found = Place(home, script, port)
    yield found
    found.end()
