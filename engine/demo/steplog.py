"""The log lines of a forward, in SGLang's words, so that one parser reads both servers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.demo.attention import Segment
    from engine.demo.scheduler import Load

log = logging.getLogger("hsx.demo")

DECODE_LOG_INTERVAL = 40
"""Decode forwards per line, as in SGLang."""


class StepLog:
    """Counts forwards and writes a line for each prefill and for every 40th decode forward."""

    def __init__(self) -> None:
        self.forwards = 0
        self.gen_throughput = 0.0
        self._decodes = 0
        self._generated = 0
        self._since = time.monotonic()
        self._last_prefill = time.monotonic()

    def note(self, segments: list[Segment], seconds: float, queued: int, load: Load) -> None:
        """After a forward that took ``seconds``."""
        self.forwards += 1
        prefill = [s for s in segments if s.prefill]
        decode = len(segments) - len(prefill)
        usage = load.used_tokens / max(load.capacity_tokens, 1)
        if prefill:
            self._prefill_line(prefill, decode, usage, queued)
        self._generated += decode
        if decode and not prefill:
            self._decodes += 1
            if self._decodes % DECODE_LOG_INTERVAL == 0:
                self._decode_line(decode, usage, queued, load)

    def _prefill_line(self, prefill: list[Segment], decode: int, usage: float, queued: int) -> None:
        now = time.monotonic()
        tokens = sum(s.rows for s in prefill)
        cached = sum(s.request.cached for s in prefill if s.start == s.request.cached)
        pending = sum(len(s.request.prompt) - s.end for s in prefill)
        rate = tokens / max(now - self._last_prefill, 1e-9)
        self._last_prefill = now
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, #pending-token: %d, cpu graph: False, "
            "input throughput (token/s): %.2f",
            len(prefill), tokens, cached, usage, decode, queued, pending, rate,
        )  # fmt: skip

    def _decode_line(self, decode: int, usage: float, queued: int, load: Load) -> None:
        now = time.monotonic()
        self.gen_throughput = self._generated / max(now - self._since, 1e-9)
        self._generated, self._since = 0, now
        log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cpu graph: False, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            decode, load.used_tokens, usage, self.gen_throughput, queued,
        )  # fmt: skip
