"""How far apart are right and wrong states by the content evidence, for every kind of sample shipped?

    python -m benchmarks.evidence [--model DIR]

Right states of every row of the shipped dataset (taken.py), rearranged by each corruption (corruptions.py),
judged by engine.capture.evidence as the product does. Prints the tables of docs/evidence.md; exit 1 when
recompute refuses right states, or in float32 accepts wrong ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from benchmarks.corruptions import KINDS, TAIL, Corruptions, Placed
from benchmarks.measure import machine
from benchmarks.shipped import shipped
from benchmarks.taken import COMPANY, DEEPEST, TAP, UPPER, Taken, rounded_forward, take
from engine.capture.evidence import TOLERANCE, Other, judge, judge_win_rate, row_errors, win_rate
from engine.run.validate import RETAKE_COSINE
from engine.targets.head import HeadRows
from tests.models import smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchmarks.corruptions import Shipped


@dataclass
class Cell:
    """One corruption of some samples, by recompute in one dtype. ``worst``: the largest error of each sample;
    ``least``: the smallest one of its really wrong rows."""

    worst: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    wrong: int = 0
    beyond: int = 0
    accepted: list[str] = field(default_factory=list)
    named: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> str:
        """Refused of all samples."""
        return f"{len(self.worst) - len(self.accepted)}/{len(self.worst)}"


def judged(post: torch.Tensor, head_rows: torch.Tensor, ids: Sequence[int]) -> tuple[float, str]:
    """(win rate, verdict) as the product judges it."""
    rate, pairs = win_rate(post, head_rows, ids)
    beside = max(win_rate(post, head_rows, ids, offset)[0] for offset in (-1, 1))
    return rate, VERDICT[judge_win_rate(rate, pairs, beside)]


class Evidence:
    """The measurement over all samples."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.samples = shipped(model)
        self.taken: Taken = take(model, self.samples)
        self.corrupt = Corruptions(self.samples)
        self.kinds = {
            s.kind: [a for a, o in enumerate(self.samples) if o.kind == s.kind] for s in self.samples
        }
        self.failures: list[str] = []

    def sizes(self) -> None:
        """What is measured."""
        head("kind", "samples", "tokens each", "tokens")
        for kind, rows in [*self.kinds.items(), ("all", list(range(len(self.samples))))]:
            n = [len(self.samples[a].ids) for a in rows]
            line(kind, len(rows), f"{min(n)} to {max(n)}", sum(n))

    def right(self) -> None:
        """Right states by recompute."""
        t = self.taken
        packed, truth = t.states["float32"], t.truth["float32"]
        ways: dict[str, tuple[str, list[Tensor], list[Tensor]]] = {
            "float32, lone": ("float32", t.lone, truth),
            "float32, packed in chunks": ("float32", packed, truth),
            "packed, rounded to bfloat16": ("bfloat16", [s.bfloat16() for s in packed], truth),
            "computed in bfloat16": ("bfloat16", t.states["bfloat16"], t.truth["bfloat16"]),
            "computed in float16": ("float16", t.states["float16"], t.truth["float16"]),
        }
        head("kind", *ways)
        refused = dict.fromkeys(ways, 0)
        for kind, rows in [*self.kinds.items(), ("all", list(range(len(self.samples))))]:
            cells = []
            for way, (dtype, states, own) in ways.items():
                judged = [judge(states[a], own[a], dtype) for a in rows]
                cells.append(three([worst for worst, _ in judged]))
                bad = [self.samples[a].name for a, (_, w) in zip(rows, judged, strict=True) if w is not None]
                refused[way] = len(bad)
                self.failures += [f"right states refused: {way}, {name}" for name in bad if kind == "all"]
            line(kind, *cells)
        line("refused", *(f"{n}/{len(self.samples)}" for n in refused.values()))

    def wrong(self, name: str) -> None:
        """One corruption by recompute, by kind of sample."""
        print(f"\n### {name}")
        head(
            "kind", "largest error", "smallest error of a wrong row", "wrong rows beyond", "refused", "named",
            "beyond, bfloat16", "refused, bfloat16",
        )  # fmt: skip
        total = {"float32": Cell(), "bfloat16": Cell()}
        for kind, rows in self.kinds.items():
            cells = {dtype: self._cell(name, rows, dtype, total[dtype]) for dtype in total}
            if cells["float32"].worst:
                self._wrong_line(kind, cells)
        self._wrong_line("all", total)
        self.failures += [f"wrong states accepted: {name}, {who}" for who in total["float32"].accepted]

    def _wrong_line(self, kind: str, cells: dict[str, Cell]) -> None:
        f, b = cells["float32"], cells["bfloat16"]
        named = names(f.named) + (f" (bfloat16: {names(b.named)})" if b.named != f.named else "")
        line(kind, three(f.worst), three(f.least), share(f), f.refused, named, share(b), b.refused)

    def _cell(self, name: str, rows: Sequence[int], dtype: str, total: Cell) -> Cell:
        cell = Cell()
        for a in rows:
            placed = KINDS[name](self.corrupt, a)
            if placed is not None:
                for c in (cell, total):
                    self._add(c, name, a, placed, dtype)
        return cell

    def _add(self, cell: Cell, name: str, a: int, placed: Placed, dtype: str) -> None:
        truth = self.taken.truth[dtype]
        states = placed.gather(self.taken.states[dtype])
        wrong = self.corrupt.wrong(a, placed)
        assert bool(wrong.any()), f"{name} changes nothing in {self.samples[a].name}"
        errors = row_errors(states, truth[a])[wrong]
        worst, found = judge(states, truth[a], dtype)
        cell.worst.append(worst)
        cell.least.append(float(errors.min()))
        cell.wrong += len(errors)
        cell.beyond += int((errors > TOLERANCE[dtype]).sum())
        if found is None:
            cell.accepted.append(self.samples[a].name)
            return
        _, found = judge(states, truth[a], dtype, self._others(a, placed, name == "stale", truth))
        assert found is not None
        cell.named[found.cause.value] += 1

    def _others(self, a: int, placed: Placed, stale: bool, truth: Sequence[Tensor]) -> list[Other]:
        """What the product compares with: the requests in flight with sample ``a``, then those before."""
        n = len(self.samples)
        near = [(a + d) % n for d in range(-COMPANY // 2, COMPANY // 2) if d]
        b = placed.partner
        if stale:
            near = [i for i in near if i != b]
        elif b is not None and b not in near:
            near[-1] = b
        before = [i for i in range(n) if i != a and i not in near]
        return [Other(f"row {i}", truth[i], i in near) for i in (*near, *before)]

    def pairs(self) -> None:
        """Foreign rows from every other sample in turn, the hardest cases for recompute."""
        c = self.corrupt
        ways: dict[str, Callable[[int, int], Placed]] = {
            "swap": lambda a, b: c.tail(a, b, len(self.samples[a].ids)),
            "last 8 rows are its last 8": lambda a, b: c.end(a, b, TAIL),
            "last 8 rows are its first 8": lambda a, b: c.tail(a, b, min(TAIL, len(self.samples[a].ids))),
            "last row is its last": lambda a, b: c.end(a, b, 1),
            "last row is its first": lambda a, b: c.tail(a, b, 1),
        }
        head("corruption", "pairs", *(f"{d}: largest error | accepted" for d in TOLERANCE))
        for way, place in ways.items():
            cells: list[object] = []
            for dtype, tolerance in TOLERANCE.items():
                worst = self._pairs(place, dtype)
                missed = [(a, b) for a, b, error in worst if error <= tolerance]
                cells.append(f"{three([e for _, _, e in worst])} | {len(missed)}")
                if dtype == "float32":
                    self.failures += [f"accepted pair: {way}, {p}" for p in missed]
                elif missed:
                    who = sorted({self.samples[a].name for pair in missed for a in pair})
                    print(
                        f"<!-- {dtype}, {way}: {len(missed)} missed among {', '.join(who)} -->",
                        file=sys.stderr,
                    )
            line(way, len(worst), *cells)

    def _pairs(self, place: Callable[[int, int], Placed], dtype: str) -> list[tuple[int, int, float]]:
        states, truth, out = self.taken.states[dtype], self.taken.truth[dtype], []
        for a, mine in enumerate(self.samples):
            for b, theirs in enumerate(self.samples):
                if mine.ids == theirs.ids:
                    continue
                placed = place(a, b)
                at = (placed.samples == b).nonzero()[:, 0]
                errors = row_errors(states[b][placed.places[at]], truth[a][at])
                out.append((a, b, float(errors.max())))
        return out

    def twins(self) -> None:
        """Two rows of equal ids: a swap of them is none."""
        a, b = self.kinds["twins"]
        states, truth = self.taken.states["float32"], self.taken.truth["float32"]
        same = self.samples[a].ids == self.samples[b].ids
        error = float(row_errors(states[b], truth[a]).max())
        print(f"\nThe twins have equal ids: {same}; the states of one against the other: {error:.2g}\n")

    def win_rates(self) -> None:
        """Right and wrong ``last`` by the win rate, by kind of sample."""
        rows = HeadRows(self.model)
        heads = [rows.rows(s.ids) for s in self.samples]
        ways = [None, *(name for name in KINDS if name != "stale")]
        head("kind", *(name or "right" for name in ways))
        changed, largest = 0, 0.0
        verdicts = {name: Counter[str]() for name in ways}
        for kind, members in self.kinds.items():
            cells = []
            for name in ways:
                rates, seen = [], Counter[str]()
                for a in members:
                    placed = KINDS[name](self.corrupt, a) if name else None
                    if name and placed is None:
                        continue
                    post = placed.gather(self.taken.last) if placed else self.taken.last[a]
                    rate, verdict = judged(post, heads[a], self.samples[a].ids)
                    rounded, again = judged(post.bfloat16(), heads[a], self.samples[a].ids)
                    changed += verdict != again
                    largest = max(largest, abs(rate - rounded))
                    rates.append(rate)
                    seen[verdict] += 1
                verdicts[name] += seen
                cells.append(f"{three(rates)} ({names(seen)})" if rates else "")
            line(kind, *cells)
        line("all", *(names(v) for v in verdicts.values()))
        print(f"\nRounded to bfloat16: {changed} verdicts change, no rate by more than {largest:.3f}\n")

    def retake(self) -> None:
        """A fault in one upper state alone, which recompute cannot see, by a lone retake."""
        limits = sorted({RETAKE_COSINE["float32"], RETAKE_COSINE["bfloat16"]}, reverse=True)
        head(
            "corruption",
            *(f"{w}: least cosine | {' | '.join(f'>= {x}' for x in limits)}" for w in ("tap 14", "last")),
        )
        for name in (n for n in KINDS if n != "stale"):
            cells = []
            for states in (self.taken.upper, self.taken.last):
                least = []
                for a in range(len(self.samples)):
                    placed = KINDS[name](self.corrupt, a)
                    if placed is not None:
                        x, y = placed.gather(states).double(), states[a].double()
                        least.append(float(torch.nn.functional.cosine_similarity(x, y, dim=-1).min()))
                counts = " | ".join(f"{sum(c >= x for c in least)}/{len(least)}" for x in limits)
                cells.append(f"{three(least)} | {counts}")
            line(name, *cells)

    def depth(self) -> None:
        """How the error of right rows grows with the depth of the lowest tap, computed in bfloat16."""
        some: list[Shipped] = [s for s in self.samples if len(s.ids) < 300][::3]
        pairs = rounded_forward(self.model, some, "bfloat16", DEEPEST)
        print(f"\n{len(some)} samples, {sum(len(s.ids) for s in some)} rows")
        head("lowest tap", "median row", "99 % of rows", "largest", "samples beyond the tolerance")
        for tap in range(DEEPEST + 1):
            each = [row_errors(states[tap], truth[tap]) for states, truth in pairs]
            errors = torch.cat(each)
            over = sum(bool((e > TOLERANCE["bfloat16"]).any()) for e in each)
            line(tap, *(f"{float(errors.quantile(q)):.2g}" for q in (0.5, 0.99, 1.0)), f"{over}/{len(some)}")


VERDICT = {True: "yes", None: "?", False: "no"}


def three(values: Sequence[float]) -> str:
    """Least, median, largest."""
    return " / ".join(f"{v:.2g}" for v in (min(values), statistics.median(values), max(values)))


def share(cell: Cell) -> str:
    """Wrong rows beyond the tolerance, of all wrong rows."""
    return f"{cell.beyond}/{cell.wrong}"


def names(counts: Counter[str]) -> str:
    """Counts in a few words."""
    return ", ".join(f"{n} {name}" for name, n in counts.most_common())


def head(*cells: str) -> None:
    """A table's head; a cell may hold several columns."""
    columns = " | ".join(cells)
    print(f"\n| {columns} |\n|{'---|' * (columns.count('|') + 1)}")


def line(*cells: object) -> None:
    """A table's line."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> int:
    """Measure and print the tables."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", help="a model folder (default: SmolLM2 from its package)")
    model = p.parse_args().model or str(smollm2())
    torch.set_num_threads(1)
    began = time.monotonic()
    print(machine())
    e = Evidence(model)
    print(f"lowest tap {TAP}, upper tap {UPPER}; states taken in {time.monotonic() - began:.0f} s")
    e.sizes()
    print("\n## Right states, recompute: largest row error of a sample")
    e.right()
    print("\n## Wrong states, recompute")
    for name in KINDS:
        e.wrong(name)
    print("\n## Every pair of samples")
    e.pairs()
    e.twins()
    print("## Win rate")
    e.win_rates()
    print("## A fault in one state alone, by a retake")
    e.retake()
    print("\n## The depth of the lowest tap")
    e.depth()
    print(f"\n{time.monotonic() - began:.0f} s")
    for failure in e.failures:
        print(f"FAILURE: {failure}")
    return 1 if e.failures else 0


if __name__ == "__main__":
    sys.exit(main())
