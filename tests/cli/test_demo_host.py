"""The demo's parts against a real host, without its model: stopping, following, verifying, foreign text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from engine.wire.errors import HsxError
from engine.wire.procid import ProcessId
from hsx_tui.deploy.embedded import ensure_host, read_host, stop_host
from hsx_tui.model.messages import EngineEvent, Message, Notice, ServerLog
from hsx_tui.services.demo_driver import DemoDriver
from hsx_tui.services.demo_options import DemoOptions
from hsx_tui.services.headless import say_message
from hsx_tui.services.runs import Launch, how_it_ended, result_of

from .support import DemoHost, hsx

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVIL = "\x1b[2Jtext\x1b]52;c;Zm9v\x07"


def test_stop_ends_what_a_dead_host_left(tmp_path: Path) -> None:
    host = DemoHost(tmp_path / "demo")
    asyncio.run(ensure_host(host.workdir))
    host.start("server-1", "wait")
    try:
        record = ProcessId.from_json(read_host(host.workdir))
        child = host.workdir / "home/.local/state/hsx/runs/server-1/child.json"
        program = ProcessId.from_json(json.loads(child.read_bytes()))
        assert record is not None and program is not None
        record.send(signal.SIGKILL)
        while record.alive():
            os.sched_yield()
        assert read_host(host.workdir) is None
        assert program.alive()
        stopped = hsx("demo", "--stop", "--json", "--workdir", host.workdir)
        assert (stopped.code, stopped.data["stopped"]) == (0, True)
        assert not program.alive()
        assert read_host(host.workdir) is None
        again = hsx("demo", "--stop", "--json", "--workdir", host.workdir)
        assert again.data["stopped"] is False
    finally:
        host.end_runs()
        asyncio.run(stop_host(host.workdir))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what is awaited happens on the host
            await asyncio.sleep(0.02)


@pytest.fixture
def options(demo_host: DemoHost, tmp_path: Path) -> DemoOptions:
    return DemoOptions(demo_host.workdir, tmp_path, samples=3, model=str(tmp_path))


async def test_a_resume_by_another_console_is_followed(demo_host: DemoHost, options: DemoOptions) -> None:
    heard: list[Message] = []
    driver = DemoDriver(options)
    driver._post = heard.append
    driver._server_up.set()  # both hold once everything is prepared and the run has been started
    driver._begun = True

    def events(kind: str) -> int:
        return sum(isinstance(m, EngineEvent) and m.event["type"] == kind for m in heard)

    await demo_host.begin(options.run, "wait")
    tasks = [asyncio.create_task(work) for work in (driver._events(), driver._observe())]
    try:
        await until(lambda: events("progress") > 0)
        await driver.abort()
        await until(lambda: events("run_finished") > 0 and driver._status.get("state") == "exited")
        seen = max(m.event["seq"] for m in heard if isinstance(m, EngineEvent))
        await demo_host.begin(options.run, "complete", attempt=2)
        await until(lambda: any(isinstance(m, EngineEvent) and m.event["seq"] > seen for m in heard))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await driver.demo.close()


async def test_traffic_that_cannot_be_stopped_is_said(tmp_path: Path) -> None:
    """The host has ended meanwhile."""
    heard: list[Message] = []
    driver = DemoDriver(DemoOptions(tmp_path / "no host", tmp_path))
    driver._post = heard.append
    await driver._stop_traffic()
    assert [m.level for m in heard if isinstance(m, Notice)] == ["warning"]


async def test_a_new_look_waits_for_the_old_one_and_begins_again(options: DemoOptions) -> None:
    driver = DemoDriver(options)
    runs = driver.demo.runs
    # A store that is not there: what counts here is which attempt it is that ended.
    what = Launch(options.verify_run(recompute=False), "verify", ["verify", "/nowhere/store", "--json"])
    try:
        await driver.demo.link.session()
        first = await runs.launch(what, 1)
        assert first["attempt"] == 1
        with contextlib.suppress(HsxError):
            await runs.anew(what)
        assert (await runs.status(what.run))["attempt"] == 2
    finally:
        await driver.demo.close()
    assert options.verify_run(recompute=True) != options.verify_run(recompute=False)


def test_what_a_host_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say_message(ServerLog([f"Load weight {EVIL}"]))
    say_message(Notice("warning", EVIL))
    said = capsys.readouterr().err
    assert "text" in said and "\x1b" not in said and "Zm9v" not in said


@pytest.mark.parametrize(
    "status",
    [
        {"run": EVIL, "result": {"error": {"kind": "RemoteError", "what": EVIL, "why": EVIL, "next": EVIL}}},
        {"run": EVIL, "exit": {"error": EVIL}},
        {"run": EVIL, "exit": {"signal": EVIL}},
        {"run": EVIL, "exit": {"rc": EVIL}},
        {"run": EVIL, "exit": EVIL},
    ],
)
def test_the_end_of_a_run_is_told_in_clean_text(status: dict[str, Any]) -> None:
    with pytest.raises(HsxError) as caught:
        result_of(status)
    assert str(caught.value).isprintable()
    assert str(how_it_ended(status)).isprintable()


def test_an_error_is_printed_in_clean_text(tmp_path: Path) -> None:
    ended = hsx("--config", tmp_path / EVIL, "status")
    assert ended.code == 2
    assert "\x1b" not in ended.talk
