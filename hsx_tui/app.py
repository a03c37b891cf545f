"""The console's application: takes messages in, reduces them, has the screen drawn, turns keys into the
driver's calls.

It holds no logic of its own: what a message means is in ``model``, how it looks in ``widgets``, what an
action does in the driver. Exit codes: 0 after quit; 128 + signal after SIGTERM, SIGHUP or SIGINT, with the
terminal restored.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import os
import signal
import time
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.worker import Worker, WorkerState

from engine.wire.errors import HsxError, RemoteError
from hsx_tui.actions import BY_ID, Danger, Scope, binding_rows
from hsx_tui.model.driver import Driver, Plan
from hsx_tui.model.loglines import log_lines
from hsx_tui.model.messages import Message, Notice
from hsx_tui.model.reduce import dismiss, reduce, with_problem
from hsx_tui.model.runs import is_live
from hsx_tui.model.state import ConsoleState
from hsx_tui.model.status import can_abort, can_resume, can_start
from hsx_tui.screens.dialog import PlanDialog
from hsx_tui.screens.help import HelpScreen
from hsx_tui.screens.overview import OverviewScreen
from hsx_tui.screens.run_menu import RunMenu
from hsx_tui.styles import HSX_DARK, STYLE_SHEET
from hsx_tui.widgets.glyphs import glyphs
from hsx_tui.widgets.view import Frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.screen import Screen

    from hsx_tui.widgets.line import ActionBar

LOCAL_HZ, SSH_HZ = 10.0, 4.0
"""How often the screen changes at most; over SSH every change is bytes on the wire."""
TICK_S = 1.0
QUIT_AGAIN_S = 2.0


def steady_seconds() -> float:
    """Monotonic seconds that go on while the machine sleeps, so that ages are right after a sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def utc_now() -> datetime.datetime:
    """The time of day."""
    return datetime.datetime.now(datetime.UTC)


class HsxApp(App[None], inherit_bindings=False):
    """The console on one ``driver``.

    Args:
        driver: what is behind the screen.
        ascii: draw with ASCII only.
        interval_s: how often facts of the host are expected.
        log_lines: how many lines of log are kept.
        clock, wall: the monotonic clock and the time of day; tests and pictures give their own.
    """

    CSS_PATH = STYLE_SHEET
    TITLE = "hsx-console"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *binding_rows(Scope.GLOBAL, "do"),
        Binding("ctrl+q", "do('app.quit')", show=False),
        Binding("ctrl+c", "interrupt", show=False),
    ]

    def __init__(
        self,
        driver: Driver,
        ascii: bool = False,  # noqa: A002 - the name of the option
        *,
        interval_s: float = 2.0,
        log_lines: int = 10_000,
        clock: Callable[[], float] = steady_seconds,
        wall: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        super().__init__()
        self.register_theme(HSX_DARK)
        self.theme = HSX_DARK.name
        self.set_class(ascii, "-ascii")
        self.state = ConsoleState()
        self._behind = driver
        self._glyphs = glyphs(ascii)
        self._interval = interval_s
        self._clock, self._wall = clock, wall
        self._hz = SSH_HZ if "SSH_CONNECTION" in os.environ else LOCAL_HZ
        self._drawing = False
        self._acting = ""
        self._interrupted_at: float | None = None
        version = importlib.metadata.version("hsx-console")
        self._overview = OverviewScreen(self._frame, self._glyphs, self._hz, log_lines, version)

    def get_default_screen(self) -> Screen[None]:
        """The Overview is the only full screen."""
        return self._overview

    def on_mount(self) -> None:
        """Begin: signals, the clock, the driver."""
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                # Without this the terminal stays on the alternate screen with mouse tracking on.
                loop.add_signal_handler(sig, self.exit, None, 128 + sig)
        self.set_interval(TICK_S, self._draw)
        self._drive()
        self._draw()

    def _drive(self) -> None:
        self.run_worker(self._behind.run(self.post), name="driver", group="driver", exit_on_error=False)

    def post(self, message: Message) -> None:
        """Take in what the driver says. Call it in the application's loop."""
        lines = log_lines(self.state, message, f"{self._wall():%H:%M:%S}")
        self.state = reduce(self.state, message, self._clock())
        self._overview.log_view.feed(lines)
        if not self._drawing:
            self._drawing = True
            self.set_timer(1 / self._hz, self._draw)

    def _frame(self, width: int, height: int) -> Frame:
        return Frame(width, height, self._clock(), self._interval, self._glyphs)

    def _draw(self) -> None:
        self._drawing = False
        if not self._overview.query("#header"):
            return  # the screen is being taken down
        self._overview.show(self.state, f"{self._wall():%H:%M:%S}Z")

    def _show_problem(self, error: HsxError) -> None:
        self.state = with_problem(self.state, error)
        self._draw()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """A worker that failed is a problem on screen, never the end of the console."""
        error = event.worker.error
        if event.state is not WorkerState.ERROR or error is None:
            return
        if event.worker.group == "action":
            self._acting = ""
        if not isinstance(error, HsxError):
            where = f"{type(error).__name__}: {error}"
            error = RemoteError(f"the console's {event.worker.name} failed", where, "press r to try again")
        self._show_problem(error)

    def on_action_bar_chosen(self, event: ActionBar.Chosen) -> None:
        """A click on the footer is its key."""
        self.action_do(event.action_id)

    def action_do(self, action_id: str) -> None:
        """Carry out an action of the registry."""
        handlers: dict[str, Callable[[], None]] = {
            "run.menu": self._open_run_menu,
            "log.pause": lambda: self._overview.log_view.set_follow(False),
            "log.follow": lambda: self._overview.log_view.set_follow(True),
            "link.retry": self._retry,
            "app.dismiss": self._dismiss,
            "app.help": lambda: self._open(HelpScreen(self._glyphs)),
            "app.quit": self._ask_quit,
        }
        handlers[action_id]()

    def _open(self, screen: HelpScreen) -> None:
        self.push_screen(screen)

    def _dismiss(self) -> None:
        self.state = dismiss(self.state)
        self._draw()

    def _retry(self) -> None:
        if any(w.group == "driver" and not w.is_finished for w in self.workers):
            self._behind.retry_now()
        else:
            self._drive()

    def _open_run_menu(self) -> None:
        checks = {"run.start": can_start, "run.resume": can_resume, "run.abort": can_abort}
        refused = {name: why for name, check in checks.items() if (why := check(self.state))}
        self.push_screen(RunMenu(refused, self._glyphs), self._chosen)

    def _chosen(self, action_id: str | None) -> None:
        if action_id is None:
            return
        if BY_ID[action_id].danger < Danger.ASKS:
            self._act(action_id)
            return
        try:
            plan = self._behind.plan(action_id)
        except HsxError as error:
            self._show_problem(error)
            return

        def answered(accepted: bool | None) -> None:
            if accepted:
                self._act(action_id)

        self.push_screen(PlanDialog(plan, self._glyphs), answered)

    def _act(self, action_id: str) -> None:
        calls: dict[str, Callable[[], Awaitable[None]]] = {
            "run.start": self._behind.start,
            "run.resume": self._behind.resume,
            "run.abort": self._behind.abort,
        }
        label = BY_ID[action_id].label.lower()
        if self._acting:
            self.post(Notice("warning", f"{label}: not sent, since {self._acting} is still under way"))
            return
        self._acting = label
        self.run_worker(
            self._call(action_id, calls[action_id]), name=label, group="action", exit_on_error=False
        )

    async def _call(self, action_id: str, call: Callable[[], Awaitable[None]]) -> None:
        action = BY_ID[action_id]
        self.post(Notice("info", f"{action.label.lower()} sent"))
        await call()
        self._acting = ""
        undo = f"; to undo: {action.undo}" if action.undo else ""
        self.post(Notice("info", f"{action.label.lower()} accepted{undo}"))

    def _ask_quit(self) -> None:
        run = self.state.run
        if not is_live(run):
            self.exit()
            return
        plan = Plan(
            title="QUIT THE CONSOLE",
            host=self.state.connection.host or self.state.host.hostname,
            facts=(("Run", f"{run.run} goes on: it runs on the host, not here"),),
            steps=("close this console; nothing on the host is stopped",),
            undo="open the console again: it takes up where the run is then",
            accept="Quit",
        )

        def answered(accepted: bool | None) -> None:
            if accepted:
                self.exit()

        self.push_screen(PlanDialog(plan, self._glyphs), answered)

    def action_interrupt(self) -> None:
        """ctrl+c without a selection: say how to quit; a second one within two seconds asks."""
        now = self._clock()
        if self._interrupted_at is not None and now - self._interrupted_at < QUIT_AGAIN_S:
            self._interrupted_at = None
            self._ask_quit()
            return
        self._interrupted_at = now
        self.post(Notice("info", "q quits the console (or ctrl+c again); a run on the host goes on"))
