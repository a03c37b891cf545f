"""Driving the console in tests: a driver that plays a recording and notes what it was asked for, and a
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.wire.errors import HsxError
from hsx_tui.app import HsxApp
from hsx_tui.model.driver import Plan, Post
from hsx_tui.model.replay import ReplayDriver
from tests.tui import scenes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.app import App
    from textual.pilot import Pilot
    from textual.widget import Widget

    from hsx_tui.model.messages import Message

SIZES = [(120, 36), (80, 24)]


@dataclass
class Clock:
    """The console's seconds and time of day, which only the test moves."""

    t: float = 1000.0

    def __call__(self) -> float:
        return self.t

    def wall(self) -> datetime.datetime:
        return scenes.BEGIN + datetime.timedelta(seconds=self.t - 1000.0)


@dataclass
class Asked(ReplayDriver):
    """A recording that is played at once, as if it had been watched, on a host that does what it is asked."""

    recording: scenes.Recording
    clock: Clock
    error: Exception | None = None
    asked: list[str] = field(default_factory=list)
    evil: str = ""
    played: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, post: Post) -> None:
        self.post = post
        for t, message in self.recording:
            self.clock.t = 1000.0 + t
            post(message)
        self.played.set()
        await asyncio.Event().wait()

    async def _note(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    async def start(self) -> None:
        await self._note("start")

    async def abort(self) -> None:
        await self._note("abort")

    async def resume(self) -> None:
        await self._note("resume")

    def plan(self, action: str) -> Plan:
        if isinstance(self.error, HsxError) and self.error.what == "no plan":
            raise self.error
        return Plan(
            title=f"ABORT THE RUN{self.evil}",
            host=f"gpu-h200-01{self.evil}",
            facts=(("Run", f"demo, 29 of 80 rows{self.evil}"), ("Process", "pid 4711, started 12:00:00Z")),
            steps=("SIGTERM to pid 4711", f"wait 60 s for the open shard{self.evil}"),
            undo="resume it",
            command="hsx-console run abort demo",
            accept="Abort",
        )

    def retry_now(self) -> None:
        self.asked.append("retry")


def screen_text(app: App[None]) -> str:
    """What stands on the screen, row by row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def shown(widget: Widget) -> str:
    """The rows of one widget's content."""
    height = widget.scrollable_content_region.height
    return "\n".join("".join(s.text for s in widget.render_line(y)) for y in range(height))


@contextlib.asynccontextmanager
async def console(
    recording: scenes.Recording,
    size: tuple[int, int] = (120, 36),
    *,
    ascii_only: bool = False,
    error: Exception | None = None,
    evil: str = "",
    log_lines: int = 10_000,
) -> AsyncIterator[tuple[HsxApp, Pilot[None], Asked]]:
    """A running console on a recording that has been played."""
    clock = Clock()
    driver = Asked(recording, clock, error=error, evil=evil)
    app = HsxApp(driver, ascii_only, log_lines=log_lines, clock=clock, wall=clock.wall)
    async with app.run_test(size=size) as pilot:
        await driver.played.wait()
        await settle(pilot)
        yield app, pilot, driver


async def settle(pilot: Pilot[None]) -> None:
    """Until everything that was posted is drawn."""
    app = pilot.app
    assert isinstance(app, HsxApp)
    await pilot.pause()
    for _ in range(500):
        if not app._drawing and app._overview.log_view._timer is None and not app._acting:
            break
        await pilot.pause(0.01)
    await pilot.pause()


def post(driver: Asked, *messages: Message) -> None:
    """Post more messages, now."""
    for message in messages:
        driver.post(message)
