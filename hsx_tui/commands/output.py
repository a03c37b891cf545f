"""What a verb says: data on stdout (one JSON object, or lines for people), talk on stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from hsx_tui.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA_VERSION = 1


def talk(text: str) -> None:
    """A line for people on stderr, cleaned."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()


def line(text: str) -> None:
    """A line for people on stdout, cleaned."""
    sys.stdout.write(clean(text) + "\n")
    sys.stdout.flush()


def json_line(data: Mapping[str, Any]) -> None:
    """One JSON object on a line of stdout. ASCII only, so nothing in it can steer a terminal."""
    sys.stdout.write(json.dumps(_finite(data), allow_nan=False) + "\n")
    sys.stdout.flush()


def json_object(data: Mapping[str, Any]) -> None:
    """The one JSON object that a verb ends with."""
    json_line({"schema_version": SCHEMA_VERSION, **data})


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns for people; an absent value is a dash."""
    cells = [[*head], *([clean("-" if v in (None, "") else str(v), 200) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a host that sends one must not make our output unreadable."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
