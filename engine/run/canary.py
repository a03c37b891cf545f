"""The canary: a few real samples through the whole path before the run, each against a lone take of the same.

It answers two questions: does the path give right states, per tap, and how fast (the pilot's projection)?
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.run.report import describe
from engine.run.validate import RETAKE_COSINE, Validator, compare_retake
from engine.sources.protocol import Ask, Source
from engine.wire.errors import ConnectionFailed, PreflightError
from engine.wire.ids import rid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from engine.capture.states import Finding
    from engine.dataset.samples import Counted
    from engine.dataset.tokens import Sample
    from engine.store.records import Record

FIRST_ATTEMPT = 90
"""Canary requests count from here, so that they are never taken for an attempt at the row itself."""

_LONGEST = 512


@dataclass
class CanaryResult:
    """Per row: the least cosine between the take in company and the lone one, or why it failed."""

    cosines: dict[int, float] = field(default_factory=dict)
    findings: dict[int, Finding | str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tok_per_s(self) -> float:
        """Of the takes in company."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """For the canary event."""
        failed = {str(r): f if isinstance(f, str) else describe(f) for r, f in self.findings.items()}
        return {
            "rows": sorted([*self.cosines, *self.findings]),
            "min_cosine": min(self.cosines.values(), default=None),
            "failed": failed,
            "tok_per_s": round(self.tok_per_s, 1),
        }


def choose(counted: Counted, pending: Sequence[int], number: int) -> list[int]:
    """Rows of different lengths, none over 512 tokens unless there is no other: spread over the sorted
    lengths."""
    usable = [r for r in pending if counted.n_tokens[r] <= _LONGEST] or list(pending)
    usable.sort(key=lambda r: (counted.n_tokens[r], r))
    if number <= 0 or not usable:
        return []
    step = max(len(usable) / number, 1)
    return sorted({usable[min(int(step * i + step / 2), len(usable) - 1)] for i in range(number)})


async def run_canary(
    run: str, source: Source, validator: Validator, samples: Sequence[Sample], dtype: str
) -> CanaryResult:
    """Take the samples together, then each alone, and compare."""
    result = CanaryResult()
    began = time.monotonic()
    company = await _take(run, source, validator, samples, 0, False, result)
    result.seconds = time.monotonic() - began
    result.tokens = sum(r.n_tokens for r in company.values())
    lone = await _take(run, source, validator, [s for s in samples if s.row in company], 1, True, result)
    for row, record in lone.items():
        cosine = compare_retake(company[row], record)
        if cosine >= RETAKE_COSINE[dtype]:
            result.cosines[row] = cosine
        else:
            result.findings[row] = f"two takes of it differ: cosine {cosine:.6f}"
    return result


async def _take(
    run: str,
    source: Source,
    validator: Validator,
    samples: Sequence[Sample],
    number: int,
    alone: bool,
    result: CanaryResult,
) -> dict[int, Record]:
    async def asks() -> AsyncIterator[Ask]:
        for s in samples:
            yield Ask(s, rid(run, s.row, FIRST_ATTEMPT + number), FIRST_ATTEMPT + number, alone)

    records: dict[int, Record] = {}
    async for taken in source.take(asks()):
        row = taken.ask.sample.row
        if taken.lost:
            raise ConnectionFailed(
                "the source was lost during the canary", taken.lost[:200], "see its log, then resume the run"
            )
        if taken.states is None:
            result.findings[row] = taken.finding or "no answer"
            continue
        judged = await asyncio.to_thread(
            validator.judge, taken.ask.sample, taken.ask.rid, 1, taken.states, taken.flying
        )
        if judged.record is None:
            result.findings[row] = judged.finding or "refused"
        else:
            records[row] = judged.record
    return records


def refuse_if_failed(result: CanaryResult) -> None:
    """PreflightError when more than half of the canary's samples failed (each sample is judged again in
    the run)."""
    bad = result.findings
    if bad and len(bad) > len(result.cosines):
        row, why = next(iter(bad.items()))
        raise PreflightError(
            f"canary: {len(bad)} of {len(bad) + len(result.cosines)} samples are wrong",
            f"row {row}: {why if isinstance(why, str) else describe(why)}",
            "the server does not give right states: see its log and the capture's settings",
        )
