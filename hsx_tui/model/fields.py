"""Reading fields out of JSON that a host sent: every one may be missing, of another type, or not a number."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from hsx_tui.text import clean, clean_value

_MAX_INT = 1 << 62


def number(value: Any) -> float | None:
    """A finite number, or None. Booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return None
    return float(value) if math.isfinite(value) else None


def count(value: Any) -> int | None:
    """A whole number of at least 0, or None."""
    got = number(value)
    return int(got) if got is not None and got >= 0 else None


def text(value: Any, limit: int = 300) -> str:
    """A cleaned string; "" for anything that is neither a string nor a number."""
    if isinstance(value, str):
        return clean(value, limit)
    got = number(value)
    return "" if got is None else f"{got:g}"


def shown(value: Any, limit: int = 200) -> str:
    """Any JSON value as one short cleaned line, for evidence of unknown shape."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value, limit)
    if isinstance(value, list | tuple | dict):
        # Whole values can be as long as a line of events.jsonl; what is shown is a beginning of it.
        value = dict(list(value.items())[:8]) if isinstance(value, dict) else list(value[:8])
        value = clean_value(value, depth=4)
    return clean(str(value), limit)


def mapping(value: Any) -> Mapping[str, Any]:
    """The object, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any, most: int) -> list[Any]:
    """The first ``most`` of a list, or none."""
    return list(value[:most]) if isinstance(value, list | tuple) else []


def epoch(iso: Any) -> float | None:
    """Seconds since 1970 of an ISO time; one without a zone is taken as UTC. None if it is not one."""
    if not isinstance(iso, str) or len(iso) > 40:
        return None
    try:
        when = datetime.datetime.fromisoformat(iso)
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return when.timestamp()
    except (ValueError, OverflowError):
        return None
