"""The log: follows, stays where the reader is, bounded, and quick with what is long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from hsx_tui.model.messages import Message, ServerLog
from tests.tui.driving import SIZES, console, post, screen_text, settle, shown

if TYPE_CHECKING:
    from hsx_tui.widgets.tail_log import TailLog
    from tests.tui import scenes


def lines(first: int, last: int) -> Message:
    return ServerLog([f"L{i}." for i in range(first, last)], "engine")


def follows(log: TailLog) -> bool:
    return log.follow


BASE: scenes.Recording = [(0.0, lines(0, 100))]


@pytest.mark.parametrize("size", SIZES)
async def test_a_paused_view_stays_on_its_line_when_the_ring_is_full(size: tuple[int, int]) -> None:
    async with console(BASE, size, log_lines=100) as (app, pilot, driver):
        log = app._overview.log_view
        assert "L99." in shown(log)
        await pilot.press("p")
        for _ in range(20):
            await pilot.press("up")
        await settle(pilot)
        top = shown(log).split("\n")[0]
        for i in range(100, 130, 10):
            post(driver, lines(i, i + 10))
            await settle(pilot)
        assert shown(log).split("\n")[0] == top
        assert "PAUSED · 30 new below" in screen_text(app)
        post(driver, lines(130, 400))  # now the line itself is evicted: the oldest that is kept is shown
        await settle(pilot)
        assert "L300." in shown(log).split("\n")[0]
        assert log.first == 300
        await pilot.press("f")
        await settle(pilot)
        assert "L399." in shown(log)
        assert "FOLLOWING" in screen_text(app)


async def test_up_stops_following_and_end_begins_it_again() -> None:
    async with console(BASE) as (app, pilot, driver):
        log = app._overview.log_view
        await pilot.press("up")
        assert not follows(log)
        before = shown(log)
        post(driver, lines(100, 110))
        await settle(pilot)
        assert shown(log) == before
        await pilot.press("end")
        post(driver, lines(110, 111))
        await settle(pilot)
        assert follows(log) and log.unseen == 0
        assert "L110." in shown(log)


async def test_the_wheel_does_the_same() -> None:
    async with console(BASE) as (app, pilot, _):
        log = app._overview.log_view
        from textual import events

        def wheel(cls: type[events.MouseScrollUp] | type[events.MouseScrollDown]) -> None:
            log.post_message(cls(log, 5, 3, 0, 0, 0, False, False, False, 5, 3))

        wheel(events.MouseScrollUp)
        await settle(pilot)
        assert not follows(log)
        assert "L99." not in shown(log)
        wheel(events.MouseScrollDown)
        await settle(pilot)
        assert follows(log)
        assert "L99." in shown(log)


async def test_nothing_is_lost_while_paused() -> None:
    async with console(BASE) as (app, pilot, driver):
        log = app._overview.log_view
        await pilot.press("home")
        for i in range(100, 1100, 100):
            post(driver, lines(i, i + 100))
        await settle(pilot)
        assert "L0." in shown(log).split("\n")[0]
        assert (log.seen, log.first, log.unseen) == (1100, 0, 1000)


async def test_a_line_of_90_000_characters_is_cut_and_quick() -> None:
    async with console(BASE) as (app, pilot, driver):
        log = app._overview.log_view
        began = time.process_time()
        post(driver, ServerLog(["x" * 90_000]))
        log._flush()
        shown(log)
        assert time.process_time() - began < 0.05
        await settle(pilot)
        assert "x" * 50 in shown(log)
        await pilot.press("right", "right")
        assert "extract" not in shown(log)
        log._sideways(1_000_000)
        assert "chars)" in shown(log), "the end of the line can be reached, and not more than it"
        log._sideways(-1_000_000)
        assert "extract L99." in shown(log)


async def test_a_backlog_of_a_million_lines_is_a_tail() -> None:
    async with console(BASE) as (app, _, driver):
        log = app._overview.log_view
        began = time.process_time()
        for _ in range(20):
            driver.post(ServerLog([f"line {i} of the backlog" for i in range(5_000)], "engine"))
        log._flush()
        assert time.process_time() - began < 3.0  # 100,000 lines: 30 us each at the very most
        assert log.seen == 100_100
        assert log.first == 90_100


async def test_wide_and_joined_characters_keep_the_border_straight() -> None:
    odd = [
        "日本語のログ 🚀 done",
        "é combining e\u0301",
        "family 👨\u200d👩\u200d👧 end",
        "warn \u26a0\ufe0f sign",
    ]
    async with console([(0.0, ServerLog(odd, "engine"))]) as (app, _, _):
        from rich.cells import cell_len

        rows = screen_text(app).split("\n")
        assert {cell_len(row) for row in rows} == {120}
        assert "日本語のログ" in "\n".join(rows)


async def test_no_lines_yet_says_so() -> None:
    async with console([]) as (app, _, _):
        assert "no lines yet" in screen_text(app)


async def test_a_selection_is_the_text_that_is_drawn() -> None:
    async with console(BASE) as (app, pilot, _):
        log = app._overview.log_view
        await pilot.mouse_down(log, offset=(2, 1))
        await pilot.hover(log, offset=(40, 2))
        await pilot.mouse_up(log, offset=(40, 2))
        await settle(pilot)
        selected = app.screen.get_selected_text()
        assert selected is not None
        assert "extract L" in selected
