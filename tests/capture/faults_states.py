"""Faults of the numbers: right request id, right token ids, right length; wrong rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.demo.tiny import HIDDEN
from engine.wire.causes import Cause
from tests.capture.faults import RETAKE, WIN_RATE, Fault, Scene

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engine.capture.pythonpath.hsx_capture.dumpfile import Dump

SWAPPED = "states reversed or swapped"


def whole(pick: Callable[[Scene], Dump]) -> Callable[[Scene], None]:
    """All rows are another's first ones."""

    def inject(s: Scene) -> None:
        other = pick(s)
        s.rows(lambda t, name: getattr(other, name)[: s.n])

    return inject


def block(
    pick: Callable[[Scene], Dump], place: Callable[[int], tuple[int, int]], *, same: bool
) -> Callable[[Scene], None]:
    """Rows [first, end) are another's: at the same places, or its last ones."""

    def inject(s: Scene) -> None:
        other, (first, end) = pick(s), place(s.n)
        first = max(first, end - len(other.input_ids) // 2) if not same else first

        def make(t: Tensor, name: str) -> Tensor:
            theirs = getattr(other, name)
            rows = theirs[first:end] if same else theirs[len(theirs) - (end - first) :]
            return torch.cat([t[:first], rows, t[end:]])

        s.rows(make)

    return inject


def reorder(order: Callable[[Scene], list[int]]) -> Callable[[Scene], None]:
    """Its own rows in another order."""

    def inject(s: Scene) -> None:
        at = torch.tensor(order(s))
        s.rows(lambda t, name: t[at])

    return inject


def roll(step: int) -> Callable[[Scene], list[int]]:
    """``step`` places late, around the end."""
    return lambda s: [(i - step) % s.n for i in range(s.n)]


def late(s: Scene) -> None:
    """One row late; the first is the last one of the request before it in the batch."""
    before = s.rng.choice(s.siblings)
    s.rows(lambda t, name: torch.cat([getattr(before, name)[-1:], t[:-1]]))


def shuffled(s: Scene) -> list[int]:
    """At random, and no more than a third of the rows off by the same number."""
    while True:
        order = list(range(s.n))
        s.rng.shuffle(order)
        off = [i - j for i, j in enumerate(order) if i != j]
        if len(off) > s.n // 2 and max(map(off.count, set(off))) <= max(1, len(off) // 3):
            return order


def times(factor: Callable[[Scene], float]) -> Callable[[Scene], None]:
    """Multiplied."""

    def inject(s: Scene) -> None:
        k = factor(s)
        s.rows(lambda t, name: t * k)

    return inject


def noisy(s: Scene) -> None:
    """A hundredth of each row's norm in random directions."""
    g = torch.Generator().manual_seed(s.rng.randrange(1 << 30))

    def make(t: Tensor, name: str) -> Tensor:
        noise = torch.nn.functional.normalize(torch.randn(t.shape, generator=g), dim=-1)
        sum_: Tensor = t + 0.01 * noise * t.norm(dim=-1, keepdim=True)
        return sum_

    s.rows(make)


def one(name: str, change: Callable[[Scene, Tensor], Tensor], tap: int = 0) -> Callable[[Scene], None]:
    """Only one tensor changes: ``last``, ``pre``, or the block of one tap in ``aux``."""

    def inject(s: Scene) -> None:
        t = getattr(s.dump, name).clone()
        if name == "aux":
            columns = slice(tap * HIDDEN, (tap + 1) * HIDDEN)
            t[:, columns] = change(s, t[:, columns])
        else:
            t = change(s, t)
        new: dict[str, Any] = {name: t}
        s.write(replace(s.dump, **new))

    return inject


def value(number: float) -> Callable[[Scene, Tensor], Tensor]:
    """One number of one row."""

    def change(s: Scene, t: Tensor) -> Tensor:
        t = t.clone()
        t[s.rng.randrange(s.n), s.rng.randrange(HIDDEN)] = number
        return t

    return change


def zero_row(s: Scene, t: Tensor) -> Tensor:
    """One row."""
    t = t.clone()
    t[s.rng.randrange(s.n)] = 0
    return t


def repeat_row(s: Scene, t: Tensor) -> Tensor:
    """A row is the one before it; their tokens differ."""
    t = t.clone()
    i = s.rng.choice([i for i in range(1, s.n) if s.ids[i] != s.ids[i - 1]])
    t[i] = t[i - 1]
    return t


def stranger_rows(s: Scene, t: Tensor) -> Tensor:
    """Another client's rows: of the same tensor as far as the width tells (HIDDEN)."""
    other = s.rng.choice(s.strangers)
    assert other.aux is not None
    return other.aux[: s.n, -HIDDEN:]


def halved(s: Scene, t: Tensor) -> Tensor:
    """Half as large."""
    return t * 0.5


def rolled(s: Scene, t: Tensor) -> Tensor:
    """One place late."""
    return torch.roll(t, 1, 0)


def both_lasts(s: Scene) -> None:
    """pre and last alike, the taps right."""
    assert s.dump.pre is not None
    assert s.dump.last is not None
    s.write(replace(s.dump, pre=rolled(s, s.dump.pre), last=rolled(s, s.dump.last)))


def layers(ids: tuple[int, int, int]) -> Callable[[Scene], None]:
    """The states of other layers, while the dump says the right ones."""

    def inject(s: Scene) -> None:
        assert s.lone is not None
        hidden = s.lone.states(s.ids)
        s.write(replace(s.dump, aux=torch.cat([hidden[k + 1] for k in ids], -1)))

    return inject


def exchanged(s: Scene) -> None:
    """The columns of the first two taps."""
    assert s.dump.aux is not None
    blocks = torch.split(s.dump.aux, HIDDEN, -1)
    s.write(replace(s.dump, aux=torch.cat([blocks[1], blocks[0], *blocks[2:]], -1)))


def tail(n: int) -> tuple[int, int]:
    """The last 8 rows, at most half of them."""
    return n - min(8, n // 2), n


def _sibling(s: Scene) -> Dump:
    return s.sibling


def _elder(s: Scene) -> Dump:
    return s.rng.choice(s.elders)


def _same_length(s: Scene) -> Dump:
    return next(e for e in s.elders if len(e.input_ids) == s.n)


def _stranger(s: Scene) -> Dump:
    return s.rng.choice(s.strangers)


def _set(*causes: Cause) -> frozenset[Cause]:
    return frozenset(causes)


C = Cause
FAULTS = (
    Fault("all rows of a request in flight", _set(C.SWAPPED), whole(_sibling), SWAPPED, equal=True),
    Fault("the same, with a shared beginning", _set(C.SWAPPED), whole(_sibling), SWAPPED, 9, True, True),
    Fault(
        "rows in reverse order", _set(C.EVIDENCE_LOW), reorder(lambda s: list(range(s.n))[::-1]), SWAPPED, 4
    ),
    Fault("rows in random order", _set(C.EVIDENCE_LOW), reorder(shuffled), least=8),
    Fault("all rows of a request answered before", _set(C.STALE), whole(_elder)),
    Fault("all rows of another client's request", _set(C.EVIDENCE_LOW), whole(_stranger)),
    Fault(
        "last 8 rows of a request in flight",
        _set(C.NEIGHBOUR),
        block(_sibling, tail, same=False),
        "",
        2,
        True,
    ),
    Fault(
        "second half of a request in flight",
        _set(C.NEIGHBOUR),
        block(_sibling, lambda n: (n // 2, n), same=True),
        least=2,
        equal=True,
    ),
    Fault(
        "first half of a request in flight",
        _set(C.NEIGHBOUR),
        block(_sibling, lambda n: (0, n // 2), same=True),
        least=2,
        equal=True,
    ),
    Fault("last 8 rows of another client's", _set(C.NEIGHBOUR), block(_stranger, tail, same=False), least=2),
    Fault(
        "last row alone of another client's",
        _set(C.NEIGHBOUR),
        block(_stranger, lambda n: (n - 1, n), same=False),
        least=2,
    ),
    Fault(
        "rows in the middle of another client's",
        _set(C.EVIDENCE_LOW),
        block(_stranger, lambda n: (n // 3, n // 3 + n // 4), same=True),
        least=8,
    ),
    Fault("rows rolled one late", _set(C.SHIFTED), reorder(roll(1)), least=2),
    Fault("rows rolled one early", _set(C.SHIFTED), reorder(roll(-1)), least=3),
    Fault("one late, the first row a neighbour's", _set(C.SHIFTED), late, least=3),
    Fault("rows rolled eight late", _set(C.SHIFTED), reorder(roll(8)), least=20),
    Fault(
        "states times 0.9 to 2", _set(C.EVIDENCE_LOW), times(lambda s: s.rng.choice((0.9, 1.01, 1.5, 2.0)))
    ),
    Fault("signs flipped", _set(C.EVIDENCE_LOW), times(lambda s: -1.0)),
    Fault("noise of 1 %", _set(C.EVIDENCE_LOW), noisy),
    Fault("lowest tap alone another client's", _set(C.EVIDENCE_LOW), one("aux", stranger_rows)),
    Fault("lowest tap alone rolled", _set(C.SHIFTED), one("aux", rolled), least=2),
    Fault("pre alone rolled", _set(C.EVIDENCE_LOW), one("pre", rolled), least=2),
    Fault("last alone another client's", _set(C.EVIDENCE_LOW), one("last", stranger_rows)),
    Fault("columns of two taps exchanged", _set(C.WRONG_LAYERS), exchanged),
    Fault("every tap one layer early", _set(C.WRONG_LAYERS), layers((0, 2, 3))),
    Fault(
        "every tap one layer late",
        _set(C.EVIDENCE_LOW),
        layers((2, 4, 5)),
        why="nothing above the lowest tap is recomputed, so the layer cannot be named",
    ),
    Fault("NaN in one tap", _set(C.NON_FINITE), one("aux", value(float("nan")), 1), "NaN"),
    Fault("NaN in pre", _set(C.NON_FINITE), one("pre", value(float("nan"))), "NaN"),
    Fault("infinity in one tap", _set(C.NON_FINITE), one("aux", value(float("inf")), 2), "Inf"),
    Fault("all states zero", _set(C.ZERO_ROWS), times(lambda s: 0.0), "all-zero states"),
    Fault("one zero row in one tap", _set(C.ZERO_ROWS), one("aux", zero_row, 1), "all-zero states"),
    Fault("a row is the one before it", _set(C.REPEATED_STATES), one("aux", repeat_row, 2), least=2),
    Fault("all rows are the first", _set(C.REPEATED_STATES), reorder(lambda s: [0] * s.n), least=2),
    Fault(
        "states of a sample with other tokens",
        _set(C.DUPLICATE),
        whole(_same_length),
        run=WIN_RATE,
        why="with recomputation the same fault is swapped or stale",
    ),
    Fault("middle tap alone rolled", _set(C.EVIDENCE_LOW), one("aux", rolled, 1), least=2, run=RETAKE),
    Fault("top tap alone another client's", _set(C.EVIDENCE_LOW), one("aux", stranger_rows, 2), run=RETAKE),
    Fault("top tap alone halved", _set(C.EVIDENCE_LOW), one("aux", halved, 2), run=RETAKE),
    Fault("pre and last alike rolled", _set(C.EVIDENCE_LOW), both_lasts, least=2, run=RETAKE),
)
