"""The Overview: host, server, run, warnings and log on one screen, in four layouts by the size of the
terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.widgets import Static

from hsx_tui.model.state import ConsoleState
from hsx_tui.screens.base import GuardedScreen
from hsx_tui.widgets.host_view import host_view
from hsx_tui.widgets.line import ActionBar, Line
from hsx_tui.widgets.line_views import header_row, problem_rows
from hsx_tui.widgets.numbers import grouped
from hsx_tui.widgets.panel import FrameOf, Panel, title_content
from hsx_tui.widgets.rows import MUTED, Row
from hsx_tui.widgets.run_view import run_view
from hsx_tui.widgets.server_view import server_view
from hsx_tui.widgets.tail_log import TailLog
from hsx_tui.widgets.warnings_view import warnings_view

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Resize

    from hsx_tui.widgets.glyphs import Glyphs

WIDE = (100, 32)
COMPACT = (80, 24)
LEAST = (40, 10)
"""Columns and rows from which a layout is used; below the last one there is only a sentence."""

LAYOUTS = ("-wide", "-compact", "-small", "-tiny")


def layout_of(width: int, height: int) -> str:
    """The layout's class for a terminal of this size."""
    for name, (columns, rows) in zip(LAYOUTS, (WIDE, COMPACT, LEAST), strict=False):
        if width >= columns and height >= rows:
            return name
    return "-tiny"


class OverviewScreen(GuardedScreen):
    """The one screen. ``frame_of`` gives the frame for a size; ``hz`` is how often the log is drawn at
    most.
    """

    AUTO_FOCUS = "#log"

    def __init__(self, frame_of: FrameOf, g: Glyphs, hz: float, log_lines: int, version: str) -> None:
        super().__init__()
        self._frame_of = frame_of
        self._g = g
        self._version = version
        self._state = ConsoleState()
        self._clock = ""
        self.log_view = TailLog(g, max_lines=log_lines, hz=hz)
        self.panels = [
            Panel(host_view, frame_of, "host"),
            Panel(server_view, frame_of, "server"),
            Panel(run_view, frame_of, "run"),
            Panel(warnings_view, frame_of, "warnings"),
        ]

    def compose(self) -> ComposeResult:
        """Everything that will ever be on it: nothing is mounted or removed later."""
        host, server, run, warnings = self.panels
        yield Static("", id="too-small", markup=False)
        yield Line("header")
        yield Line("problem")
        with Horizontal(id="top"):
            yield host
            yield server
        yield run
        yield warnings
        yield self.log_view
        yield ActionBar("footer")

    def on_resize(self, event: Resize) -> None:
        """Choose the layout."""
        width, height = event.size
        layout = layout_of(width, height)
        for name in LAYOUTS:
            self.set_class(name == layout, name)
        note = f"hsx: {width}x{height} too small, need {LEAST[0]}x{LEAST[1]}"
        self.query_one("#too-small", Static).update(note)
        # What is newest by then, not what is newest now, must be drawn.
        self.call_after_refresh(lambda: self.show(self._state, self._clock))

    def show(self, state: ConsoleState, clock: str) -> None:
        """Draw ``state``; ``clock`` is the time of day for the header."""
        self._state, self._clock = state, clock
        if not self.is_mounted:
            return
        for panel in self.panels:
            panel.show(state)
        frame = self._frame_of(self.size.width, 1)
        header = header_row(state, frame, self._version)
        self.query_one("#header", Line).show([header], frame, [(f"{clock} ", "")])
        self.query_one("#problem", Line).show(problem_rows(state, frame), frame)
        self.show_log_title()

    def show_log_title(self) -> None:
        """What the log does: follow, or stay with so many new lines below."""
        log = self.log_view
        width = log.outer_size.width
        if width <= 0:
            return
        dot = f" {self._g.dot} "
        if log.follow:
            right: Row = [("FOLLOWING", "$success")]
        else:
            right = [
                ("PAUSED", "bold $warning"),
                (f"{dot}{grouped(log.unseen, self._g)} new below", "$warning"),
            ]
        right += [
            (f"{dot}{grouped(log.seen, self._g)} lines{dot}{grouped(log.first, self._g)} dropped", MUTED)
        ]
        if not log.seen:
            right = [("no lines yet", MUTED)]
        log.border_title = title_content([("Log", "bold")], right, width, self._g)
        frame = self._frame_of(self.size.width, 1)
        self.query_one("#footer", ActionBar).show_actions(frame, paused=not log.follow)

    def on_tail_log_changed(self, event: TailLog.Changed) -> None:
        """The log has something to say in its title."""
        self.show_log_title()
