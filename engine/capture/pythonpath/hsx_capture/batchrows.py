"""Whose rows stand where in a forward of SGLang: read from the scheduler's batch before the forward, since
padding and the scheduler change it afterwards.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from .recorder import PREFIX

_SERIALS = itertools.count(1)

PREFILLING = ("EXTEND", "MIXED")


@dataclass
class Rows:
    """One request of ours in a forward: ``count`` rows from ``first`` of the packed states are its prompt
    from ``start`` on. ``seen`` and ``pre`` are copies taken while the forward ran."""

    index: int
    rid: str
    serial: int
    prompt: tuple[int, ...]
    start: int
    first: int
    count: int
    seen: Any = None
    pre: Any = None


@dataclass
class Forward:
    """A forward with rows of ours. ``total``: rows of all requests; ``norms``: runs of the final norm."""

    ours: list[Rows]
    total: int
    requests: int
    mode: str
    norms: int = 0
    norm_rows: int = 0


def prefills(batch: Any) -> bool:
    """EXTEND and MIXED: decode steps, verification and the like have no rows of a prompt."""
    return batch is not None and batch.forward_mode is not None and batch.forward_mode.name in PREFILLING


def rows_of_ours(batch: Any) -> Forward | None:
    """Read a ScheduleBatch that prefills; None when nothing of ours is in it.

    In MIXED a request's own numbers lie about its decode row; the batch's lists are right
    (schedule_batch.py).
    """
    if not any(r.rid.startswith(PREFIX) for r in batch.reqs):
        return None
    decoding = {id(r) for r in (batch.decoding_reqs or ())}
    ours, first = [], 0
    for index, (request, start, count) in enumerate(
        zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    ):
        if request.rid.startswith(PREFIX) and id(request) not in decoding:
            serial, prompt = _known(request)
            if start < len(prompt):  # a request taken back computes its own output again, too
                rows = min(count, len(prompt) - start)
                ours.append(Rows(index, request.rid, serial, prompt, start, first, rows))
        first += count
    return Forward(ours, first, len(batch.reqs), batch.forward_mode.name.lower()) if ours else None


def _known(request: Any) -> tuple[int, tuple[int, ...]]:
    """A number of its own for each request object, and its prompt, copied once: not once a chunk."""
    known: tuple[int, tuple[int, ...]] | None = getattr(request, "_hsx_capture", None)
    if known is None:
        known = request._hsx_capture = (next(_SERIALS), tuple(request.origin_input_ids))
    return known
