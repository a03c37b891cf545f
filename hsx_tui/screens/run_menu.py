"""The run menu: what can be done with the run, and why not, where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.widgets import Static

from hsx_tui import actions
from hsx_tui.actions import Scope, binding_rows
from hsx_tui.screens.base import GuardedModal
from hsx_tui.widgets.rows import MUTED, Row, content, legible

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.content import Content
    from textual.events import Click

    from hsx_tui.widgets.glyphs import Glyphs


class RunMenu(GuardedModal[str | None]):
    """Ends with the id of the chosen action, or None. ``refused``: action id to the reason why it cannot be
    done.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *binding_rows(Scope.RUN_MENU, "scope_action"),
        ("escape,x,q", "scope_action('')", "Close"),
    ]

    def __init__(self, refused: dict[str, str], g: Glyphs) -> None:
        super().__init__()
        self._refused = refused
        self._g = g

    def compose(self) -> ComposeResult:
        """One line an action."""
        yield Static(self._lines(), id="menu", markup=False)

    def on_mount(self) -> None:
        """Title the box."""
        self.query_one("#menu").border_title = content([[("Run", "bold")]])

    def _lines(self) -> Content:
        rows: list[Row] = []
        for action in actions.in_scope(Scope.RUN_MENU):
            why = self._refused.get(action.id, "")
            dialog = "..." if action.danger >= actions.Danger.ASKS else ""
            doc = f"not now: {why}" if why else action.doc
            rows.append(
                [
                    (f" {action.key}  ", MUTED if why else "bold $primary"),
                    (f"{action.label + dialog:<10}", MUTED if why else ""),
                    (legible(doc, self._g), MUTED),
                ]
            )
        rows.append([(" esc  close", MUTED)])
        return content(rows)

    def on_click(self, event: Click) -> None:
        """A click on a line is its key; a click beside the menu closes it."""
        if event.widget is None or event.widget.id != "menu":
            self.dismiss(None)
            return
        offset = event.get_content_offset(event.widget)
        shown = actions.in_scope(Scope.RUN_MENU)
        if offset is not None and offset.y < len(shown):
            self.action_scope_action(shown[offset.y].id)

    def action_scope_action(self, action_id: str) -> None:
        """Choose; what cannot be done now is not chosen."""
        if action_id not in self._refused:
            self.dismiss(action_id or None)
