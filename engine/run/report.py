"""What a run says while it works: events for the console, lines for people.

The human lines carry what the field is used to reading:
``[12] 13 extracted (13 total), 1.32 samples/s, 2567 tok/s, req_time=0.9s, ETA: 471 min, errors: 0, ~0.3
GB`` and
``WARNING sample 81: got 1283 tokens, expected 4710``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.wire.causes import MEANING, Cause, Outcome
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from engine.capture.states import Finding

Emit = Callable[..., object]

_WINDOW_S = 30.0

_BY_COUNT = frozenset(
    {
        Cause.PREFIX_CACHED,
        Cause.DECODE_STEP,
        Cause.PARTIAL_CHUNK,
        Cause.TRUNCATED_INPUT,
    }
)


def say(text: str) -> None:
    """One line to the run's log, with the time in front."""
    try:
        sys.stdout.write(f"{now_iso()[:19]}Z {text}\n")
        sys.stdout.flush()
    except OSError:
        return  # the log's disk is full: a run does not end for that, and the events say what happens


class Rate:
    """Samples and tokens a second over the last 30 s, and request times."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seen: deque[tuple[float, int, float]] = deque()

    def add(self, tokens: int, request_s: float) -> None:
        """A sample was checked and accepted."""
        self._seen.append((time.monotonic(), tokens, request_s))

    def now(self) -> tuple[float, float, float]:
        """(samples/s, tokens/s, mean request seconds)."""
        at = time.monotonic()
        while self._seen and at - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        if not self._seen:
            return 0.0, 0.0, 0.0
        span = max(min(at - self._start, _WINDOW_S), 1e-3)
        n = len(self._seen)
        return n / span, sum(t for _, t, _ in self._seen) / span, sum(r for _, _, r in self._seen) / n


class Report:
    """Emits events and prints lines for one run attempt.

    Args:
        emit: ``emit(kind, **fields)`` appends an event durably enough (EventLog.emit).
        total_tokens: of all rows of the run.
    """

    def __init__(self, emit: Emit, total_tokens: int, done_tokens: int) -> None:
        self.emit = emit
        self._total, self._tokens = total_tokens, done_tokens
        self._rate = Rate()
        self._last = 0.0
        self.extracted = 0
        self.errors = 0
        self.new_tokens = 0

    def accepted(self, tokens: int, request_s: float) -> None:
        """A sample passed all checks."""
        self.extracted += 1
        self.new_tokens += tokens
        self._rate.add(tokens, request_s)

    def set_aside(self, tokens: int) -> None:
        """A row will not be taken: its tokens are no longer awaited."""
        self._tokens += tokens

    def progress(
        self,
        row: int,
        done: int,
        buffered: int,
        quarantined: int,
        pending: int,
        nbytes: int,
        *,
        force: bool = False,
    ) -> None:
        """At most once a second, unless forced. ``done``: durable; ``buffered``: checked, still pending."""
        at = time.monotonic()
        if not force and at - self._last < 1.0:
            return
        self._last = at
        samples, tok, request_s = self._rate.now()
        tokens = self._tokens + self.new_tokens
        left = max(self._total - tokens, 0)
        eta = left / tok if tok > 0 else None
        self.emit(
            "progress",
            done=done,
            buffered=buffered,
            quarantined=quarantined,
            pending=pending,
            tokens=tokens,
            tokens_total=self._total,
            samples_per_s=round(samples, 3),
            tok_per_s=round(tok, 1),
            req_time_s=round(request_s, 3),
            eta_s=None if eta is None else round(eta, 1),
            bytes=nbytes,
            errors=self.errors,
        )
        if row < 0:
            return  # nothing was extracted yet
        minutes = "?" if eta is None else f"{eta / 60:.0f}"
        say(
            f"[{row}] {self.extracted} extracted ({done + buffered} total), {samples:.2f} samples/s, "
            f"{tok:.0f} tok/s, req_time={request_s:.1f}s, ETA: {minutes} min, "
            f"errors: {self.errors}, ~{nbytes / 1e9:.1f} GB"
        )

    def mismatch(self, row: int, rid: str, attempt: int, finding: Finding, outcome: Outcome) -> None:
        """A dump was refused."""
        self.errors += 1
        self.emit(
            "mismatch",
            row=row,
            rid=rid,
            attempt=attempt,
            cause=finding.cause.value,
            got=finding.got,
            expected=finding.expected,
            evidence=dict(finding.evidence),
            outcome=outcome.value,
        )
        say(f"WARNING sample {row}: {describe(finding)} ({outcome.value})")

    def phase(self, name: str, detail: str = "") -> None:
        """What the run is doing now."""
        self.emit("phase", name=name, detail=detail)
        say(f"{name}{': ' if detail else ''}{detail}")

    def warning(self, text: str, **fields: Any) -> None:
        """Something a person should know; the run goes on."""
        self.emit("warning", text=text, **fields)
        say(f"WARNING {text}")


def describe(finding: Finding) -> str:
    """A finding in one line; token counts are said in the field's own words."""
    cause = finding.cause
    counted = cause in _BY_COUNT or "folder" in finding.evidence  # a folder is known by its token count
    if counted and isinstance(finding.got, int) and isinstance(finding.expected, int):
        return f"got {finding.got} tokens, expected {finding.expected} [{cause.value}]"
    detail = _figures(finding.evidence)
    return f"{MEANING[cause]}{': ' if detail else ''}{detail} [{cause.value}]"


def _figures(evidence: Mapping[str, Any]) -> str:
    if "wrong_rows" in evidence:
        e = evidence
        return (
            f"{e['wrong_rows']} wrong rows in {e['first_row']}..{e['last_row']}, error {e['value']:.3g}, "
            f"whose: {e['whose']}"
        )
    return ", ".join(
        f"{k} {v}" for k, v in evidence.items() if k in ("why", "http", "position", "where", "value")
    )[:300]
