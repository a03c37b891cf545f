"""Which row gets which fault, and the rows themselves: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.capture.fault_proxy import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.capture.faults import Fault

LONGEST = 120
ELDERS = 8
FIRST = 32
"""Rows before the first damaged one: so the elders are judged by then, with up to 12 requests in flight."""
ELDER_TOKENS = 130


@dataclass(frozen=True)
class Plan:
    """Token ids by row; the fault of the damaged ones. ``elders``: the first rows, right and long."""

    ids: tuple[tuple[int, ...], ...]
    faults: dict[int, Fault]
    elders: range

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of a dataset."""
        return [{"input_ids": list(ids)} for ids in self.ids]


def draw(faults: Sequence[Fault], each: int, good: int, seed: int) -> Plan:
    """``each`` cases of every fault and ``good`` without one, shuffled, in blocks of four, behind the elders.

    Lengths are 1 to 120 tokens, a third of them short; no two rows have the same ids.
    """
    rng = random.Random(seed)
    cases: list[Fault | None] = [*(f for f in faults for _ in range(each)), *[None] * good]
    cases += [None] * (-len(cases) % BLOCK)
    rng.shuffle(cases)
    ids = [tokens(rng, ELDER_TOKENS, i) for i in range(FIRST)]
    for first in range(0, len(cases), BLOCK):
        ids += _block(rng, cases[first : first + BLOCK], FIRST + first)
    plan = {FIRST + i: fault for i, fault in enumerate(cases) if fault is not None}
    assert len(set(ids)) == len(ids)
    return Plan(tuple(ids), plan, range(ELDERS))


def _block(rng: random.Random, cases: Sequence[Fault | None], first: int) -> list[tuple[int, ...]]:
    lengths = [_length(rng, fault.least if fault else 1) for fault in cases]
    if any(fault is not None and fault.equal for fault in cases):
        lengths = [max(lengths)] * len(cases)
    shared = any(fault is not None and fault.shared for fault in cases)
    prefix = tokens(rng, min(lengths) // 3, first)[: min(lengths) // 3] if shared else ()
    return [(*prefix, *tokens(rng, n - len(prefix), first + i)) for i, n in enumerate(lengths)]


def _length(rng: random.Random, least: int) -> int:
    longest = rng.choice((max(least, 12), LONGEST, LONGEST))
    return rng.randint(least, longest)


def tokens(rng: random.Random, n: int, row: int) -> tuple[int, ...]:
    """Random ids; the first is the row's own."""
    return tuple([20 + row, *(rng.randrange(20, 40_000) for _ in range(n - 1))][:n])
