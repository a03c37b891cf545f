"""The help page: every key of the registry, by where it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import VerticalScroll
from textual.widgets import Static

from hsx_tui.actions import Danger, Scope, in_scope, key_name
from hsx_tui.screens.base import GuardedModal
from hsx_tui.widgets.rows import MUTED, Row, content, legible

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from hsx_tui.widgets.glyphs import Glyphs


def help_rows(g: Glyphs) -> list[Row]:
    """All actions; for those that ask first, what they do and how it is undone."""
    rows: list[Row] = []
    for scope in Scope:
        rows += [[]] if rows else []
        rows.append([(f"Keys: {scope}", "bold")])
        for action in in_scope(scope):
            keys = " ".join(key_name(k, g.ascii) for k in action.keys)
            rows.append([(f"  {keys:<10} ", "$primary"), (f"{action.label:<10} ", ""), (action.doc, MUTED)])
            if action.danger >= Danger.ASKS:
                rows.append([(f"{'':<13}", ""), (f"it will: {action.plan}", MUTED)])
            if action.undo:
                rows.append([(f"{'':<13}", ""), (f"undo: {action.undo}", MUTED)])
    rows += [[], [("ctrl+c copies a selection of the log; the mouse works, but nothing needs it", MUTED)]]
    return [[(legible(text.replace("…", "..."), g), style) for text, style in row] for row in rows]


class HelpScreen(GuardedModal[None]):
    """Scrolls; any of the keys that open or close things closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "close", "Close")]
    AUTO_FOCUS = "#help"

    def __init__(self, g: Glyphs) -> None:
        super().__init__()
        self._g = g

    def compose(self) -> ComposeResult:
        """The keys."""
        with VerticalScroll(id="help"):
            yield Static(content(help_rows(self._g)), markup=False)

    def on_mount(self) -> None:
        """Title the box."""
        title = content([[("Help", "bold"), ("  esc closes", MUTED)]])
        self.query_one("#help").border_title = title

    def action_close(self) -> None:
        """Back to where the user was."""
        self.dismiss(None)
