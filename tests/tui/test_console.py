"""The console as a user drives it: keys, dialogs, stale panels, hostile text, both sizes."""

from __future__ import annotations

import pytest
from textual.widgets import Button

from engine.wire.errors import Refused
from hsx_tui.model.messages import (
    Connection,
    EngineEvent,
    HostFactsSeen,
    Link,
    Notice,
    RunStatusSeen,
    ServerLog,
    Step,
    StepState,
)
from hsx_tui.screens.dialog import PlanDialog
from hsx_tui.screens.help import HelpScreen
from hsx_tui.screens.overview import OverviewScreen, layout_of
from hsx_tui.screens.run_menu import RunMenu
from tests.tui import scenes
from tests.tui.driving import SIZES, console, post, screen_text, settle

EVIL = "x\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b1m\u202e[/] [/foo] [red]arr[node_modules] [@click=app.exit]c[/] [b "


@pytest.mark.parametrize("size", SIZES)
async def test_the_overview_shows_the_run(size: tuple[int, int]) -> None:
    async with console(scenes.running(30), size) as (app, _, _):
        text = screen_text(app)
        for part in (
            "gpu-h200-01", "● CONNECTED", "● HEALTHY", "● RUNNING", "done 24 / 80", "5 not yet durable",
            "36.2 %", "1.32 samples/s", "396 tok/s", "ETA", "▲ MISMATCH", "row 12", "FOLLOWING",
            "1 extracted", "q Quit", "? Help", "12:00:29Z", "s ago",
        ):  # fmt: skip
            assert part in text, part
        rows = text.split("\n")
        assert len(rows) == size[1]
        assert rows[-1].rstrip().endswith("q Quit")
        for left, right in ("┌┐", "└┘"):
            assert text.count(left) == text.count(right) == 5


@pytest.mark.parametrize("size", SIZES)
async def test_before_the_run_the_steps_and_the_loading_phases_are_shown(size: tuple[int, int]) -> None:
    async with console(scenes.loading(), size) as (app, _, _):
        text = screen_text(app)
        for part in ("◐ LOADING 42%", "weights", "● embedded host", "◐ server loading", "◌ dataset", "◌ run"):
            assert part in text, part


@pytest.mark.parametrize("size", SIZES)
async def test_abort_asks_with_the_plan_and_the_focus_on_cancel(size: tuple[int, int]) -> None:
    async with console(scenes.running(30), size) as (app, pilot, driver):
        await pilot.press("x")
        assert isinstance(app.screen, RunMenu)
        await pilot.press("a")
        assert isinstance(app.screen, PlanDialog)
        await settle(pilot)
        text = screen_text(app)
        for part in (
            "ABORT THE RUN", "gpu-h200-01", "pid 4711", "1. SIGTERM to pid 4711", "2. wait 60 s", "Undo",
            "resume it", "hsx-console run abort demo", "Cancel  esc", "Abort  y",
        ):  # fmt: skip
            assert part in text, part
        assert app.focused is not None and app.focused.id == "cancel"
        await pilot.press("enter")
        assert isinstance(app.screen, OverviewScreen)
        assert driver.asked == []
        await pilot.press("x", "a", "y")
        await settle(pilot)
        assert driver.asked == ["abort"]
        assert "abort accepted" in screen_text(app)


@pytest.mark.parametrize("key", ["escape", "n"])
async def test_a_dialog_is_left_without_doing_anything(key: str) -> None:
    async with console(scenes.running(30)) as (app, pilot, driver):
        await pilot.press("x", "a", key)
        assert isinstance(app.screen, OverviewScreen)
        assert driver.asked == []


async def test_the_mouse_can_answer_a_dialog() -> None:
    async with console(scenes.running(30)) as (app, pilot, driver):
        await pilot.press("x", "a")
        await pilot.click("#cancel")
        assert driver.asked == []
        await pilot.press("x", "a")
        await pilot.click("#accept")
        await settle(pilot)
        assert driver.asked == ["abort"]
        assert isinstance(app.screen, OverviewScreen)


async def test_no_single_key_of_the_overview_does_anything_dangerous() -> None:
    async with console(scenes.running(30)) as (app, pilot, driver):
        for key in "abcdeghijklmnopstuvwyz0123456789":
            await pilot.press(key)
        assert driver.asked == []
        assert isinstance(app.screen, OverviewScreen)


async def test_what_cannot_be_done_says_why_and_does_nothing() -> None:
    async with console(scenes.running(30)) as (app, pilot, driver):
        await pilot.press("x")
        await settle(pilot)
        assert "not now: it is running" in screen_text(app)
        await pilot.press("s", "r")
        assert driver.asked == []
        assert isinstance(app.screen, RunMenu)


async def test_start_and_resume_act_and_say_how_to_undo() -> None:
    async with console([(0.0, scenes.connected()), (0.0, scenes.facts(0.0))]) as (app, pilot, driver):
        await pilot.press("x", "s")
        await settle(pilot)
        assert driver.asked == ["start"]
        assert "start accepted; to undo: abort it" in screen_text(app)
    ended = [(30.0, scenes.status(30.0, "exited", ended={"rc": 75}))]
    async with console([*scenes.running(30), *ended]) as (app, pilot, driver):
        assert "ABORTED" in screen_text(app)
        await pilot.press("x", "r")
        await settle(pilot)
        assert driver.asked == ["resume"]


@pytest.mark.parametrize("size", SIZES)
async def test_an_error_stays_in_place_until_it_is_dismissed(size: tuple[int, int]) -> None:
    error = Refused("cannot abort the run", f"somebody else holds it {EVIL}", "ask them")
    async with console(scenes.running(30), size, error=error) as (app, pilot, driver):
        await pilot.press("x", "a", "y")
        await settle(pilot)
        post(driver, scenes.facts(31.0))
        await settle(pilot)
        text = screen_text(app)
        assert "✖ cannot abort the run: somebody else holds it x[/]" in text.replace("\ufffd", "")
        assert "ask them" in text and "esc dismiss" in text
        await pilot.press("escape")
        await settle(pilot)
        assert "cannot abort" not in screen_text(app)


async def test_an_unexpected_error_of_the_driver_is_a_problem_and_not_the_end() -> None:
    async with console(scenes.running(30), error=ZeroDivisionError("oops")) as (app, pilot, driver):
        await pilot.press("x", "a", "y")
        await settle(pilot)
        assert "ZeroDivisionError: oops" in screen_text(app)
        await pilot.press("escape", "x", "a", "y")
        await settle(pilot)
        assert driver.asked == ["abort", "abort"], "a failed action does not block the next one"


async def test_a_plan_that_cannot_be_made_is_a_problem() -> None:
    async with console(scenes.running(30), error=Refused("no plan", "the run is gone")) as (
        app,
        pilot,
        driver,
    ):
        await pilot.press("x", "a")
        await settle(pilot)
        assert "no plan" in screen_text(app)
        assert driver.asked == []


@pytest.mark.parametrize("size", SIZES)
async def test_quit_says_that_the_run_goes_on(size: tuple[int, int]) -> None:
    async with console(scenes.running(30), size) as (app, pilot, driver):
        await pilot.press("q")
        await settle(pilot)
        assert "demo goes on" in screen_text(app)
        await pilot.press("enter")
        assert isinstance(app.screen, OverviewScreen)
        await pilot.press("q", "y")
        await pilot.pause()
        assert app.return_code == 0
        assert not app.is_running or app._exit
        assert driver.asked == []


async def test_quit_without_a_run_does_not_ask() -> None:
    async with console([(0.0, scenes.connected())]) as (app, pilot, _):
        await pilot.press("q")
        await pilot.pause()
        assert app._exit


async def test_ctrl_c_gives_a_hint_and_twice_asks() -> None:
    async with console(scenes.running(30)) as (app, pilot, _):
        await pilot.press("ctrl+c")
        await settle(pilot)
        assert "q quits the console" in screen_text(app)
        await pilot.press("ctrl+c")
        assert isinstance(app.screen, PlanDialog)


@pytest.mark.parametrize("size", SIZES)
async def test_help_lists_the_keys_and_closes(size: tuple[int, int]) -> None:
    async with console(scenes.running(30), size) as (app, pilot, _):
        await pilot.press("question_mark")
        await settle(pilot)
        assert isinstance(app.screen, HelpScreen)
        text = screen_text(app)
        assert "Keys: everywhere" in text
        assert "Close the console; a run on the host goes on." in text
        await pilot.press("end")
        await settle(pilot)
        assert "Do what the dialog says." in screen_text(app)
        await pilot.press("escape")
        assert isinstance(app.screen, OverviewScreen)


@pytest.mark.parametrize("size", SIZES)
async def test_a_lost_host_makes_panels_stale_and_they_recover(size: tuple[int, int]) -> None:
    async with console(scenes.running(30), size) as (app, pilot, driver):
        post(driver, Connection(Link.LOST, "keepalive timeout", 8.0, attempt=3))
        for minute in range(30):  # half an hour of failed tries: the console stays
            driver.clock.t += 60
            post(driver, Connection(Link.LOST, "keepalive timeout", 8.0, attempt=minute))
        driver.clock.t += 3
        app._draw()
        await settle(pilot)
        text = screen_text(app)
        assert text.count("STALE") >= 3
        assert text.count("keepalive timeout") >= 3
        assert "in 5 s (r now)" in text
        assert "values from 12:00:2" in text
        assert "done 24 / 80" in text, "the last values stay"
        assert app.query("Panel.-stale")
        await pilot.press("r")
        assert driver.asked == ["retry"]
        later = driver.clock.t - 1000.0
        post(driver, scenes.connected(), scenes.facts(later), scenes.status(later))
        await settle(pilot)
        assert "STALE" not in screen_text(app)
        assert not app.query("Panel.-stale")


@pytest.mark.parametrize("size", [*SIZES, (60, 16)])
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_hostile_text_in_every_panel_is_only_text(size: tuple[int, int], ascii_only: bool) -> None:
    gib = 1 << 30
    disk = {"path": EVIL, "total": gib, "free": gib, "error": EVIL}
    server = {
        "url": EVIL,
        "ready": False,
        "error": EVIL,
        "info": {"model_path": EVIL, "version": EVIL},
        "loads": None,
    }
    recording: scenes.Recording = [
        (0.0, Connection(Link.CONNECTED, EVIL, host=EVIL)),
        (0.0, Step(EVIL, StepState.ACTIVE, EVIL)),
        (
            0.0,
            HostFactsSeen(
                {"at": scenes.iso(0), "hostname": EVIL, "disks": [disk], "shm": disk, "server": server}
            ),
        ),
        (0.0, ServerLog([EVIL, f"[2026-11-30 12:00:00] server_args={EVIL}", f"\x1b[2J{EVIL}", EVIL * 40])),
    ]
    async with console(recording, size, ascii_only=ascii_only, evil=EVIL) as (app, pilot, driver):
        texts = [screen_text(app)]
        post(
            driver,
            RunStatusSeen({"run": EVIL, "state": "running", "attempt": 1, "exit": {"error": EVIL},
                           "now": scenes.iso(1)}),
            EngineEvent(EVIL, {"seq": 1, "at": scenes.iso(1), "type": "phase", "name": EVIL, "detail": EVIL}),
            EngineEvent(EVIL, {"seq": 2, "at": scenes.iso(1), "type": "mismatch", "row": 1, "cause": EVIL,
                               "got": EVIL, "expected": [EVIL], "outcome": EVIL}),
            Notice("warning", EVIL),
            Notice("error", EVIL),
        )  # fmt: skip
        await settle(pilot)
        texts.append(screen_text(app))
        await pilot.press("x", "a")
        await settle(pilot)
        assert isinstance(app.screen, PlanDialog)
        texts.append(screen_text(app))
        assert "arr" in texts[0]
        for text in texts:
            assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text
            assert "[/]" in text, "markup is shown, not obeyed"
            assert not ascii_only or text.isascii()
            assert len(text.split("\n")) == size[1]
        assert app.screen.query_one("#accept", Button)


@pytest.mark.parametrize(
    "size",
    [(1, 1), (10, 3), (38, 9), (40, 10), (60, 16), (79, 24), (80, 23), (99, 40), (160, 50), (300, 100)],
)
async def test_no_size_breaks_it(size: tuple[int, int]) -> None:
    async with console(scenes.running(30, gpus=8), size) as (app, _, _):
        text = screen_text(app)
        assert len(text.split("\n")) == size[1]
        if size[0] < 40 or size[1] < 10:
            assert layout_of(*size) == "-tiny"
            assert f"hsx: {size[0]}x{size[1]} too small, need 40x10"[: size[0]] in text
        else:
            assert "done 24 / 80" in text


async def test_resizing_goes_through_every_layout_and_back() -> None:
    async with console(scenes.running(30)) as (app, pilot, _):
        before = screen_text(app)
        for size in ((80, 24), (38, 9), (60, 16), (200, 60), (120, 36)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            assert app.screen.has_class(layout_of(*size))
        assert screen_text(app) == before


@pytest.mark.parametrize("size", SIZES)
async def test_ascii_mode_is_ascii(size: tuple[int, int]) -> None:
    async with console(scenes.running(30, gpus=2), size, ascii_only=True) as (app, pilot, _):
        texts = [screen_text(app)]
        for keys in (["question_mark"], ["escape", "x"], ["a"]):
            await pilot.press(*keys)
            await settle(pilot)
            texts.append(screen_text(app))
        for text in texts:
            odd = {c for c in text if not c.isascii()}
            assert not odd
        assert "[OK] RUNNING" in texts[0]


async def test_no_color_has_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with console(scenes.running(30)) as (app, _, _):
        assert app.no_color
        colours = {
            tuple(colour.triplet)
            for strip in app.screen._compositor.render_strips()
            for segment in strip.apply_filter(app._filters[-1], app.background_colors[0])
            if segment.style is not None
            for colour in (segment.style.color, segment.style.bgcolor)
            if colour is not None and colour.triplet is not None
        }
        assert colours
        assert all(max(c) - min(c) <= 1 for c in colours)
        assert "● RUNNING" in screen_text(app)


async def test_footer_clicks_are_keys() -> None:
    async with console(scenes.running(30)) as (app, pilot, _):
        assert await pilot.click("#footer", offset=(2, 0))
        assert isinstance(app.screen, RunMenu)
        await pilot.press("escape")
        assert await pilot.click("#footer", offset=(115, 0))
        assert isinstance(app.screen, PlanDialog)


async def test_an_idle_console_paints_only_what_changes() -> None:
    async with console(scenes.running(30)) as (app, pilot, driver):
        painted: list[str] = []
        for panel in app._overview.panels:
            original = panel.refresh

            def noting(
                *args: object, _name: str = str(panel.id), _original: object = original, **kwargs: object
            ) -> object:
                painted.append(_name)
                return _original(*args, **kwargs)  # type: ignore[operator]

            panel.refresh = noting  # type: ignore[method-assign, assignment]
        for _ in range(5):
            app._draw()
        await settle(pilot)
        assert painted == [], "the clock stood still and nothing came"
        driver.clock.t += 1
        app._draw()
        assert set(painted) <= {"host", "server", "run", "warnings"} and painted
