"""server status, start, stop, restart on the embedded host; the server is a stand-in for SGLang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.host.processes import find_servers

from .support import DemoHost, hsx, spawn, write_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.host.processes import ServerProcess

STANDIN = Path(__file__).parents[1] / "host/servers/standin.py"


class Case:
    """A configuration with one server, and the stand-in that it launches."""

    def __init__(self, host: DemoHost, folder: Path) -> None:
        self.script = folder / "hsx_capture" / "launch.py"
        self.script.parent.mkdir()
        shutil.copy(STANDIN, self.script)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        self.name = f"s{self.port}"
        self.tables: dict[str, dict[str, object]] = {
            "hosts.demo": host.table(python=sys.executable),
            f"servers.{self.name}": {
                "host": "demo",
                "url": f"http://127.0.0.1:{self.port}",
                "launch": [
                    sys.executable,
                    "-S",
                    str(self.script),
                    "--port",
                    str(self.port),
                    "--api-key",
                    "canary",
                ],
            },
        }
        self.config = folder / "config.toml"
        self.write()

    def write(self) -> None:
        write_config(self.config, self.tables)

    def server(self, what: str, *more: str) -> Any:
        return hsx("server", what, "demo", "--config", self.config, *more)

    def running(self) -> list[ServerProcess]:
        return [s for s in find_servers() if str(self.script) in s.argv]


@pytest.fixture
def case(demo_host: DemoHost, tmp_path: Path) -> Iterator[Case]:
    found = Case(demo_host, tmp_path)
    yield found
    for server in found.running():
        server.id.send(signal.SIGKILL)


def test_start_restart_and_stop_need_a_yes_and_do_what_their_plan_says(case: Case) -> None:
    ended = case.server("status", "--json")
    assert ended.code == 1
    assert ended.data["servers"][0]["process"] is None

    ended = case.server("start", "--json")
    assert (ended.code, ended.data["acted"]) == (5, False)
    assert ended.data["plan"]["steps"]
    assert "--yes" in ended.talk
    assert case.running() == []

    ended = case.server("start", "--yes", "--json")
    assert (ended.code, ended.data["result"]["outcome"]) == (0, "done")
    (first,) = case.running()
    assert "load: done" in ended.talk
    ended = case.server("start", "--yes", "--json")
    assert (ended.code, ended.data["acted"]) == (0, False)

    ended = case.server("status", "--json")
    state = ended.data["servers"][0]
    assert (ended.code, state["ready"], state["ours"], state["process"]["pid"]) == (
        0,
        True,
        True,
        first.id.pid,
    )
    assert "canary" not in ended.out + ended.talk

    ended = case.server("restart")
    assert ended.code == 5
    assert f"pid {first.id.pid}" in ended.talk
    assert first.id.alive()
    ended = case.server("restart", "--yes")
    assert ended.code == 0
    (second,) = case.running()
    assert second.id != first.id
    assert "canary" not in ended.out + ended.talk

    assert case.server("stop", "--yes").code == 0
    assert case.running() == []
    assert "nothing to do" in case.server("stop", "--yes").talk


def test_a_console_that_dies_in_the_middle_leaves_a_job_that_goes_on(case: Case) -> None:
    assert case.server("start", "--yes").code == 0
    (first,) = case.running()
    table = case.tables[f"servers.{case.name}"]
    console = spawn("server", "restart", "demo", "--yes", "--config", case.config)
    end = time.monotonic() + 30
    while first.id.alive():
        assert time.monotonic() < end, "the server was not stopped"
        time.sleep(0.01)
    console.kill()
    console.communicate()
    while not case.server("status", "--json").data["servers"][0]["ready"]:
        assert time.monotonic() < end, "the server did not come back"
    (second,) = case.running()
    assert second.argv == tuple(table["launch"])  # type: ignore[arg-type]


def test_a_read_only_host_shows_its_servers_and_lets_nothing_be_done(case: Case) -> None:
    case.tables["hosts.demo"]["read_only"] = True
    case.write()
    assert case.server("status", "--json").code == 1
    for what in ("start", "stop", "restart"):
        ended = case.server(what, "--yes")
        assert ended.code == 5
        assert "was left as it is" in ended.talk
    assert case.running() == []


def test_a_command_line_that_is_not_clear_is_a_usage_error(case: Case) -> None:
    assert case.server("start", "--restore").code == 2
    assert case.server("restart", "--restore", "--capture", "x").code == 2
    assert case.server("restart", "--capture", "unknown", "--yes").code == 2
    assert case.server("start", "--server", "unknown").code == 2
    case.tables["servers.other"] = {"host": "demo", "url": "http://127.0.0.1:9"}
    case.write()
    ended = case.server("start")
    assert ended.code == 2
    assert "--server" in ended.talk


def test_a_crash_while_loading_ends_the_verb_at_once_with_the_logs_line(case: Case) -> None:
    table = case.tables[f"servers.{case.name}"]
    launch = table["launch"]
    assert isinstance(launch, list)
    table["launch"] = [*launch, "--crash", "loading"]
    case.write()
    began = time.monotonic()
    ended = case.server("start", "--yes")
    assert ended.code == 1
    assert "boom" in ended.talk
    assert time.monotonic() - began < 15


def test_a_capture_restart_shows_the_difference_line_by_line(case: Case) -> None:
    case.tables[f"servers.{case.name}"]["dump_dir"] = f"/dev/shm/hsx-{os.getuid()}-none"
    case.tables |= {
        "targets.small": {"model": "/models/tiny", "taps": [1, 3]},
        "datasets.small": {"path": "x.jsonl"},
        "runs.small": {"dataset": "small", "store": "stores/small", "server": case.name, "target": "small"},
    }
    case.write()
    assert case.server("start", "--yes").code == 0
    (before,) = case.running()
    ended = case.server("restart", "--capture", "small", "--json")
    assert ended.code == 5
    assert "+ --return-aux-hidden-state-layer-ids 1 3" in ended.talk
    assert "+ --return-aux-hidden-state-layer-ids 1 3" in ended.data["plan"]["difference"]
    assert "canary" not in json.dumps(ended.data) + ended.talk
    assert before.id.alive()
