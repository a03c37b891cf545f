"""Jobs on a real SGLang server: an ordinary one becomes a capture server and is put back as it was, and a job
that is killed between stop and start is finished by the same verb."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.host.processes import ServerProcess, find_servers
from engine.host.servers.program import engine_command
from tests.host.support import Home, wait_for
from tests.sglang import tiny
from tests.sglang.conftest import SMALL
from tests.sglang.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.sglang
TAPS = [0, 2]
LOAD_S = 300


class Ordinary(Server):
    """A server without the plugin."""

    def environment(self) -> dict[str, str]:
        ours = ("HSX_DUMP_DIR", "PYTHONPATH")
        found = {name: value for name, value in super().environment().items() if name not in ours}
        return {**found, "SGLANG_PLUGINS": "hsx_cpu_shim"}


class Jobs:
    """Jobs on one server by the host's verbs."""

    def __init__(self, home: Home, server: Server) -> None:
        self.home, self.server, self.attempt = home, server, 0
        self.target = {"name": "real", "url": server.url, "dump_dir": str(server.dump_dir)}
        self.shared: set[Path] = set()
        self.journal = home.path / ".local/state/hsx/servers/real/job.json"

    def begin(self, action: str, **more: Any) -> None:
        self.attempt += 1
        order = {"server": self.target, "action": action, "grace": [30, 5], "deadline_s": LOAD_S, **more}
        self.home.call(
            "start", run="job-real", attempt=self.attempt, kind="server-job", grace=[5, 2],
            argv=engine_command("server-job"), spec=order,
        )  # fmt: skip

    def end(self) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            status = self.home.status("job-real")
            return status if status["state"] not in ("starting", "running") else None

        status = wait_for(over, LOAD_S + 60)
        if self.server.process is not None:
            self.server.process.poll()  # reap it once it was stopped
        assert status["result"] is not None, status
        result: dict[str, Any] = status["result"]
        return result

    def steps(self) -> dict[str, Any]:
        data: dict[str, Any] = (
            json.loads(self.journal.read_bytes()) if self.journal.exists() else {"steps": {}}
        )
        return dict(data["steps"])

    def running(self) -> ServerProcess:
        (found,) = [s for s in find_servers() if s.port == self.server.port]
        self.shared |= _shared_memory((found.id.pid, *found.children))
        return found

    def end_all(self) -> None:
        for server in find_servers():
            if server.port == self.server.port:
                server.id.send(signal.SIGTERM)
                wait_for(lambda pid=server.id: not pid.alive(), 60)  # type: ignore[misc]
        self.home.end_all()
        for file in self.shared:  # every stop leaves some behind
            file.unlink(missing_ok=True)


def _shared_memory(pids: Sequence[int]) -> set[Path]:
    """The files of /dev/shm that these processes have mapped: ours to remove, by name."""
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    names = {line.split(None, 5)[5].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
    return {Path(name) for name in names if Path(name).parent == Path("/dev/shm")}


@pytest.fixture
def jobs(tmp_path: Path, models: Path) -> Iterator[Jobs]:
    (tmp_path / "home").mkdir(mode=0o700)
    dumps = Path(f"/dev/shm/hsx-{os.geteuid()}-{secrets.token_hex(6)}")
    server = Ordinary(
        tiny.make("llama", models), dumps, tmp_path / "server.log", (0,), (*SMALL, "--disable-radix-cache"),
        capture=False,
    )  # fmt: skip
    found = Jobs(Home(tmp_path / "home"), server)
    try:
        server.start().wait()
        yield found
    finally:
        found.end_all()
        server.stop()
        shutil.rmtree(dumps, ignore_errors=True)


def test_an_ordinary_server_captures_after_a_restart_and_is_put_back_as_it_was(jobs: Jobs) -> None:
    before = jobs.running()

    jobs.begin("restart", taps=TAPS, expected=before.id.to_json())
    wait_for(lambda: "stop" in jobs.steps(), 60)
    for record in ("sup.json", "child.json"):
        jobs.home.kill("job-real", record)
    assert "start" not in jobs.steps()  # killed between stop and start
    jobs.begin("restart", taps=TAPS)
    result = jobs.end()
    assert (result["outcome"], result["resumed"], result["differs"]) == ("done", True, [])
    captured = jobs.running()
    assert captured.id != before.id
    assert [beacon["taps"] for beacon in result["capture"] if beacon.get("taps")] == [TAPS]

    for row in range(3):
        rid = f"hsx-jobs-{row:08d}-01_"
        body = {
            "rid": rid,
            "input_ids": [5, 6, 7 + row],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        reply = httpx.post(f"{jobs.server.url}/generate", json=body, timeout=60, trust_env=False)
        assert reply.status_code == 200
        wait_for((jobs.server.dump_dir / f"{rid}.safetensors").exists, 20)

    jobs.begin("restart", restore=True)
    result = jobs.end()
    assert (result["outcome"], result["differs"], result["capture"]) == ("done", [], [])
    after = jobs.running()
    assert (after.argv, after.env, after.cwd) == (before.argv, before.env, before.cwd)
    loads = (jobs.journal.parent / "loads.jsonl").read_text().splitlines()
    assert len(loads) == 2
    assert "weights" in json.loads(loads[-1])["phases"]
