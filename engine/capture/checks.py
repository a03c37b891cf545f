"""The checks that need no model: identity, shape, type and finiteness of a dump (design.md 4).

Each failure has one cause. The order matters: a dump of another request is named so before its length is
judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.capture.states import Finding, States
from engine.wire.causes import Cause
from engine.wire.ids import parse_rid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """What a dump must be. ``last`` is "pre", "post" or None; ``dtype`` a torch dtype name, the server's
    own."""

    rid: str
    input_ids: tuple[int, ...]
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    last: str | None


def check_states(states: States, want: Expected) -> Finding | None:
    """The first thing that is wrong with ``states``, or None. Shapes: see States."""
    for check in (_identity, _ids, _rows, _layers, _width_and_dtype, _values):
        finding = check(states, want)
        if finding is not None:
            return finding
    return None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two sequences differ (None: equal)."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _found(cause: Cause, states: States, got: Any, expected: Any, **evidence: Any) -> Finding:
    return Finding(cause, got, expected, evidence, states)


def _identity(s: States, want: Expected) -> Finding | None:
    if s.rid == want.rid:
        return None
    ours, theirs = parse_rid(want.rid), parse_rid(s.rid)
    same_row = ours is not None and theirs is not None and (ours.run, ours.row) == (theirs.run, theirs.row)
    return _found(Cause.STALE if same_row else Cause.FOREIGN, s, s.rid, want.rid)


def _ids(s: States, want: Expected) -> Finding | None:
    seen = s.input_ids.tolist()
    if tuple(seen) == want.input_ids:
        return None
    n, m = len(seen), len(want.input_ids)
    at = first_difference(seen, want.input_ids)
    start = int(s.chunks[0].get("start", 0)) if s.chunks else 0
    if start > 0 and tuple(seen) == want.input_ids[start:]:
        return _found(Cause.PREFIX_CACHED, s, n, m, missing_prefix=start)
    if n == 1 and m > 1:
        return _found(Cause.DECODE_STEP, s, n, m, position=at)
    if n < m and tuple(seen) == want.input_ids[:n]:
        return _found(Cause.TRUNCATED_INPUT, s, n, m, position=at)
    return _found(
        Cause.IDS_DIFFER,
        s,
        n,
        m,
        position=at,
        got_ids=seen[max(0, at - 3) : at + 4] if at is not None else [],
        expected_ids=list(want.input_ids[max(0, at - 3) : at + 4]) if at is not None else [],
    )


def _rows(s: States, want: Expected) -> Finding | None:
    n, m = int(s.aux.shape[0]) if s.aux.dim() else 0, len(want.input_ids)
    others = [int(t.shape[0]) for t in (s.last, s.pre) if t is not None]
    if n == m == s.num_tokens and all(o == m for o in others):
        return None
    start = int(s.chunks[0].get("start", 0)) if s.chunks else 0
    got = min([n, s.num_tokens, *others])
    if start > 0:
        return _found(Cause.PREFIX_CACHED, s, got, m, missing_prefix=start)
    if n == 1 and m > 1:
        return _found(Cause.DECODE_STEP, s, got, m)
    return _found(Cause.PARTIAL_CHUNK, s, got, m, chunks=[dict(c) for c in s.chunks])


def _layers(s: States, want: Expected) -> Finding | None:
    if s.layers == want.taps:
        return None
    return _found(Cause.WRONG_LAYERS, s, list(s.layers), list(want.taps))


def _width_and_dtype(s: States, want: Expected) -> Finding | None:
    width = len(want.taps) * want.hidden_size
    if s.aux.dim() != 2 or int(s.aux.shape[1]) != width:
        return _found(Cause.WRONG_WIDTH, s, list(s.aux.shape), [len(want.input_ids), width])
    last = chosen_last(s, want.last)
    if want.last is not None and last is None:
        return _found(Cause.WRONG_LAYERS, s, "no last state", want.last)
    for t in (s.aux, last):
        if t is None:
            continue
        name = str(t.dtype).removeprefix("torch.")
        if name != want.dtype:
            return _found(Cause.WRONG_DTYPE, s, name, want.dtype)
    if last is not None and (last.dim() != 2 or int(last.shape[1]) != want.hidden_size):
        return _found(Cause.WRONG_WIDTH, s, list(last.shape), [len(want.input_ids), want.hidden_size])
    return None


def chosen_last(s: States, last: str | None) -> Tensor | None:
    """The last state that the store wants: ``pre`` or ``last`` of the dump."""
    return {"pre": s.pre, "post": s.last, None: None}[last]


def _values(s: States, want: Expected) -> Finding | None:
    import torch

    k, h = len(want.taps), want.hidden_size
    named: list[tuple[str, Tensor]] = [
        (f"tap {t}", s.aux.view(-1, k, h)[:, i]) for i, t in enumerate(want.taps)
    ]
    last = chosen_last(s, want.last)
    if last is not None:
        named.append((f"last ({want.last})", last))
    ids = s.input_ids
    for name, t in named:
        finite = torch.isfinite(t).all(-1)
        if not bool(finite.all()):
            bad = (~finite).nonzero()[:, 0]
            return _found(Cause.NON_FINITE, s, int(finite.sum()), len(ids), where=name, first_row=int(bad[0]))
        zero = (t == 0).all(-1)
        if bool(zero.any()):
            return _found(
                Cause.ZERO_ROWS, s, int((~zero).sum()), len(ids), where=name, first_row=int(zero.nonzero()[0])
            )
        if len(ids) > 1:
            same = (t[1:] == t[:-1]).all(-1) & (ids[1:] != ids[:-1])
            if bool(same.any()):
                row = int(same.nonzero()[0]) + 1
                return _found(
                    Cause.REPEATED_STATES, s, int((~same).sum()), len(ids), where=name, first_row=row
                )
    return None
