"""What the server counts: the traffic of a demo, and the totals behind /v1/loads and /metrics."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from engine.capture.pythonpath.hsx_capture.traffic import Traffic

if TYPE_CHECKING:
    from engine.demo.attention import Segment
    from engine.demo.requests import Request


@dataclass
class Totals:
    """Sums since the server began."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    e2e_seconds: float = 0.0
    http: dict[tuple[str, str, int], int] = field(default_factory=dict)


class Counts:
    """Both, behind one lock: written by the scheduler thread, read by the HTTP side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._totals = Totals()

    def traffic(self) -> dict[str, int]:
        """A snapshot of the traffic."""
        with self._lock:
            return asdict(self._traffic)

    def totals(self) -> Totals:
        """A snapshot of the sums."""
        with self._lock:
            t = self._totals
            return Totals(**{**vars(t), "http": dict(t.http)})

    def accepted(self, request: Request) -> None:
        """A request came in."""
        with self._lock:
            t = self._traffic
            t.ours += request.is_ours
            t.foreign += request.is_foreign
            t.health += request.is_health
            t.complete += request.is_completion
            self._totals.requests += 1

    def forward(self, segments: list[Segment]) -> None:
        """A forward was computed."""
        foreign = any(s.request.is_foreign for s in segments)
        with self._lock:
            t = self._traffic
            t.largest_batch = max(t.largest_batch, len(segments))
            self._totals.forwards += 1
            for s in segments:
                if not s.prefill:
                    continue
                self._totals.prefilled_tokens += s.rows
                t.chunks += s.request.is_ours
                if foreign and s.request.is_ours and not s.request.shared_with_foreign:
                    s.request.shared_with_foreign = True
                    t.shared_forwards += 1

    def ended(self, request: Request) -> None:
        """A request got its answer."""
        with self._lock:
            t = self._totals
            t.aborted += request.finish is not None and request.finish["type"] == "abort"
            t.prompt_tokens += len(request.prompt)
            t.cached_tokens += request.cached
            t.generated_tokens += len(request.output)
            t.e2e_seconds += request.ended - request.arrived

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP reply went out."""
        with self._lock:
            key = (method, route, status)
            self._totals.http[key] = self._totals.http.get(key, 0) + 1
