"""The ways in which a sample's states can be wrong, as places: row i of the sample is row j of sample b.

Which rows are really wrong is told by the token ids alone and by no measurement: in a causal model a state
is decided by the ids up to it, so two states are the same where those are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

CHUNK = 256
"""Tokens of a chunk of a prefill, as the small real server cuts them."""
TAIL = 8
LONG = 300
"""Samples of more tokens have a second chunk worth corrupting."""


@dataclass(frozen=True)
class Shipped:
    """A sample of the shipped dataset: the kind that it stands for, its name, its token ids."""

    kind: str
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """The corrupted rows of a sample: row i comes from row ``places[i]`` of sample ``samples[i]``; int64 [S]
    both. ``partner``: the sample that the foreign rows come from (None: none, or no matter which)."""

    samples: Tensor
    places: Tensor
    partner: int | None

    def gather(self, states: Sequence[Tensor]) -> Tensor:
        """The corrupted states [S, H] from the right ones of all samples."""
        pairs = zip(self.samples.tolist(), self.places.tolist(), strict=True)
        return torch.stack([states[b][j] for b, j in pairs])


class Corruptions:
    """Every kind of corruption of every sample, in the order of the dataset (the next one is packed next)."""

    def __init__(self, samples: Sequence[Shipped]) -> None:
        self.samples = samples
        self._prefixes = [_prefixes(s.ids) for s in samples]

    def wrong(self, a: int, placed: Placed) -> Tensor:
        """bool [S]: the rows whose state is another one than that of sample ``a``."""
        mine = self._prefixes[a]
        pairs = zip(placed.samples.tolist(), placed.places.tolist(), strict=True)
        return torch.tensor([mine[i] != self._prefixes[b][j] for i, (b, j) in enumerate(pairs)])

    def late(self, a: int) -> Placed:
        """One row late; the first is the last one of the sample before."""
        n = self._length(a)
        before = (a - 1) % len(self.samples)
        return self._rows(a, range(1, n), range(n - 1), None, {0: (before, self._length(before) - 1)})

    def early(self, a: int) -> Placed:
        """One row early; the last is the first one of the next sample."""
        n = self._length(a)
        return self._rows(a, range(n - 1), range(1, n), None, {n - 1: ((a + 1) % len(self.samples), 0)})

    def chunk(self, a: int) -> Placed | None:
        """One row late inside the second chunk alone."""
        n = self._length(a)
        if n <= LONG:
            return None
        end = min(2 * CHUNK, n)
        return self._rows(a, range(CHUNK, end), range(CHUNK - 1, end - 1), None, {})

    def swap(self, a: int) -> Placed:
        """All rows of the sample of the nearest length (from its first again where it is shorter)."""
        return self.tail(a, self.nearest(a), self._length(a))

    def half(self, a: int) -> Placed:
        """The second half is that of the sample of the nearest length, at the same places."""
        n, b = self._length(a), self.nearest(a)
        from_row = n // 2
        return self._foreign(a, b, from_row, [i % self._length(b) for i in range(from_row, n)])

    def neighbour(self, a: int) -> Placed:
        """The last 8 rows are the last 8 of the next sample."""
        return self.end(a, self._next(a), TAIL)

    def last(self, a: int) -> Placed:
        """The last row is the last one of the next sample."""
        return self.end(a, self._next(a), 1)

    def prefix(self, a: int) -> Placed | None:
        """All rows of another sample that begins with the same system prompt."""
        same = [b for b, s in enumerate(self.samples) if s.kind == self.samples[a].kind and b != a]
        if self.samples[a].kind != SHARED:
            return None
        return self.tail(a, next((b for b in same if b > a), same[0]), self._length(a))

    def tail(self, a: int, b: int, count: int) -> Placed:
        """The last ``count`` rows are the first ones of sample ``b``, repeated where it is shorter."""
        n = self._length(a)
        return self._foreign(a, b, n - count, [i % self._length(b) for i in range(count)])

    def end(self, a: int, b: int, count: int) -> Placed:
        """The last ``count`` rows are the last ones of sample ``b`` (fewer where either is shorter)."""
        count = min(count, self._length(a), self._length(b))
        n, m = self._length(a), self._length(b)
        return self._foreign(a, b, n - count, list(range(m - count, m)))

    def nearest(self, a: int) -> int:
        """The sample of the nearest length that has other ids."""
        others = [b for b, s in enumerate(self.samples) if s.ids != self.samples[a].ids]
        return min(others, key=lambda b: (abs(self._length(b) - self._length(a)), b))

    def _next(self, a: int) -> int:
        b = (a + 1) % len(self.samples)
        return b if self.samples[b].ids != self.samples[a].ids else (b + 1) % len(self.samples)

    def _length(self, a: int) -> int:
        return len(self.samples[a].ids)

    def _foreign(self, a: int, b: int, from_row: int, places: list[int]) -> Placed:
        n = self._length(a)
        samples = torch.full((n,), a)
        samples[from_row:] = b
        return Placed(samples, torch.tensor([*range(from_row), *places]), b)

    def _rows(
        self, a: int, to: range, source: range, partner: int | None, edges: dict[int, tuple[int, int]]
    ) -> Placed:
        n = self._length(a)
        samples, places = torch.full((n,), a), torch.arange(n)
        places[to.start : to.stop] = torch.arange(source.start, source.stop)
        for i, (b, j) in edges.items():
            samples[i], places[i] = b, j
        return Placed(samples, places, partner)


SHARED = "shared prefix"

KINDS: dict[str, Callable[[Corruptions, int], Placed | None]] = {
    "one row late": Corruptions.late,
    "one row early": Corruptions.early,
    "late in the second chunk": Corruptions.chunk,
    "swap": Corruptions.swap,
    "stale": Corruptions.swap,
    "shared-prefix swap": Corruptions.prefix,
    "second half foreign": Corruptions.half,
    "last 8 rows foreign": Corruptions.neighbour,
    "last row foreign": Corruptions.last,
}
"""By name. ``stale`` has the rows of ``swap``: only the time of the other request tells them apart."""


def _prefixes(ids: Sequence[int]) -> list[int]:
    """For each place a number that stands for the ids up to and with it."""
    seen, out = 0, []
    for token in ids:
        seen = hash((seen, token))
        out.append(seen)
    return out
