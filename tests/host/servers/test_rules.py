"""What makes a server not ours, how a unit is driven, who listens where, what a log may claim."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from engine.host.processes import ServerProcess
from engine.host.servers.command import MASK, port_of
from engine.host.servers.description import Description, difference
from engine.host.servers.loads import record, usual
from engine.host.servers.ours import refusal, systemctl
from engine.host.servers.ports import listeners, parse_listeners
from engine.host.servers.target import target_from
from engine.host.servers.wanted import order_from, wanted
from engine.host.servers.watching import LogWatch
from engine.wire.errors import Refused, SpecError
from engine.wire.loading import Loading, fatal
from engine.wire.procid import ProcessId

if TYPE_CHECKING:
    from pathlib import Path

OURS = ServerProcess(
    ProcessId(10, 20, "boot"), os.geteuid(), "me", ("/v/python", "-m", "sglang.launch_server"), {}, "/",
    "/v/python", 30000, "/m", 0.0, (1,), (), None, False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"uid": os.geteuid() + 1, "user": "other"}, "belongs to user other"),
        ({"container": True}, "container"),
        ({"env": None}, "cannot be described"),
        ({"argv": ()}, "cannot be described"),
        ({"unit": "llm.service"}, "under the systemd unit llm.service"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    refused = refusal(dataclasses.replace(OURS, **change), None)
    assert refused is not None
    assert told in refused.what
    assert refused.next_step


def test_a_server_of_ours_is_let_through_also_under_its_configured_unit() -> None:
    assert refusal(OURS, None) is None
    assert refusal(dataclasses.replace(OURS, unit="ssh.service"), None) is None
    assert refusal(dataclasses.replace(OURS, unit="hsx-run.service"), None) is None
    for unit in ("llm", "llm.service"):
        assert refusal(dataclasses.replace(OURS, unit="llm.service"), unit) is None
    assert refusal(dataclasses.replace(OURS, unit="llm.service"), "other") is not None


def test_a_unit_is_driven_without_a_shell_or_a_password() -> None:
    assert systemctl("stop", "llm", user=True) == [
        "systemctl", "--user", "--no-ask-password", "stop", "--", "llm.service",
    ]  # fmt: skip
    assert systemctl("start", "llm.service", user=False)[1:3] == ["--no-ask-password", "start"]


@pytest.mark.parametrize("unit", ["-x", "a b", "a;b", "../x", "x\n"])
def test_a_unit_that_is_no_name_is_refused(unit: str) -> None:
    with pytest.raises(SpecError):
        target_from({"name": "a", "url": "http://127.0.0.1:1", "unit": unit})


@pytest.mark.parametrize(
    "order",
    [
        {"action": "kill"},
        {"action": "start", "restore": True},
        {"action": "restart", "restore": True, "taps": [1]},
        {"action": "restart", "taps": [-1]},
        {"action": "restart", "taps": [True]},
        {"action": "restart", "expected": 3},
    ],
)
def test_an_order_that_is_not_clear_is_refused(order: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        order_from({"server": {"name": "a", "url": "http://127.0.0.1:1"}, **order})


def test_a_server_is_started_at_the_port_of_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    order = order_from({"server": {"name": "a", "url": "http://127.0.0.1:4100"}, "action": "restart"})
    any_port = Description(("p", "demo", "serve", "--port", "0"), {}, "/", 0)
    assert port_of(wanted(order, any_port).argv) == 4100
    same = Description(("p", "--port", "4100"), {}, "/", 4100)
    assert wanted(order, same) == same
    with pytest.raises(Refused, match="port 4200"):
        wanted(order, Description(("p", "--port", "4200"), {}, "/", 4200))
    with pytest.raises(Refused, match="nobody saw how it was started"):
        wanted(order, None)


def test_a_capture_restart_is_refused_where_it_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    server = {"name": "a", "url": "http://127.0.0.1:30000", "dump_dir": "/dev/shm/hsx-x"}
    order = order_from({"server": server, "action": "restart", "taps": [1]})
    drafter = Description((*OURS.argv, "--speculative-algorithm", "EAGLE3"), {}, "/", 30000)
    with pytest.raises(Refused, match="speculates"):
        wanted(order, drafter)
    isolated = Description(("/v/python", "-E", *OURS.argv[1:]), {"SGLANG_PLUGINS": "mine"}, "/", 30000)
    after = wanted(order, isolated)
    assert after.argv[:2] == ("/v/python", "-E")
    assert after.argv[2].endswith("/hsx_capture/launch.py")  # -E ignores PYTHONPATH
    assert after.env["SGLANG_PLUGINS"] == "mine,hsx_capture"


def test_a_listener_is_seen_and_other_states_are_not() -> None:
    row = "   0: 0100007F:{port} 00000000:0000 {state} 0:0 0:0 0 0 0 4242 1"
    table = "head\n" + row.format(port="7530", state="0A") + "\n" + row.format(port="7531", state="01")
    assert parse_listeners(table, 0x7530) == {"4242"}
    assert parse_listeners(table, 0x7531) == set()
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        assert len(listeners(port)) == 1
    assert listeners(port) == set()


@pytest.mark.parametrize(
    ("line", "death"),
    [
        ("[2026-01-01 10:00:00] Scheduler hit an exception: Traceback", True),
        ("[2026-01-01 10:00:00 TP0] Subprocess scheduler_0 (pid=12) crashed with exit code -9.", True),
        ("[2026-01-01 10:00:00] SIGQUIT received. signum=None", True),
        ("Scheduler hit an exception: Traceback", False),
        ("[2026-01-01 10:00:00] Receive: text='[2026-01-01 10:00:00] SIGQUIT received'", False),
        ("SIGQUIT received", False),
    ],
)
def test_only_the_servers_own_line_tells_of_its_death(line: str, death: bool) -> None:
    assert fatal(line) is death


def test_a_log_is_read_in_whole_lines_and_anew_when_it_shrank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    watch = LogWatch(log)
    assert watch.look() == Loading()
    log.write_bytes(b"[2026-01-01 10:00:00] Load weight be")
    assert not watch.look().begun
    with log.open("ab") as file:
        file.write(b"gin.\n\xff\x1b[2J\n[2026-01-01 10:00:09] SIGQUIT received.\n")
    assert watch.look().begun
    assert "SIGQUIT" in watch.death
    log.write_bytes(b"[2026-01-01 11:00:00] server_args=x\n")
    watch.look()
    assert watch.death == ""


def test_the_usual_time_is_the_median_of_loads_of_the_same_argv(tmp_path: Path) -> None:
    one = Description(("a",), {}, "/", 1, "/m")
    other = dataclasses.replace(one, argv=("b",))
    assert usual(tmp_path, one) is None
    for seconds in (10.0, 50.0, 12.0):
        record(tmp_path, one, Loading(), seconds)
    record(tmp_path, other, Loading(), 99.0)
    with (tmp_path / "loads.jsonl").open("ab") as file:
        file.write(b'{"torn')
    found = usual(tmp_path, one)
    assert found is not None
    assert (found["total_s"], found["count"]) == (12.0, 3)


def test_a_difference_shows_flags_with_their_values_and_no_secret() -> None:
    old = Description(("p", "--api-key", "canary", "--port", "1"), {"A": "1"}, "/", 1)
    new = Description(("p", "--api-key", "canary", "--port", "2"), {"A": "2"}, "/x", 2)
    assert difference(old, old) == []
    assert difference(old, new) == ["- --port 1", "+ --port 2", "- A=1", "+ A=2", "- cwd /", "+ cwd /x"]
    assert difference(Description((), {}, "/", 1), old)[1] == f"+ --api-key {MASK}"
