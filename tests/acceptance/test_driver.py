"""The driver behind the screen, on a tiny model: what the user ended stays ended; --abort-at ends once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from hsx_tui.model.messages import EngineEvent, Message, RunStatusSeen
from hsx_tui.services.demo_driver import DemoDriver
from hsx_tui.services.demo_options import DemoOptions
from tests.acceptance.cli import demo
from tests.models import CACHE, TINY_TAPS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(200)]


async def until(holds: Callable[[], bool], work: asyncio.Task[None]) -> None:
    async with asyncio.timeout(90):
        while not holds():
            if work.done():
                work.result()
            await asyncio.sleep(0.02)


async def test_connecting_again_does_not_resume_what_the_user_aborted(
    tiny_workdir: Path, tiny_model: Path
) -> None:
    heard: list[Message] = []
    options = DemoOptions(
        tiny_workdir, CACHE, samples=70, model=str(tiny_model), taps=TINY_TAPS, concurrency=1
    )
    driver = DemoDriver(options)

    def last_status() -> RunStatusSeen:
        return [m for m in heard if isinstance(m, RunStatusSeen)][-1]

    work = asyncio.create_task(driver.run(heard.append))
    await until(lambda: any(isinstance(m, EngineEvent) and m.event["type"] == "canary" for m in heard), work)
    await driver.abort()
    await until(lambda: last_status().status["state"] == "exited", work)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)

    heard.clear()
    work = asyncio.create_task(driver.run(heard.append))
    try:
        await until(lambda: any(isinstance(m, RunStatusSeen) for m in heard), work)
        status = await driver.demo.runs.status(options.run)
        assert (status["state"], status["attempt"]) == ("exited", 1)
        assert status["result"]["outcome"] == "aborted"
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def test_the_same_command_aborts_once_and_then_resumes(tiny_workdir: Path, tiny_model: Path) -> None:
    flags = ["--samples", "66", "--abort-at", "30", "--model", str(tiny_model), "--taps", "1 3 4"]
    flags += ["--shard-bytes", "65536", "--concurrency", "1", "--foreign-traffic"]
    first = demo(tiny_workdir, *flags)
    assert first.code == 1, first.talk
    assert "aborting at" in first.talk
    assert 66 * 0.3 <= first.result["done"] < 66
    second = demo(tiny_workdir, *flags)
    assert second.code == 0, second.talk
    assert "aborting at" not in second.talk
    assert second.result["done"] == 66
