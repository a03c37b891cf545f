"""The screen that every screen is: guarded against clicks on what is just being taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from textual.screen import ModalScreen, Screen

if TYPE_CHECKING:
    from textual.geometry import Offset
    from textual.widget import Widget

Result = TypeVar("Result")


class GuardedScreen(Screen[None]):
    """A full screen."""

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """As Textual's, but a widget that is no longer attached is no hit (Textual#6643: a crash
        otherwise).
        """
        return attached(super().get_widget_and_offset_at(x, y))


class GuardedModal(ModalScreen[Result]):
    """A dialog."""

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """As Textual's, but a widget that is no longer attached is no hit (Textual#6643: a crash
        otherwise).
        """
        return attached(super().get_widget_and_offset_at(x, y))


def attached(hit: tuple[Widget | None, Offset | None]) -> tuple[Widget | None, Offset | None]:
    """The hit, or none if its widget is not attached any more."""
    widget, _ = hit
    return (None, None) if widget is not None and not widget.is_attached else hit
