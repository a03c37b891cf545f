"""The dialog before an action that costs something: what will be done, how to undo it, the exact command."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Static

from hsx_tui.actions import Scope, binding_rows
from hsx_tui.screens.base import GuardedModal
from hsx_tui.text import clean
from hsx_tui.widgets.rows import MUTED, Row, content, legible

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from hsx_tui.model.driver import Plan
    from hsx_tui.widgets.glyphs import Glyphs

LABEL = 10


def plan_rows(plan: Plan, g: Glyphs) -> list[Row]:
    """The plan as the dialog shows it; its text may hold a host's words, so it is cleaned."""
    rows: list[Row] = []
    for label, value in (("Host", plan.host), *plan.facts):
        rows.append([(f"{clean(label, 64):<{LABEL}}", MUTED), (clean(value, 200), "")])
    rows.append([])
    for i, step in enumerate(plan.steps):
        label = "" if i else "This will"
        rows.append([(f"{label:<{LABEL}}", MUTED), (f"{i + 1}. {clean(step, 300)}", "")])
    for label, value in (("Undo", plan.undo), ("Command", plan.command)):
        if value:
            rows.append([(f"{label:<{LABEL}}", MUTED), (clean(value, 300), "")])
    return [[(legible(text, g), style) for text, style in row] for row in rows]


class PlanDialog(GuardedModal[bool]):
    """Asks whether ``plan`` is to be carried out. The focus is on Cancel: Enter does nothing harmful."""

    BINDINGS: ClassVar[list[BindingType]] = [*binding_rows(Scope.DIALOG, "scope_action")]
    AUTO_FOCUS = "#cancel"

    def __init__(self, plan: Plan, g: Glyphs) -> None:
        super().__init__()
        self._plan = plan
        self._g = g

    def compose(self) -> ComposeResult:
        """The plan and two buttons."""
        with Vertical(id="dialog"):
            with VerticalScroll(id="plan", can_focus=False):
                yield Static(content(plan_rows(self._plan, self._g)), markup=False)
            with Horizontal(id="buttons"):
                yield Button(content([[("Cancel  esc", "")]]), id="cancel")
                accept = legible(clean(self._plan.accept, 40), self._g)
                yield Button(content([[(f"{accept}  y", "")]]), id="accept", variant="warning")

    def on_mount(self) -> None:
        """Title the box."""
        title = legible(clean(self._plan.title, 60), self._g)
        self.query_one("#dialog").border_title = content([[(title, "bold")]])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """A button is an answer."""
        self.dismiss(event.button.id == "accept")

    def action_scope_action(self, action_id: str) -> None:
        """A key is an answer."""
        self.dismiss(action_id == "dialog.accept")
