"""Rows of styled text: what views return and widgets draw. No markup is ever parsed, so no data can be
markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from textual.content import Content

from hsx_tui.widgets.glyphs import STYLE, Glyphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsx_tui.model.status import Status

Part = tuple[str, str]
"""A text and its style ("" for none); ``$success`` and the like are colours of the theme."""

Row = list[Part]

MUTED = "$text-muted"


def part(text: str, style: str = "") -> Part:
    """One styled text."""
    return (text, style)


def status_parts(status: Status, g: Glyphs) -> Row:
    """Symbol and word in the tone's colour."""
    return [(f"{g.symbol[status.tone]} {status.word}", STYLE[status.tone])]


def labelled(label: str, *parts: Part, width: int = 8) -> Row:
    """A row with a muted label in front."""
    return [(f"{label:<{width}}", MUTED), *parts]


def cells(row: Row) -> int:
    """How wide the row is."""
    return sum(cell_len(text) for text, _ in row)


def fit(row: Row, width: int, g: Glyphs, right: Row | None = None) -> Row:
    """Exactly ``width`` cells: cut with a mark or padded, with ``right`` at the right edge where it has
    room.
    """
    row = [(legible(text, g), style) for text, style in row if text]
    right = [(legible(text, g), style) for text, style in right or [] if text]
    room = width - (sum(cell_len(t) for t, _ in right) + 1 if right else 0)
    if room < 8 and right:
        return fit(row, width, g)
    used, out = 0, []
    for i, (text, style) in enumerate(row):
        length = cell_len(text)
        more = any(cell_len(t) for t, _ in row[i + 1 :])
        if used + length > room or (used + length == room and more):
            out.append((set_cell_size(text, max(0, room - used - 1)) + g.cut, style))
            used = room
            break
        out.append((text, style))
        used += length
    out.append((" " * (room - used + (1 if right else 0)), ""))
    return out + right


def legible(text: str, g: Glyphs) -> str:
    """The text as a terminal of this set can show it: "?" for what is not ASCII where only ASCII is safe."""
    if not g.ascii or text.isascii():
        return text
    return "".join(c if c.isascii() else "?" * max(1, cell_len(c)) for c in text)


def content(rows: Sequence[Row], dim: bool = False) -> Content:
    """Rows as what Textual draws. ``dim``: values that are no longer true, kept for their worth."""
    parts: list[str | Content | tuple[str, str]] = []
    for i, row in enumerate(rows):
        parts += ["\n"] if i else []
        parts += [(text, f"{style} dim".strip() if dim else style) for text, style in row]
    return Content.assemble(*parts)
