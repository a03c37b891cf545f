"""Events and notices that a person should see, as lines of the warnings panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.wire.causes import MEANING
from hsx_tui.model.fields import count, items, shown, text
from hsx_tui.model.state import MAX_WARNINGS, Warn, Warnings

MAX_CHECKS = 64

_MEANING = {str(cause.value): meaning for cause, meaning in MEANING.items()}


def meaning(cause: str) -> str:
    """What a cause of the closed list means; the cause itself if it is a newer one."""
    return _MEANING.get(cause, cause)


def add(warnings: Warnings, warn: Warn, now: float) -> Warnings:
    """One more; beyond ``MAX_WARNINGS`` the oldest is only counted."""
    recent = (*warnings.recent, warn)[-MAX_WARNINGS:]
    return replace(warnings, recent=recent, total=warnings.total + 1, seen_at=now)


def take_event(warnings: Warnings, event: Mapping[str, Any], now: float) -> Warnings:
    """The warnings after one engine event."""
    kind = event.get("type")
    if kind == "mismatch":
        return _mismatch(warnings, event, now)
    if kind == "quarantined":
        # The mismatch that led here has been shown; a row that was set aside without one has not.
        warnings = replace(warnings, quarantined=warnings.quarantined + 1)
        if _told(warnings, count(event.get("row"))):
            return warnings
        return add(warnings, _from_row("QUARANTINED", event, "quarantined"), now)
    at = text(event.get("at"), 40)
    if kind == "warning":
        said = text(event.get("text") or event.get("message") or event.get("what"))
        return add(warnings, Warn("WARNING", said or "the engine gave no text", at), now)
    if kind == "preflight":
        for check in items(event.get("checks"), MAX_CHECKS):
            if isinstance(check, Mapping) and check.get("ok") is False:
                said = ". ".join(s for s in (text(check.get(k)) for k in ("name", "detail", "next")) if s)
                warnings = add(warnings, Warn("PREFLIGHT FAILED", said, at), now)
    return warnings


def _mismatch(warnings: Warnings, event: Mapping[str, Any], now: float) -> Warnings:
    warn = _from_row("MISMATCH", event, text(event.get("outcome"), 20))
    warnings = replace(
        warnings,
        mismatches=warnings.mismatches + 1,
        retried=warnings.retried + (warn.outcome == "retried"),
    )
    return add(warnings, warn, now)


def _from_row(word: str, event: Mapping[str, Any], outcome: str) -> Warn:
    cause = text(event.get("cause"), 40)
    return Warn(
        word=word,
        text=meaning(cause) if cause else text(event.get("text")),
        at_iso=text(event.get("at"), 40),
        row=count(event.get("row")),
        cause=cause,
        got=shown(event.get("got"), 60),
        expected=shown(event.get("expected"), 60),
        outcome=outcome,
    )


def _told(warnings: Warnings, row: int | None) -> bool:
    return row is not None and any(
        w.row == row and w.outcome == "quarantined" and w.word == "MISMATCH" for w in warnings.recent[-20:]
    )
