"""When `--abort-at` ends a run: once, in the attempt that this command began or found alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def percent_of(progress: Mapping[str, Any]) -> float:
    """How much of the run is settled or checked (0 to 100), though not all of it durable yet."""
    settled, total = _counts(progress)
    return 100 * settled / total if total else 0.0


def _counts(progress: Mapping[str, Any]) -> tuple[int, int]:
    """(samples that are settled or buffered, all samples)"""
    settled = int(progress.get("done", 0)) + int(progress.get("quarantined", 0))
    return settled + int(progress.get("buffered", 0)), settled + int(progress.get("pending", 0))


@dataclass
class AbortMark:
    """Watches a run's events from its very first attempt on.

    Args:
        percent: the mark.
        attempt: the attempt that may be aborted. The events of those before it are history, and one that
            begins beyond the mark is the resume.
    """

    percent: float
    attempt: int
    _now: object = field(default=None, init=False)
    _began_at: float | None = field(default=None, init=False)

    def crossed_by(self, event: Mapping[str, Any]) -> bool:
        """Whether this event says that the attempt has gone from below the mark over it, with work left."""
        if event["type"] == "run_started":
            self._now, self._began_at = event.get("attempt"), None
        if event["type"] != "progress" or self._now != self.attempt:
            return False
        percent = percent_of(event)
        if self._began_at is None:
            self._began_at = percent
            return False
        settled, total = _counts(event)
        return self._began_at < self.percent <= percent and settled < total
