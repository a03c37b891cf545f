"""A panel: a box that draws a view, repainted only when what it would draw has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content
from textual.widget import Widget

from hsx_tui.widgets.rows import Row, content, fit
from hsx_tui.widgets.view import Frame, View

if TYPE_CHECKING:
    from textual.events import Resize

    from hsx_tui.model.state import ConsoleState
    from hsx_tui.widgets.glyphs import Glyphs

FrameOf = Callable[[int, int], Frame]


def title_content(title: Row, right: Row, width: int, g: Glyphs) -> Content:
    """A border's label that reaches across it: ``title``, the border's own line, ``right``.

    ``width``: of the whole widget in cells. Textual keeps a corner, a rule and a space at either end to
    itself.
    """
    room = max(4, width - 6)
    wanted = sum(cell_len(t) for t, _ in right)
    if wanted + 8 > room:
        right, wanted = [], 0
    used = sum(cell_len(t) for t, _ in title)
    left = room - wanted - (2 if right else 0)
    shown = fit(title, min(used, left), g) if used else []
    rule = left - min(used, left)
    fill: Row = [(f" {g.rule * rule} ", "$panel-rule")] if right else []
    return content([[*shown, *fill, *right]])


class Panel(Widget):
    """Draws ``view``. ``show`` is cheap to call: nothing is painted unless it differs from what is there."""

    ALLOW_SELECT = False

    def __init__(self, view: View, frame_of: FrameOf, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self._view = view
        self._frame_of = frame_of
        self._state: ConsoleState | None = None
        self._body = Content("")
        self._title = Content("")

    def show(self, state: ConsoleState) -> None:
        """Draw ``state``."""
        self._state = state
        width, height = self.content_size
        if width <= 0 or height <= 0:
            return
        frame = self._frame_of(width, height)
        drawn = self._view(state, frame)
        rows = [fit(row, width, frame.g) for row in drawn.rows]
        cause = [fit(row, width, frame.g) for row in drawn.cause or []]
        body = content(rows, dim=drawn.stale)
        if cause:
            body = content(cause) + "\n" + body
        self.set_class(drawn.stale, "-stale")
        title = title_content(drawn.title, drawn.right, self.outer_size.width, frame.g)
        if not title.is_same(self._title):
            self._title = title
            # Content is taken as it is: nothing in it is read as markup.
            self.border_title = title
        if not body.is_same(self._body):
            self._body = body
            self.refresh()

    def render(self) -> Content:
        """What ``show`` has prepared."""
        return self._body

    def on_resize(self, event: Resize) -> None:
        """Another size is another drawing."""
        if self._state is not None:
            self.show(self._state)
