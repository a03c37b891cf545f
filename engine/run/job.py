"""``python -m engine extract``: one run attempt from its specification to its result.

Order: dataset -> identity compared -> preflight -> identity written -> canary -> extraction. Under the
supervisor (HSX_RUN is set) the events, the result and the store's lock are the run directory's; without it
they lie in --run-dir.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine import __version__
from engine.capture.states import Finding
from engine.dataset.samples import Counted, Samples
from engine.dataset.tokens import Tokens
from engine.run import canary, canary_rows, preflight
from engine.run.capture_checks import traffic_told
from engine.run.extract import Extraction
from engine.run.preflight_counter import unjoinable
from engine.run.report import Report, say
from engine.run.validate import Validator
from engine.sources.open import open_source
from engine.store import identity
from engine.store.normfile import write_norm
from engine.store.store import Store
from engine.targets.head import HeadRows
from engine.targets.lowest import LowestLayers, TargetFacts, final_norm, target_facts
from engine.wire import stopwish
from engine.wire.causes import Cause, Outcome
from engine.wire.errors import HsxError, PreflightError, StoreError
from engine.wire.ids import rid

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from engine.host.events import EventLog
    from engine.sources.protocol import Source, SourceFacts
    from engine.wire.spec import ExtractSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """How a run attempt ended. ``outcome``: complete, aborted or failed."""

    outcome: str
    dataset: int
    done: int
    quarantined: int
    pending: int
    tokens: int
    wall_s: float
    tok_per_s: float
    server: dict[str, Any]
    error: dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """result.json and the end of run_finished."""
        return {"schema_version": 1, **self.__dict__}


class _Stopped(Exception):
    """The stop came before the extraction began."""


class Job:
    """One run attempt; everything it opens is closed by ``run``."""

    def __init__(self, spec: ExtractSpec, events: EventLog, attempt: int) -> None:
        self.spec, self.attempt = spec, attempt
        self.stop = asyncio.Event()
        self.extraction: Extraction | None = None
        self._events = events
        self._began = time.monotonic()

    def emit(self, kind: str, **fields: Any) -> None:
        """An event. StoreError when the run directory's disk is full."""
        try:
            self._events.emit(kind, **fields)
        except OSError as error:
            raise StoreError(
                "the run directory cannot be written",
                error.strerror or str(error),
                "make room on that disk, then resume the run: what is done is kept",
            ) from error

    def ask_stop(self) -> None:
        """End gracefully: finish what is in flight, write the open shard."""
        if not self.stop.is_set():
            say("stop was asked for: finishing what is in flight")
        self.stop.set()
        if self.extraction is not None:
            self.extraction.wake()

    async def run(self) -> Result:
        """Do it all. HsxError when it cannot go on; what is done is durable then too."""
        import torch

        torch.set_num_threads(1)  # the server on the same host needs the cores more
        spec = self.spec
        self.emit("run_started", run=spec.run, attempt=self.attempt, engine=__version__, spec=spec.to_json())
        source = open_source(spec)
        worker = ThreadPoolExecutor(1, "hsx-worker")
        try:
            return await self._steps(source, worker)
        except _Stopped:
            return self._stopped_early(source.attribution)
        finally:
            worker.shutdown(wait=True)
            await source.aclose()

    async def _steps(self, source: Source, worker: ThreadPoolExecutor) -> Result:
        spec = self.spec
        self._phase("dataset", spec.dataset.path)
        samples, counted = await self._unless_stopped(asyncio.to_thread(_open_samples, spec))
        target = target_facts(spec.target.model)
        facts = await self._unless_stopped(source.describe())
        manifest = _manifest(spec, samples, target, source.attribution)
        identity.check(Path(spec.store), manifest)
        store = Store(Path(spec.store), spec.shard_bytes, spec.shard_seconds)
        pending = {r for r in samples.rows if r not in store.done and r not in store.quarantined}
        done_tokens = sum(counted.n_tokens[r] for r in samples.rows if r not in pending)
        report = Report(self.emit, counted.total, done_tokens)
        if store.recovered:
            report.warning(f"{len(store.recovered)} rows were found in a shard without their lines")
        size = preflight.estimate(spec, counted, pending, target.hidden_size, facts.dtype)
        await self._preflight(report, target, facts, counted, size)
        identity.claim(store.path, manifest)  # nothing is written for a run that is refused
        self._log_attempt(store, facts, len(pending))
        left = await source.clear(spec.run)
        if left:
            report.warning(f"{left} dumps of an earlier attempt were removed unread")
        validator = await self._unless_stopped(asyncio.to_thread(_validator, spec, target, facts, store))
        self.extraction = Extraction(
            spec, samples, counted, store, source, validator, report, facts.dtype, worker, self.stop
        )
        limit = preflight.length_limit(spec, target, facts)
        for row in preflight.over_long({r: counted.n_tokens[r] for r in pending}, limit):
            await self._set_aside_long(row, counted.n_tokens[row], limit)
            pending.discard(row)
        for row, finding in unjoinable(facts, {r: counted.n_tokens[r] for r in pending}).items():
            name = rid(spec.run, row, 1)
            report.mismatch(row, name, 0, finding, Outcome.QUARANTINED)
            await self.extraction.set_aside(row, name, 0, finding)
            pending.discard(row)
        try:
            await self._canary(report, source, validator, samples, counted, sorted(pending), size, facts)
            self._phase("extract", f"{len(pending)} of {len(samples)} rows, {size.tokens} tokens")
            self.extraction.progress(-1, force=True)
            await self.extraction.run()
        finally:
            await source.clear(spec.run)
        return self._result(samples, store, counted, report, facts, source.attribution)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; _Stopped as soon as a stop is asked for."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Stopped
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _stopped_early(self, attribution: str) -> Result:
        """Nothing was asked for in this attempt; the store is as it was."""
        wall = round(time.monotonic() - self._began, 2)
        server = {"model": self.spec.target.model, "version": "", "attribution": attribution}
        return Result("aborted", 0, 0, 0, 0, 0, wall, 0.0, server)

    def _log_attempt(self, store: Store, facts: SourceFacts, pending: int) -> None:
        store.log_attempt(
            {
                "attempt": self.attempt,
                "engine": {"id": os.environ.get("HSX_ENGINE_ID", ""), "version": __version__},
                "server": {"version": facts.version, "flags": dict(facts.flags), "url": self.spec.source.url},
                "host": os.uname().nodename,
                "pending": pending,
                "done": len(store.done),
            }
        )

    def _phase(self, name: str, detail: str = "") -> None:
        self.emit("phase", name=name, detail=detail)
        say(f"{name}{': ' if detail else ''}{detail}")

    async def _preflight(
        self,
        report: Report,
        target: TargetFacts,
        facts: SourceFacts,
        counted: Counted,
        size: preflight.Estimate,
    ) -> None:
        self._phase("preflight")
        checks = preflight.run_checks(self.spec, target, facts, counted, size)
        report.emit("preflight", checks=[c.to_json() for c in checks], estimate=size.to_json())
        for c in checks:
            if c.severity == "warning":
                report.warning(f"preflight, {c.line().split(maxsplit=1)[1]}")
            else:
                say(c.line())
        preflight.refuse_if_failed(checks)

    async def _set_aside_long(self, row: int, n: int, limit: int) -> None:
        assert self.extraction is not None
        name = rid(self.spec.run, row, 1)
        finding = Finding(Cause.TRUNCATED_INPUT, limit, n, {"why": f"{n} tokens, the limit is {limit}"})
        await self.extraction.set_aside(row, name, 0, finding)

    async def _canary(
        self,
        report: Report,
        source: Source,
        validator: Validator,
        samples: Samples,
        counted: Counted,
        pending: list[int],
        size: preflight.Estimate,
        facts: SourceFacts,
    ) -> None:
        if self.spec.canary <= 0 or not pending or self.stop.is_set():
            return
        number = self.spec.canary
        least = 8 if self.spec.source.dump_mode == "counter" else 1
        chosen = await self._unless_stopped(
            asyncio.to_thread(canary_rows.choose, samples, counted, pending, number, least)
        )
        self._phase("canary", f"rows {', '.join(str(s.row) for s in chosen.samples)}, {chosen.twice} twice")
        result = await self._unless_stopped(
            canary.run_canary(self.spec.run, source, validator, chosen, facts.dtype)
        )
        hours = size.tokens / result.tok_per_s / 3600 if result.tok_per_s else None
        projection = {"hours": hours, "bytes": size.bytes, "tokens": size.tokens}
        shared = {"rows": list(chosen.shared), "tokens": chosen.prefix}
        report.emit("canary", **result.to_json(), shared_prefix=shared, projection=projection)
        for row, cosine in result.cosines.items():
            say(f"  ok   row {row}: in company and alone agree, cosine {cosine:.7f}")
        for row, why in result.to_json()["failed"].items():
            report.warning(f"canary row {row}: {why}")
        if result.by_tap:
            per_tap = ", ".join(f"{tap} {value:.7f}" for tap, value in result.by_tap.items())
            say(f"  least cosine by tap: {per_tap}; {result.foreign[0]} foreign requests beside them")
        if hours is not None:
            say(
                f"  pilot: {result.tok_per_s:.0f} tok/s, so about {hours:.2f} h and {size.bytes / 1e9:.2f} GB"
            )
        canary.refuse_if_failed(result)

    def _result(
        self,
        samples: Samples,
        store: Store,
        counted: Counted,
        report: Report,
        facts: SourceFacts,
        attribution: str,
    ) -> Result:
        pending = len(samples) - len(store.done) - len(store.quarantined)
        wall = time.monotonic() - self._began
        source = self.spec.source
        folders = [source.dump_dir, *(replica.dump_dir for replica in source.replicas)]
        traffic = traffic_told([Path(folder) for folder in folders])
        return Result(
            outcome="aborted" if self.stop.is_set() and pending else "complete" if not pending else "failed",
            dataset=len(samples),
            done=len(store.done),
            quarantined=len(store.quarantined),
            pending=pending,
            tokens=sum(counted.n_tokens[r] for r in store.done),
            wall_s=round(wall, 2),
            tok_per_s=round(report.new_tokens / wall, 1),
            server={
                "model": facts.model, "version": facts.version, "attribution": attribution,
                **({"traffic": traffic} if traffic else {}),
            },
        )  # fmt: skip


def _open_samples(spec: ExtractSpec) -> tuple[Samples, Counted]:
    samples = Samples(spec.dataset.path, Tokens(spec.target.model, spec.dataset.thinking), spec.dataset.rows)
    return samples, samples.count()


def _manifest(
    spec: ExtractSpec, samples: Samples, target: TargetFacts, attribution: str
) -> identity.Manifest:
    return identity.build_manifest(
        target={
            "model": spec.target.model,
            "revision": None,
            "architecture": target.architecture,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
        },
        taps=spec.target.taps,
        last=spec.target.last,
        dtype=spec.target.dtype,
        attribution=attribution,
        dataset={
            "sha256": samples.file.sha256,
            "first": samples.rows.start,
            "rows": len(samples),
            "order": "file",
        },
        tokenizer_sha256=samples.tokens.sha256,
        chat_template={"sha256": samples.tokens.template_sha256, "thinking": spec.dataset.thinking},
    )


def _validator(spec: ExtractSpec, target: TargetFacts, facts: SourceFacts, store: Store) -> Validator:
    lowest = LowestLayers(spec.target.model, spec.target.taps[0] if spec.evidence == "recompute" else 0)
    try:
        norm = final_norm(lowest)
        write_norm(store.path, norm.weight, norm.eps, norm.flavour)
    except PreflightError:
        if spec.target.last == "pre" or target.num_layers - 1 in spec.target.taps:
            raise
        norm = None  # it matters only where post-norm is to be computed from pre-norm
    if spec.evidence == "recompute":
        return Validator(spec.target, target.hidden_size, facts.dtype, lowest=lowest)
    head = HeadRows(spec.target.model)
    return Validator(spec.target, target.hidden_size, facts.dtype, lowest=None, norm=norm, head=head)


async def run_job(spec: ExtractSpec, events: EventLog, attempt: int) -> Result:
    """Run one attempt with SIGTERM and SIGINT as the graceful stop; it ends with run_finished."""
    job = Job(spec, events, attempt)
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, job.ask_stop)
    if stopwish.asked():
        job.ask_stop()
    try:
        result = await job.run()
    except HsxError as error:
        job.emit("run_finished", outcome="failed", error=error.to_json())
        raise
    except Exception as error:
        defect = HsxError("the engine failed", f"{type(error).__name__}: {error}", "report this with the log")
        job.emit("run_finished", outcome="failed", error=defect.to_json())
        raise
    job.emit("run_finished", **result.to_json())
    say(f"{result.outcome}: done {result.done}, quarantined {result.quarantined}, pending {result.pending}")
    return result
