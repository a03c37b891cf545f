"""The canary: a few real samples through the whole path before the run, each against a lone take of the same.

It answers two questions: does the path give right states, per tap, and how fast (the pilot's projection)? The
first takes are sent together, one sample twice, beside foreign requests of the canary's own; then each alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine.capture.states import Finding
from engine.run.canary_rows import foreign_prompts
from engine.run.report import describe
from engine.run.validate import RETAKE_COSINE, Validator, compare_retake
from engine.sources.protocol import Ask, Source
from engine.wire.causes import Cause
from engine.wire.errors import ConnectionFailed, PreflightError
from engine.wire.ids import rid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from engine.dataset.tokens import Sample
    from engine.run.canary_rows import Chosen
    from engine.store.records import Record

COMPANY, LONE, TWIN = 90, 91, 92
"""Attempts of the canary: in company, alone, and the second of the sample that is sent twice. So they are
never taken for an attempt at the row itself."""

ALWAYS_WRONG = frozenset({Cause.NO_HANDSHAKE, Cause.WRONG_LAYERS, Cause.WRONG_WIDTH})
"""What is wrong once for the canary is wrong for every sample: the run would quarantine its whole dataset."""

_FOREIGN_S = 60.0
"""How long the foreign requests may take; what is not answered then is let go."""


@runtime_checkable
class BesideStrangers(Protocol):
    """A source that can send requests that are not ours beside ours."""

    async def foreign(self, prompts: Sequence[Sequence[int]]) -> int:
        """Send them, a few at once; returns how many were answered. Never raises."""
        ...


@dataclass
class CanaryResult:
    """What the canary saw.

    Attributes:
        cosines: by row, the least cosine between a take in company and the lone one.
        by_tap: the least of all rows, for each tap and "last".
        findings: by row, why it failed.
        twice: the row that was sent twice. foreign: foreign requests (answered, sent).
        tokens, seconds: of the takes in company.
    """

    cosines: dict[int, float] = field(default_factory=dict)
    by_tap: dict[str, float] = field(default_factory=dict)
    findings: dict[int, Finding | str] = field(default_factory=dict)
    twice: int | None = None
    foreign: tuple[int, int] = (0, 0)
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
            "by_tap": {tap: round(value, 8) for tap, value in self.by_tap.items()},
            "twice": self.twice,
            "foreign": {"answered": self.foreign[0], "sent": self.foreign[1]},
            "failed": failed,
            "tok_per_s": round(self.tok_per_s, 1),
        }


async def run_canary(
    run: str, source: Source, validator: Validator, chosen: Chosen, dtype: str
) -> CanaryResult:
    """Take the samples together (one twice), then each alone, and compare.

    Raises ConnectionFailed when the source is lost meanwhile.
    """
    result = CanaryResult(twice=chosen.twice)
    together = [(s, COMPANY) for s in chosen.samples]
    together += [(s, TWIN) for s in chosen.samples if s.row == chosen.twice]
    async with _strangers(source, chosen.samples, result):
        began = time.monotonic()
        company = await _take(run, source, validator, together, False, result)
        result.seconds = time.monotonic() - began
    result.tokens = sum(r.n_tokens for r in company.values())
    rows = {row for row, _ in company} - set(result.findings)
    again = [(s, LONE) for s in chosen.samples if s.row in rows]
    lone = await _take(run, source, validator, again, True, result)
    for (row, attempt), record in company.items():
        if (row, LONE) in lone:
            _compare(result, row, attempt, record, lone[row, LONE], RETAKE_COSINE[dtype])
    return result


def _compare(
    result: CanaryResult, row: int, attempt: int, record: Record, lone: Record, least: float
) -> None:
    cosine = compare_retake(record, lone)
    taps = cosines_by_tap(record, lone)
    for tap, value in taps.items():
        result.by_tap[tap] = min(value, result.by_tap.get(tap, 1.0))
    if cosine < least:
        worst = min(taps, key=lambda tap: taps[tap])
        which = " (the second of two sent at once)" if attempt == TWIN else ""
        at = worst if worst == "last" else f"tap {worst}"
        result.findings[row] = f"two takes of it{which} differ: cosine {cosine:.6f}, least in {at}"
        result.cosines.pop(row, None)
    elif row not in result.findings:
        result.cosines[row] = min(cosine, result.cosines.get(row, 1.0))


def cosines_by_tap(a: Record, b: Record) -> dict[str, float]:
    """The least cosine over rows of two takes of one sample, for each tap (as text) and "last"."""
    import torch

    def least(x: torch.Tensor, y: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1).min())

    x, y = a.tensors["taps"], b.tensors["taps"]
    found = {tap: least(x[:, i], y[:, i]) for i, tap in enumerate(a.stats)}  # stats are in the taps' order
    if "last" in a.tensors:
        found["last"] = least(a.tensors["last"], b.tensors["last"])
    return found


@contextlib.asynccontextmanager
async def _strangers(source: Source, samples: Sequence[Sample], result: CanaryResult) -> AsyncIterator[None]:
    """Foreign requests beside what is done within; all are gone at its end."""
    if not isinstance(source, BesideStrangers):
        yield  # one request at a time is the rule there, or nobody else is served
        return
    prompts = foreign_prompts(samples)
    load = asyncio.create_task(asyncio.wait_for(source.foreign(prompts), _FOREIGN_S))
    try:
        await asyncio.sleep(0)  # let the first of them go out before ours
        yield
        try:
            result.foreign = await load, len(prompts)
        except asyncio.TimeoutError:
            result.foreign = 0, len(prompts)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


async def _take(
    run: str,
    source: Source,
    validator: Validator,
    takes: Sequence[tuple[Sample, int]],
    alone: bool,
    result: CanaryResult,
) -> dict[tuple[int, int], Record]:
    """Records by (row, attempt); what fails goes to the result's findings."""

    async def asks() -> AsyncIterator[Ask]:
        for s, attempt in takes:
            yield Ask(s, rid(run, s.row, attempt), attempt, alone)

    records: dict[tuple[int, int], Record] = {}
    async with contextlib.aclosing(source.take(asks())) as answers:
        async for taken in answers:
            row = taken.ask.sample.row
            if taken.lost:
                raise ConnectionFailed(
                    "the source was lost during the canary",
                    taken.lost[:200],
                    "see its log, then resume the run",
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
                records[row, taken.ask.attempt] = judged.record
    return records


def refuse_if_failed(result: CanaryResult) -> None:
    """PreflightError when more than half of the canary's samples failed (each sample is judged again in
    the run), or one in a way in which every sample would."""
    bad = result.findings
    always = {r: f for r, f in bad.items() if isinstance(f, Finding) and f.cause in ALWAYS_WRONG}
    if not always and len(bad) <= len(result.cosines):
        return
    row, why = next(iter((always or bad).items()))
    raise PreflightError(
        f"canary: {len(bad)} of {len(bad) + len(result.cosines)} samples are wrong",
        f"row {row}: {why if isinstance(why, str) else describe(why)}",
        "the server does not give right states: see its log and the capture's settings",
    )
