"""The lines of events.jsonl: written by the engine, read by the console.

``{"seq": int from 1 without gaps, "at": iso8601 Z, "type": ..., ...}``, one object a line.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from typing import Any

from engine.wire.errors import SpecError

TYPES = frozenset(
    {
        "run_started",
        "phase",
        "preflight",
        "canary",
        "progress",
        "sample_done",
        "mismatch",
        "quarantined",
        "shard_committed",
        "warning",
        "paused",
        "resumed",
        "run_finished",
    }
)

MAX_LINE = 1 << 20
"""A longer line is not an event (bytes)."""

Event = dict[str, Any]


def now_iso() -> str:
    """The current time as in every file: UTC, milliseconds, Z."""
    t = datetime.datetime.now(datetime.timezone.utc)
    return t.strftime("%Y-%m-%dT%H:%M:%S.") + f"{t.microsecond // 1000:03d}Z"


def json_safe(value: Any) -> Any:
    """``value`` with its non-finite numbers as the strings "inf", "-inf" and "nan", and its keys as strings.

    JSON has no such numbers, and what a faulty server sends must still be told.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(json_safe(k)): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return value


def encode(seq: int, kind: str, fields: Mapping[str, Any]) -> bytes:
    """One line, newline included; numbers as ``json_safe`` has them. Raises SpecError for an unknown
    type."""
    if kind not in TYPES:
        raise SpecError(f"unknown event type {kind!r}")
    event = json_safe({"seq": seq, "at": now_iso(), "type": kind, **fields})
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Event:
    """Read one line. Unknown keys and types are kept (a newer engine may send them); raises SpecError."""
    try:
        event = json.loads(line)
    except ValueError as error:
        raise SpecError("an event line is not JSON", str(error)) from error
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("seq"), int)
        or not isinstance(event.get("type"), str)
        or not isinstance(event.get("at"), str)
    ):
        raise SpecError("an event line lacks seq, at or type")
    return event
