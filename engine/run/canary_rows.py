"""Which rows the canary takes: the shortest, the longest, and the two that a prefix cache would mix up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.dataset.samples import Counted, Samples
    from engine.dataset.tokens import Sample

LONGEST = 512
"""Tokens: no longer row is taken, unless there is no other."""

SEARCHED = 256
"""So many rows at most are encoded to find two that begin alike."""

_NONE: tuple[int, tuple[int, ...]] = (0, ())

FOREIGN, FOREIGN_TOKENS = 12, 24
"""Requests of the canary's own foreign load, and the length of the longest of them in tokens."""


@dataclass(frozen=True)
class Chosen:
    """The canary's samples, by length.

    Attributes:
        twice: the row of the sample that is sent twice at once; None when nothing is sent.
        shared: the two rows that begin alike, () when no two do; prefix: in how many tokens.
    """

    samples: tuple[Sample, ...]
    twice: int | None = None
    shared: tuple[int, ...] = ()
    prefix: int = 0


def choose(samples: Samples, counted: Counted, pending: Sequence[int], number: int, least: int = 1) -> Chosen:
    """``number`` rows (0: none), from 3 on with the two that share the longest prefix, so up to one more.

    Encodes up to SEARCHED rows. The longest is the one that is sent twice. Rows below ``least`` tokens are
    left out where there are others: matched by count, a row of one token is any decode step's equal.
    """
    usable = [r for r in pending if least <= counted.n_tokens[r] <= LONGEST] or list(pending)
    usable.sort(key=lambda r: (counted.n_tokens[r], r))
    if number <= 0 or not usable:
        return Chosen(())
    rows = {usable[-1]} if number == 1 else {usable[0], usable[-1]}
    prefix, shared = _NONE
    if number >= 3:
        prefix, shared = longest_shared_prefix([samples.sample(r) for r in _spread(usable, SEARCHED)])
        rows.update(shared)
    for row in _spread(usable, number):
        if len(rows) >= number:
            break
        rows.add(row)
    taken = sorted(rows, key=lambda r: (counted.n_tokens[r], r))
    return Chosen(tuple(samples.sample(r) for r in taken), taken[-1], shared, prefix)


def longest_shared_prefix(samples: Sequence[Sample]) -> tuple[int, tuple[int, ...]]:
    """(tokens, two rows) of the two samples with other ids that begin alike the longest; (0, ()) if none do.

    Sorted by their ids, the two stand beside each other.
    """
    different = sorted({s.input_ids: s.row for s in reversed(samples)}.items())
    best = _NONE
    for (a, row_a), (b, row_b) in itertools.pairwise(different):
        same = _same(a, b)
        if same > best[0]:
            best = same, tuple(sorted((row_a, row_b)))
    return best


def foreign_prompts(chosen: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Token ids of FOREIGN short requests that are not ours: beginnings of the samples (as a prefix cache
    would meet them), and the same backwards. Their ids are known to the model."""
    prompts: list[tuple[int, ...]] = []
    for i in range(FOREIGN if chosen else 0):
        ids = chosen[i % len(chosen)].input_ids[: FOREIGN_TOKENS - i]
        prompts.append(ids if i % 2 == 0 else ids[::-1])
    return prompts


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _spread(rows: Sequence[int], number: int) -> list[int]:
    """``number`` of them at even distances; all when there are no more."""
    step = max(len(rows) / number, 1)
    return sorted({rows[min(int(step * i + step / 2), len(rows) - 1)] for i in range(number)})
