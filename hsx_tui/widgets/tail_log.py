"""The log: a bounded ring of lines that follows the newest one, or stays where the reader is.

Textual's own Log and RichLog lose the reader's place when old lines are evicted and cost a task or a
measurement per line. Here lines are drawn on demand (Line API), and the place is an absolute line number:
paused at line 60 it stays at line 60 however many lines come and go, and when line 60 itself is evicted it
shows the oldest that is kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hsx_tui.actions import Scope, binding_rows
from hsx_tui.model.status import Tone
from hsx_tui.widgets.rows import legible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType
    from textual.events import MouseScrollDown, MouseScrollUp, Resize
    from textual.selection import Selection
    from textual.timer import Timer

    from hsx_tui.model.loglines import LogLine
    from hsx_tui.widgets.glyphs import Glyphs

SOURCE_WIDTH = 8
STEP = 16
"""Cells by which the view moves sideways."""


class TailLog(ScrollView, can_focus=True):
    """The ring and its view.

    Attributes:
        seen: lines that ever came.
        follow: the newest line is kept in view.
        unseen: lines that came since following stopped.
    """

    ALLOW_SELECT = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {"tail-log--muted", "tail-log--warn", "tail-log--bad"}
    BINDINGS: ClassVar[list[BindingType]] = [*binding_rows(Scope.LOG, "scope_action")]

    class Changed(Message):
        """Lines came, or following began or stopped."""

    def __init__(self, g: Glyphs, max_lines: int = 10_000, hz: float = 10.0) -> None:
        super().__init__(id="log")
        self._g = g
        self._lines: deque[LogLine] = deque(maxlen=max_lines)
        self._period = 1 / hz
        self._timer: Timer | None = None
        self._first_drawn = 0
        self._left = 0
        self.seen = 0
        self.follow = True
        self.unseen = 0

    @property
    def first(self) -> int:
        """The absolute number of the oldest line that is kept."""
        return self.seen - len(self._lines)

    @property
    def top(self) -> int:
        """The absolute number of the line at the top of the view."""
        return self._first_drawn + round(self.scroll_offset.y)

    def feed(self, lines: Sequence[LogLine]) -> None:
        """Take in lines; they are drawn with the next flush."""
        if not lines:
            return
        self._lines.extend(lines)
        self.seen += len(lines)
        if not self.follow:
            self.unseen += len(lines)
        if self._timer is None and self.is_mounted:
            self._timer = self.set_timer(self._period, self._flush)

    def on_mount(self) -> None:
        """Draw what came before there was a screen."""
        self._flush()

    def on_resize(self, event: Resize) -> None:
        """Keep the place, or the newest line, in view."""
        self._flush()

    def _flush(self) -> None:
        self._timer = None
        top = self.top
        first = self.first
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._lines))
        self._first_drawn = first
        if self.follow:
            self.scroll_end(animate=False, immediate=True, x_axis=False)
        else:
            self.scroll_to(y=max(0, top - first), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Changed())

    def set_follow(self, follow: bool) -> None:
        """Follow the newest line from now on, or stay here."""
        self.follow = follow
        if follow:
            self.unseen = 0
        self._flush()

    def action_scope_action(self, action_id: str) -> None:
        """Move: up and sideways stop following, the end begins it again."""
        if action_id == "log.end":
            self.set_follow(True)
            return
        if action_id in ("log.left", "log.right"):
            self._sideways(STEP if action_id == "log.right" else -STEP)
            return
        page = max(1, self.scrollable_content_region.height - 1)
        rows = {"log.up": -1, "log.down": 1, "log.page_up": -page, "log.page_down": page}.get(action_id)
        self._move(-len(self._lines) if rows is None else rows)

    def _sideways(self, cells: int) -> None:
        """Never further than the end of the longest line in view."""
        top, height = round(self.scroll_offset.y), self.scrollable_content_region.height
        shown = list(self._lines)[top : top + height]
        longest = max((sum(cell_len(t) for t, _ in self._styled(line)) for line in shown), default=0)
        most = max(0, longest - self.scrollable_content_region.width)
        self._left = min(max(0, self._left + cells), most)
        self.refresh()

    def _move(self, rows: int) -> None:
        target = min(self.max_scroll_y, max(0, round(self.scroll_offset.y) + rows))
        self.scroll_to(y=target, animate=False, immediate=True)
        follow = rows > 0 and target >= self.max_scroll_y
        if follow != self.follow:
            self.set_follow(follow)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """The wheel stops following."""
        event.stop()
        event.prevent_default()
        self._move(-3)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """The wheel at the end follows again."""
        event.stop()
        event.prevent_default()
        self._move(3)

    def render_line(self, y: int) -> Strip:
        """The strip of one row of the view."""
        width = self.scrollable_content_region.width
        base = self.rich_style
        index = round(self.scroll_offset.y) + y
        if not 0 <= index < len(self._lines):
            return Strip.blank(width, base)
        line = self._lines[index]
        segments = [Segment(text, base + style) for text, style in self._styled(line)]
        strip = Strip(segments).crop(self._left, self._left + width).adjust_cell_length(width, base)
        return strip.apply_offsets(self._left, index)

    def _styled(self, line: LogLine) -> list[tuple[str, Style]]:
        muted = self.get_component_rich_style("tail-log--muted", partial=True)
        tone = Style.null()
        if line.tone in (Tone.BAD, Tone.WARN):
            tone = self.get_component_rich_style(f"tail-log--{line.tone}", partial=True)
        return [
            (f"{line.time:<8} {line.source:<{SOURCE_WIDTH}}", muted),
            (legible(line.text, self._g), tone),
        ]

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, as it is drawn."""
        text = "\n".join("".join(t for t, _ in self._styled(line)) for line in self._lines)
        return (selection.extract(text), "\n") if text else None
