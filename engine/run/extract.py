"""The one extraction loop: rows in, checked samples in the store, everything else named and set aside.

It knows no server and no model. At every moment: done + waiting for their shard + quarantined + pending ==
dataset.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine.capture.states import Finding, States
from engine.run.validate import RETAKE_COSINE, Judged, Validator, compare_retake, with_retake
from engine.sources.protocol import Ask, Source, Taken
from engine.wire.causes import Cause, Outcome
from engine.wire.errors import ConnectionFailed
from engine.wire.ids import rid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from concurrent.futures import ThreadPoolExecutor

    from torch import Tensor

    from engine.dataset.samples import Counted, Samples
    from engine.run.report import Report
    from engine.store.records import Record
    from engine.store.store import Store
    from engine.wire.spec import ExtractSpec

T = TypeVar("T")

RETAKE_ATTEMPT = 80
"""Retakes count from here; attempts at the row itself stay below."""

_LOSSES_AN_ATTEMPT = 4
"""So many losses of one row by a source that is ready count as one refused attempt. With the most attempts
(8) all numbers of asks stay below the retakes'."""

_MOST_RETAKES = 10

_STOP_GRACE_S = 60.0
"""After a stop, requests in flight may take so long; the supervisor's own grace is longer."""

_PATIENCE_S = 1800.0
"""How long a run waits for a server that does not answer (a large model loads for 12 minutes and more)."""


@dataclass
class _Row:
    """What happened to a row in this run attempt."""

    asked: int = 0
    refused: int = 0
    lost: int = 0
    retakes: int = 0
    held: Record | None = None


class Extraction:
    """One run attempt over the pending rows.

    Args:
        worker: one thread for numbers and files, so that the event loop stays free and the order stays one.
        stop: set when the run shall end gracefully: what is in flight is finished, the open shard is written.
    """

    def __init__(
        self,
        spec: ExtractSpec,
        samples: Samples,
        counted: Counted,
        store: Store,
        source: Source,
        validator: Validator,
        report: Report,
        source_dtype: str,
        worker: ThreadPoolExecutor,
        stop: asyncio.Event,
    ) -> None:
        self.spec, self.samples, self.counted, self.store = spec, samples, counted, store
        self.source, self.validator, self.report = source, validator, report
        self._agree = RETAKE_COSINE[source_dtype]
        self._worker, self._stop = worker, stop
        self._rows: dict[int, _Row] = {}
        self._todo = iter(samples.rows)
        self._again: deque[Ask] = deque()
        self._open = 0
        self._changed = asyncio.Event()
        self._since_retake = 0
        self._waiting = False
        self._losses = 0
        self._waited = 0.0
        self._bytes = 0
        self._last_row = -1
        self._gave_up = False
        self._committing = asyncio.Lock()

    @property
    def pending(self) -> int:
        """Rows neither done nor set aside: what waits for its shard is still pending."""
        return len(self.samples) - len(self.store.done) - len(self.store.quarantined)

    def wake(self) -> None:
        """Look at ``stop`` again."""
        self._changed.set()

    async def run(self) -> None:
        """Until every row is settled or ``stop`` is set. What was checked is durable when it returns or
        raises."""
        drain = asyncio.create_task(self._drain())
        aging = asyncio.create_task(self._age(drain))
        try:
            await drain
        except asyncio.CancelledError:
            if not self._gave_up:
                raise
        finally:
            aging.cancel()
            await asyncio.gather(aging, return_exceptions=True)
            await self.commit()
            self.progress(self._last_row, force=True)

    async def _drain(self) -> None:
        async with aclosing(self.source.take(self._asks())) as answers:
            async for taken in answers:
                self._last_row = taken.ask.sample.row
                await self._settle(taken)
                if self.store.due:
                    await self.commit()
                self.progress(self._last_row)

    async def _age(self, drain: asyncio.Task[None]) -> None:
        """Write a shard when it is old enough, also while nothing comes; end what hangs after a stop."""
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), 1.0)
            except asyncio.TimeoutError:
                if self.store.due:
                    await self.commit()
        await self.commit()
        await asyncio.sleep(_STOP_GRACE_S)
        self._gave_up = True
        drain.cancel()

    def progress(self, row: int, *, force: bool = False) -> None:
        """Tell how far the run is."""
        self.report.progress(
            row,
            len(self.store.done),
            len(self.store.buffer),
            len(self.store.quarantined),
            self.pending,
            self._bytes,
            force=force,
        )

    async def commit(self) -> None:
        """Make the buffer durable; only then are its samples done."""
        async with self._committing:
            nbytes = self.store.buffered_bytes
            lines = await self._in_worker(self.store.commit)
            if not lines:
                return
            self._bytes += nbytes
            rows = [line.row for line in lines]
            self.report.emit("shard_committed", shard=lines[0].shard, rows=rows, bytes=nbytes)
            for line in lines:
                self.report.emit(
                    "sample_done",
                    row=line.row,
                    rid=line.rid,
                    n_tokens=line.n_tokens,
                    attempts=line.attempts,
                    evidence=dict(line.evidence),
                )

    async def _in_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def _asks(self) -> AsyncIterator[Ask]:
        while not self._stop.is_set():
            if self._waiting:  # the source does not answer: asking for more would only lose more
                self._changed.clear()
                await self._changed.wait()
                continue
            if self._again:
                yield self._again.popleft()
                continue
            row = next((r for r in self._todo if not self._settled(r)), None)
            if row is not None:
                sample = await self._in_worker(lambda row=row: self.samples.sample(row))  # type: ignore[misc]
                self._open += 1
                state = self._rows[row] = _Row()
                yield self._next_ask(state, Ask(sample, "", 0))
            elif self._open == 0:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _settled(self, row: int) -> bool:
        return row in self.store.done or row in self.store.quarantined

    def _next_ask(self, state: _Row, ask: Ask) -> Ask:
        state.asked += 1
        name = rid(self.spec.run, ask.sample.row, state.asked)
        return Ask(ask.sample, name, state.asked)

    async def _settle(self, taken: Taken) -> None:
        row = taken.ask.sample.row
        state = self._rows[row]
        if taken.lost:
            await self._lost(taken, state)
            return
        self._losses = 0
        for finding in taken.passed_over:  # refused, and taken again: from another dump or by another request
            self.report.mismatch(row, taken.ask.rid, state.refused + 1, finding, Outcome.RETRIED)
        if taken.states is None:
            assert taken.finding is not None
            await self._refuse(taken.ask, state, taken.finding, final=taken.final)
            return
        states = taken.states
        judged = await self._in_worker(
            lambda: self.validator.judge(
                taken.ask.sample, taken.ask.rid, state.refused + 1, states, taken.flying
            )
        )
        if judged.record is None:
            assert judged.finding is not None
            await self._refuse(taken.ask, state, judged.finding)
        elif state.held is not None:
            await self._compare(taken, state, judged.record)
        elif self._wants_retake(judged):
            state.held = judged.record
            await self._retake(taken, state)
        else:
            await self._accept(taken, judged.record)

    def _wants_retake(self, judged: Judged) -> bool:
        """Undecided samples, and every Nth of all, are taken a second time, alone."""
        self._since_retake += 1
        drawn = self.spec.retake_every > 0 and self._since_retake >= self.spec.retake_every
        if drawn:
            self._since_retake = 0
        return drawn or bool(judged.retake)

    async def _compare(self, taken: Taken, state: _Row, again: Record) -> None:
        held, state.held = state.held, None
        assert held is not None
        cosine = await self._in_worker(lambda: compare_retake(held, again))
        if cosine >= self._agree:
            await self._accept(taken, with_retake(held, cosine))
            return
        n = len(taken.ask.sample.input_ids)
        evidence = {"kind": "retake", "value": round(cosine, 6), "tokens": n}
        finding = Finding(Cause.EVIDENCE_LOW, round(cosine, 6), self._agree, evidence, taken.states)
        await self._refuse(taken.ask, state, finding)

    async def _accept(self, taken: Taken, record: Record) -> None:
        await self._in_worker(lambda: self.store.add(record))  # all changes of the store in one thread
        self.report.accepted(record.n_tokens, taken.request_s)
        self._close(record.row)

    def _close(self, row: int) -> None:
        del self._rows[row]
        self._open -= 1
        self._changed.set()

    async def _lost(self, taken: Taken, state: _Row) -> None:
        """Nothing is known of a request: ask again when the source is ready.

        A row that is lost again and again by a source that is ready counts as refused.
        """
        state.lost += 1
        await self._wait_for_source(taken)
        if self._stop.is_set():
            return
        if state.lost % _LOSSES_AN_ATTEMPT == 0:
            await self._refuse(taken.ask, state, _missing(taken, state))
        elif state.held is not None:  # the retake was lost, not the sample
            await self._retake(taken, state)
        else:
            self._again.append(self._next_ask(state, taken.ask))
        self._changed.set()

    async def _retake(self, taken: Taken, state: _Row) -> None:
        if state.retakes >= _MOST_RETAKES:
            await self._refuse(taken.ask, state, _missing(taken, state))
            return
        number = RETAKE_ATTEMPT + state.retakes
        state.retakes += 1
        sample = taken.ask.sample
        self._again.append(Ask(sample, rid(self.spec.run, sample.row, number), number, alone=True))
        self._changed.set()

    async def _refuse(self, ask: Ask, state: _Row, finding: Finding, *, final: bool = False) -> None:
        row = ask.sample.row
        state.refused += 1
        state.held = None
        again = state.refused < self.spec.attempts and not final
        outcome = Outcome.RETRIED if again else Outcome.QUARANTINED
        self.report.mismatch(row, ask.rid, state.refused, finding, outcome)
        if again:
            self._again.append(self._next_ask(state, ask))
            self._changed.set()
            return
        await self.set_aside(row, ask.rid, state.refused, finding)
        self._close(row)

    async def set_aside(self, row: int, name: str, attempts: int, finding: Finding) -> None:
        """Quarantine a row with its evidence (and the states that were refused, where there are some)."""
        entry = {
            "rid": name,
            "attempts": attempts,
            "cause": finding.cause.value,
            "got": finding.got,
            "expected": finding.expected,
            "evidence": dict(finding.evidence),
        }
        tensors = _tensors(finding.states)
        await self._in_worker(lambda: self.store.quarantine(row, entry, tensors))
        self.report.set_aside(self.counted.n_tokens[row])
        self.report.emit("quarantined", row=row, rid=name, attempts=attempts, cause=finding.cause.value)

    async def _wait_for_source(self, taken: Taken) -> None:
        """Back off, and wait until the source is ready again. Raises ConnectionFailed when it stays away."""
        if not 0 < taken.asked_at < self._waited:  # else it was lost by what was waited for already
            self._losses += 1
            await self._pause(min(0.2 * 1.5 ** min(self._losses, 12), 10.0))
        if self._stop.is_set() or await self.source.ready():
            self._waited = time.monotonic()
            return
        since = time.monotonic()
        self._waiting = True
        self.report.emit("paused", reason=taken.lost[:200])
        self.report.warning(f"the source does not answer ({taken.lost[:200]}); waiting for it")
        try:
            said = taken.lost[:200]
            while not self._stop.is_set() and not await self.source.ready():
                if self.source.trouble not in ("", said):
                    said = self.source.trouble
                    self.report.warning(f"still waiting for the source: {said[:200]}")
                if time.monotonic() - since > _PATIENCE_S:
                    raise ConnectionFailed(
                        f"the source did not answer for {_PATIENCE_S / 60:.0f} min",
                        taken.lost[:200],
                        "start the server, then resume the run: what is done is kept",
                    )
                await self._pause(2.0)
        finally:
            self._waiting = False
            self._changed.set()
        self.report.emit("resumed", after_s=round(time.monotonic() - since, 1))
        self._losses, self._waited = 0, time.monotonic()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not through a stop."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except asyncio.TimeoutError:
            return


def _missing(taken: Taken, state: _Row) -> Finding:
    """A row of which the source gives nothing, though it is ready."""
    why = {"why": taken.lost[:200], "lost": state.lost, "retakes": state.retakes}
    return Finding(Cause.MISSING, None, len(taken.ask.sample.input_ids), why)


def _tensors(states: States | None) -> dict[str, Tensor] | None:
    if states is None:
        return None
    named = {"input_ids": states.input_ids, "aux": states.aux, "last": states.last, "pre": states.pre}
    return {k: v for k, v in named.items() if v is not None}
