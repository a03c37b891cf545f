"""The scheduler: one thread that batches requests into forwards, samples, captures, and ends them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.capture.pythonpath.hsx_capture.joining import Piece
from engine.demo.batching import BatchRules, plan
from engine.demo.sampling import sample
from engine.demo.steplog import StepLog

if TYPE_CHECKING:
    from engine.capture.pythonpath.hsx_capture.recorder import Recorder
    from engine.demo.attention import Segment
    from engine.demo.counter_dumps import CounterDumps
    from engine.demo.counts import Counts
    from engine.demo.packed import PackedModel
    from engine.demo.prefix_cache import PrefixCache
    from engine.demo.requests import Request
    from engine.demo.sabotage import Sabotage

log = logging.getLogger("hsx.demo")


class DuplicateRid(Exception):
    """A request with that rid is alive."""


class NotAccepting(Exception):
    """The server is shutting down, or its scheduler has died."""


@dataclass(frozen=True)
class Load:
    """How busy the scheduler is."""

    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int
    gen_throughput: float


class Scheduler:
    """Runs the model. ``submit``, ``abort``, ``flush`` and ``stop`` may be called from any thread."""

    def __init__(
        self,
        model: PackedModel,
        rules: BatchRules,
        counts: Counts,
        capacity_tokens: int,
        cache: PrefixCache | None = None,
        recorder: Recorder | None = None,
        sabotage: Sabotage | None = None,
        threads: int = 2,
        counter_dumps: CounterDumps | None = None,
    ) -> None:
        self._model = model
        self._rules = rules
        self._counts = counts
        self._capacity = capacity_tokens
        self._cache = cache
        self._recorder = recorder
        self._sabotage = sabotage
        self._threads = threads
        self._counter_dumps = counter_dumps
        self._wake = threading.Condition()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._stopping = False
        self._steps = StepLog()
        self._after_prefill = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take a request. Raises DuplicateRid and NotAccepting."""
        with self._wake:
            if self._stopping or self.error is not None:
                raise NotAccepting
            if any(r.rid == request.rid for r in (*self._waiting, *self._running)):
                raise DuplicateRid(request.rid)
            self._waiting.append(request)
            self._counts.accepted(request)
            self._wake.notify()

    def abort(self, prefix: str) -> None:
        """End every live request whose rid begins with ``prefix`` (SGLang's rule), after the current
        forward."""
        with self._wake:
            for request in self._waiting:
                if request.rid.startswith(prefix):
                    request.abort("Abort in waiting queue")
            for request in self._running:
                if request.rid.startswith(prefix):
                    request.abort("Aborted")
            self._wake.notify()

    def flush(self) -> bool:
        """Empty the prefix cache; False (and nothing done) while requests are alive."""
        with self._wake:
            if self._waiting or self._running:
                return False
            if self._cache is not None:
                self._cache.clear()
            return True

    def load(self) -> Load:
        """How busy it is."""
        with self._wake:
            used = sum(r.computed for r in self._running) + (self._cache.tokens if self._cache else 0)
            return Load(
                len(self._running), len(self._waiting), used, self._capacity, self._steps.gen_throughput
            )

    def stop(self, grace_s: float) -> None:
        """Finish what is alive within ``grace_s``, abort the rest, end the thread."""
        deadline = time.monotonic() + grace_s
        with self._wake:
            self._stopping = True
            self._wake.notify()
            while (self._waiting or self._running) and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(min(left, 0.2))
        self.abort("")
        self._thread.join(60.0)

    # On the scheduler thread.

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # the number belongs to the calling thread
        try:
            with torch.inference_mode():
                while self._step():
                    pass
        except BaseException as error:
            log.exception("Scheduler hit an exception")
            with self._wake:
                self.error = error
                left = [*self._waiting, *self._running]
                self._waiting, self._running = [], []
            for request in left:
                request.abort(f"the scheduler died: {type(error).__name__}: {error}")
                self._end(request)

    def _step(self) -> bool:
        """Admit, compute one forward, end what is finished. False: stopped and nothing is left."""
        with self._wake:
            while not self._waiting and not self._running:
                if self._stopping:
                    return False
                self._wake.wait()
            self._admit()
            segments = plan(self._running, self._rules, self._after_prefill)
            queued = len(self._waiting)
        if segments:
            self._forward(segments, queued)
        with self._wake:
            ended = [r for r in (*self._waiting, *self._running) if r.finish is not None]
            self._waiting = [r for r in self._waiting if r.finish is None]
            self._running = [r for r in self._running if r.finish is None]
            self._wake.notify_all()
        for request in ended:
            self._end(request)
        return True

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._rules.max_running:
            request = self._waiting[0]
            if request.finish is None:
                request.kv = self._model.new_kv(request.capacity)
                if self._cache is not None:
                    request.cached = request.computed = self._cache.fill(request)
                self._running.append(request)
                del self._waiting[0]
            else:
                break  # aborted while it waited: taken out at the end of this step

    def _forward(self, segments: list[Segment], queued: int) -> None:
        began = time.monotonic()
        ids = torch.tensor([t for s in segments for t in s.request.next_ids(s.rows)])
        ours = self._recorder is not None and any(s.prefill and s.request.is_ours for s in segments)
        wanted = ours or self._sabotage is not None or self._counter_dumps is not None
        computed = self._model.forward(segments, ids, capture=wanted)
        states = computed.states
        if states is not None and self._sabotage is not None:
            states = self._sabotage.apply(states, segments)
        self._counts.forward(segments)
        if self._counter_dumps is not None and states is not None:
            self._counter_dumps.take(segments, states, ids)
        if ours and states is not None:
            for s in segments:
                if s.prefill and s.request.is_ours:
                    self._capture(s, states, ids, segments)
        self._advance(segments, computed.last)
        self._after_prefill = any(s.prefill for s in segments)
        self._steps.note(segments, time.monotonic() - began, queued, self.load())

    def _capture(self, s: Segment, states: torch.Tensor, ids: torch.Tensor, segments: list[Segment]) -> None:
        assert self._recorder is not None and self._model.taps is not None
        h, width = self._model.shape.hidden_size, len(self._model.taps) * self._model.shape.hidden_size
        rows = states[s.packed]
        request = s.request
        mixed = not all(other.prefill for other in segments)
        handshake = self._recorder.take(
            Piece(
                rid=request.rid,
                serial=request.serial,
                prompt=request.prompt,
                start=s.start,
                aux=rows[:, :width],
                last=rows[:, width : width + h],
                pre=rows[:, width + h :],
                seen=ids[s.packed],
                batch={
                    "forward": self._steps.forwards, "requests": len(segments), "first": s.first,
                    "mode": "mixed" if mixed else "extend",
                },
            )
        )  # fmt: skip
        if handshake is not None:
            request.handshake = handshake

    def _advance(self, segments: list[Segment], last: torch.Tensor) -> None:
        for s in segments:
            s.request.computed = s.end
        due = [s for s in segments if not s.request.in_prefill]
        for s in due:
            if s.request.sampling.max_new_tokens == 0 and s.request.finish is None:
                s.request.finish = {"type": "length", "length": 0}
        due = [s for s in due if s.request.sampling.max_new_tokens > 0]
        if not due:
            return
        logits = self._model.logits(last[[s.first + s.rows - 1 for s in due]])
        for s, row in zip(due, logits, strict=True):
            if s.request.finish is None:  # not aborted meanwhile
                s.request.accept(sample(row, s.request), self._model.shape.eos)

    def _end(self, request: Request) -> None:
        request.ended = time.monotonic()
        aborted = request.finish is not None and request.finish["type"] == "abort"
        if aborted and self._recorder is not None:
            self._recorder.abandon(request.serial)
        if not aborted and self._cache is not None:
            self._cache.keep(request)
        self._counts.ended(request)
        request.done(request)
