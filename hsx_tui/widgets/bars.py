"""Bars on a fixed scale of 0 to 1; what is not a number is a gap and never a height."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui.widgets.rows import MUTED, Row

if TYPE_CHECKING:
    from hsx_tui.widgets.glyphs import Glyphs


def bar(fraction: float | None, width: int, g: Glyphs, style: str = "$primary") -> Row:
    """A bar of ``width`` cells."""
    return stacked([(fraction or 0.0, style)], width, g)


def stacked(parts: list[tuple[float, str]], width: int, g: Glyphs) -> Row:
    """A bar of one or two parts, each (fraction of the whole, style); the second is drawn softly.

    A part that is not empty has at least one cell, and only a full bar looks full.
    """
    out: Row = []
    left = width
    for i, (fraction, style) in enumerate(parts):
        exact = max(0.0, min(1.0, fraction)) * width
        whole = int(exact)
        if i:
            whole = min(left, max(1, round(exact)) if fraction > 0 else 0)
            out.append((g.soft * whole, style))
            left -= whole
            continue
        eighth = int((exact - whole) * 8)
        tip = g.eighths[eighth - 1] if g.eighths and eighth and len(parts) == 1 else ""
        if whole == 0 and not tip and fraction > 0:
            tip = g.eighths[0] if g.eighths else g.full
        text = (g.full * whole + tip)[:left]
        out.append((text, style))
        left -= len(text)
    out.append((g.empty * left, MUTED))
    return [p for p in out if p[0]]
