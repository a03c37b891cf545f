"""Lines around the panels: a header or a problem that is drawn from rows, and the footer with its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from hsx_tui.actions import Danger
from hsx_tui.widgets.line_views import footer_parts
from hsx_tui.widgets.rows import Row, content, fit

if TYPE_CHECKING:
    from textual.events import Click

    from hsx_tui.widgets.view import Frame


class Line(Widget):
    """One or more rows over the whole width."""

    ALLOW_SELECT = False

    def __init__(self, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self._content = Content("")

    def show(self, rows: list[Row], frame: Frame, right: Row | None = None) -> None:
        """Draw ``rows``; ``right`` stands at the right edge of the first one."""
        fitted = [fit(row, frame.width, frame.g, None if i else right) for i, row in enumerate(rows)]
        self.set_class(not rows, "-empty")
        drawn = content(fitted)
        if not drawn.is_same(self._content):
            self._content = drawn
            self.refresh()

    def render(self) -> Content:
        """What ``show`` has prepared."""
        return self._content


class ActionBar(Line):
    """The footer: key and label of what can be done here. A click does the same as the key."""

    class Chosen(Message):
        """An action was clicked."""

        def __init__(self, action_id: str) -> None:
            super().__init__()
            self.action_id = action_id

    def __init__(self, widget_id: str) -> None:
        super().__init__(widget_id)
        self._spans: list[tuple[int, int, str]] = []

    def show_actions(self, frame: Frame, paused: bool) -> None:
        """Draw the registry's footer actions, quit at the right edge."""
        row: Row = []
        self._spans = []
        at = 0
        right: Row = []
        for action, key, label in footer_parts(frame, paused):
            text_style = "$warning" if action.danger >= Danger.ASKS else ""
            piece: Row = [(f" {key}", "bold $primary"), (f" {label} ", text_style)]
            length = sum(cell_len(t) for t, _ in piece)
            if action.id == "app.quit":
                right = piece
                self._spans.append((frame.width - length, frame.width, action.id))
                continue
            row += piece
            self._spans.append((at, at + length, action.id))
            at += length
        self.show([row], frame, right)

    def on_click(self, event: Click) -> None:
        """Tell which action was meant."""
        for begin, end, action_id in self._spans:
            if begin <= event.x < end:
                self.post_message(self.Chosen(action_id))
                return
