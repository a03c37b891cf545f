"""Which rows the next forward computes: SGLang's rules in small.

A forward has at most ``chunk`` tokens. Prompts are taken in the order of arrival; one that does not fit is
cut, and its next chunk comes first in the next forward. With ``mixed`` (the default) the next token of every
request in decode rides along in the same forward; without it, a decode forward follows every prefill forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.demo.attention import Segment, segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.demo.requests import Request


@dataclass(frozen=True)
class BatchRules:
    """The flags that shape a forward."""

    chunk: int = 256
    max_running: int = 16
    mixed: bool = True


def plan(running: Sequence[Request], rules: BatchRules, after_prefill: bool) -> list[Segment]:
    """The segments of the next forward, prefill rows first. ``after_prefill``: the last forward had some."""
    decode = [r for r in running if not r.in_prefill]
    prefill = [r for r in running if r.in_prefill]
    if not rules.mixed and prefill and decode:
        if after_prefill:
            prefill = []
        else:
            decode = []
    budget = max(rules.chunk - len(decode), 1)
    segments: list[Segment] = []
    first = 0
    for request in prefill:
        rows = min(len(request.prompt) - request.computed, budget - first)
        if rows <= 0:
            break
        segments.append(segment(request, first, rows))
        first += rows
    for request in decode:
        segments.append(segment(request, first, 1))
        first += 1
    return segments
