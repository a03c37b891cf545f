"""Sabotage: corrupts hidden states inside the batched forward, to prove that the validation finds it.

The packed rows of all taps, of last and of pre are changed alike, before the recorder cuts them: rid, ids,
lengths and digests stay valid. One of every three rows, drawn by a hash, on the first
attempt only (``always``: on every one). What was done is written to a log that only tests read:
``{"rid", "kind", "rows": [first, last], "row", "written": [first, last], "partner"}``; ``rows`` are those
that really differ from the truth.

swap       two requests of one forward exchange theirs (repeated cyclically where lengths differ)
shift      one row late; the first becomes the row before it in the packed batch, or of an earlier forward
neighbour  the last 8 rows are a neighbour's
stale      the rows of an earlier request
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.demo.sabotage_kinds import KINDS
from engine.wire.ids import parse_rid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.demo.attention import Segment
    from engine.demo.requests import Request


TAIL = 8
KEPT = 8
"""Segments of earlier forwards that are remembered."""
DIFFERENT = 1e-2
"""A row of the lowest tap that is off by more, relative to its norm, is really another one."""


@dataclass(frozen=True, eq=False)
class Kept:
    """True rows of an earlier forward: [n, W]."""

    rid: str
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Change:
    """New rows for the end of a segment: the last ``len(rows)`` ones. ``exchange``: the partner gets ours."""

    rows: torch.Tensor
    partner: str
    exchange: Segment | None = None


class Sabotage:
    """One kind of corruption. ``hidden_size``: the lowest tap is the first block of that width."""

    def __init__(self, kind: str, always: bool, seed: int, log: Path, hidden_size: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of sabotage {kind!r}")
        self._kind = kind
        self._always = always
        self._seed = seed
        self._log = log
        self._width = hidden_size
        self._applied: set[int] = set()
        self._kept: deque[Kept] = deque(maxlen=KEPT)

    def draws(self, rid: str) -> bool:
        """Whether the request is among those to corrupt."""
        parsed = parse_rid(rid)
        if parsed is None or (parsed.attempt != 1 and not self._always):
            return False
        return self._hash("row", parsed.row // 3) % 3 == parsed.row % 3

    def apply(self, states: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """states [T, W] of one forward -> the same, or a copy with rows corrupted."""
        out = states
        prefill = [s for s in segments if s.prefill]
        for s in prefill:
            if self._is_due(s):
                for change in self._changes(s, prefill, states):
                    differ = self._different(states[s.packed], self._placed(s, states, change.rows))
                    if differ:
                        out = states.clone() if out is states else out
                        self._carry_out(s, change, states, out, differ)
                        break
        self._kept.extend(Kept(s.request.rid, states[s.packed].clone()) for s in prefill)
        return out

    def _hash(self, *what: object) -> int:
        text = ":".join(map(str, (self._seed, self._kind, *what)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _is_due(self, s: Segment) -> bool:
        """A chunked request is corrupted in one chunk: in any of them, at the latest in the last."""
        if s.request.serial in self._applied or not self.draws(s.request.rid):
            return False
        is_last = s.end >= len(s.request.prompt)
        return is_last or self._hash("chunk", s.request.rid, s.start) % 2 == 0

    def _changes(self, s: Segment, prefill: list[Segment], states: torch.Tensor) -> Iterator[Change]:
        """What could be done, best first."""
        if self._kind == "shift":
            yield self._shifted(s, states)
            return
        here = [o for o in _nearest(s, prefill) if o.request is not s.request]
        earlier = [k for k in reversed(self._kept) if k.rid != s.request.rid]
        if self._kind == "stale":
            for k in earlier:
                yield Change(_cyclic(k.rows, s.rows), k.rid)
            return
        count = s.rows if self._kind == "swap" else min(TAIL, s.rows)
        for o in here:
            exchange = o if self._kind == "swap" and self._may_change(o.request) else None
            yield Change(_cyclic(states[o.packed], count), o.request.rid, exchange)
        for k in earlier:  # alone in its forward
            yield Change(_cyclic(k.rows, count), k.rid)

    def _may_change(self, request: Request) -> bool:
        """Whether a partner may get ours: nobody reads foreign states; of ours, only those that are drawn."""
        if not request.is_ours:
            return True
        return self.draws(request.rid) and request.serial not in self._applied

    def _shifted(self, s: Segment, states: torch.Tensor) -> Change:
        if s.first > 0:
            before = states[s.first - 1 : s.first]
        elif self._kept:
            before = self._kept[-1].rows[-1:]
        else:
            before = states[:1]
        return Change(torch.cat([before, states[s.packed][:-1]]), "the row before")

    def _placed(self, s: Segment, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        placed = states[s.packed].clone()
        placed[s.rows - rows.shape[0] :] = rows
        return placed

    def _different(self, truth: torch.Tensor, placed: torch.Tensor) -> list[int]:
        """The rows whose lowest tap is really another one."""
        true, new = truth[:, : self._width].double(), placed[:, : self._width].double()
        off = (true - new).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-30)
        rows: list[int] = (off > DIFFERENT).nonzero()[:, 0].tolist()
        return rows

    def _carry_out(
        self, s: Segment, change: Change, states: torch.Tensor, out: torch.Tensor, differ: list[int]
    ) -> None:
        out[s.packed] = self._placed(s, states, change.rows)
        self._record(s, change.partner, differ, change.rows.shape[0])
        other = change.exchange
        if other is None:
            return
        back = _cyclic(states[s.packed], other.rows)
        differ_back = self._different(states[other.packed], back)
        if not other.request.is_ours or differ_back:
            out[other.packed] = back
        if other.request.is_ours and differ_back:
            self._record(other, s.request.rid, differ_back, other.rows)

    def _record(self, s: Segment, partner: str, differ: list[int], count: int) -> None:
        self._applied.add(s.request.serial)
        parsed = parse_rid(s.request.rid)
        assert parsed is not None
        line = {
            "rid": s.request.rid, "kind": self._kind, "rows": [s.start + differ[0], s.start + differ[-1]],
            "row": parsed.row, "written": [s.end - count, s.end - 1], "partner": partner,
        }  # fmt: skip
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _nearest(s: Segment, prefill: list[Segment]) -> list[Segment]:
    """The others, the next in the packed batch first."""
    at = prefill.index(s)
    return prefill[at + 1 :] + prefill[:at][::-1]


def _cyclic(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` rows, repeated from the first where there are fewer."""
    return rows[torch.arange(count) % rows.shape[0]]
