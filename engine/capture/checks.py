"""The checks that need no model: identity, shape, type and finiteness of a dump (design.md 4).

Each failure has one cause; what decides each is told in engine/wire/cause_table.py. The order matters: a dump
of another request is named so before its length is judged, and what is no dump of this shape at all before
its rows are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.capture.states import Finding, States
from engine.wire.causes import Cause
from engine.wire.ids import parse_rid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    for check in (_identity, _form, _ids, _layers, _width, _rows, _dtype, _values):
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


def rid_cause(got: str, want: str) -> Cause | None:
    """Whose dump it is by its request id: None ours, STALE another attempt at the same row, else FOREIGN."""
    if got == want:
        return None
    ours, theirs = parse_rid(want), parse_rid(got)
    same_row = ours is not None and theirs is not None and (ours.run, ours.row) == (theirs.run, theirs.row)
    return Cause.STALE if same_row else Cause.FOREIGN


def _identity(s: States, want: Expected) -> Finding | None:
    cause = rid_cause(s.rid, want.rid)
    return None if cause is None else _found(cause, s, s.rid[:200], want.rid)


def _form(s: States, want: Expected) -> Finding | None:
    """Ranks first: what is counted below would mean nothing in a tensor of another rank."""
    ids = s.input_ids
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        got = f"input_ids {_dtype_name(ids)} {list(ids.shape)}"
        return _found(Cause.UNREADABLE, s, got, "input_ids int64 [S]")
    for name, t in (("aux", s.aux), ("last", s.last), ("pre", s.pre)):
        if t is not None and t.dim() != 2:
            return _found(Cause.WRONG_WIDTH, s, list(t.shape), "[S, width]", where=name)
    return None


def ids_cause(
    seen: Sequence[int], want: Sequence[int], prompt: int, start: int
) -> tuple[Cause, dict[str, Any]] | None:
    """Why the ids that a forward saw are not the sample's, with the figures; None when they are.

    Args:
        prompt: how many tokens the writer says that the prompt had.
        start: the position of the first row, as the writer says it.
    """
    seen, want = tuple(seen), tuple(want)
    if seen == want:
        return None
    n, m = len(seen), len(want)
    at = first_difference(seen, want)
    if n < m and start > 0 and seen == want[start : start + n]:
        whole = start + n == m
        return (Cause.PREFIX_CACHED, {"missing_prefix": start}) if whole else _part(start, n)
    if n == 1 and m > 1:
        return Cause.DECODE_STEP, {"position": at}
    if 0 < n < m and seen == want[m - n :]:
        return Cause.PREFIX_CACHED, {"missing_prefix": m - n}
    if n < m and seen == want[:n]:
        return _part(0, n) if prompt > n else (Cause.TRUNCATED_INPUT, {"position": at})
    assert at is not None  # they are not equal
    return Cause.IDS_DIFFER, {
        "position": at,
        "got_ids": list(seen[max(0, at - 3) : at + 4]),
        "expected_ids": list(want[max(0, at - 3) : at + 4]),
    }


def _part(start: int, n: int) -> tuple[Cause, dict[str, Any]]:
    return Cause.PARTIAL_CHUNK, {"chunks": [{"start": start, "n": n}]}


def _ids(s: States, want: Expected) -> Finding | None:
    named = ids_cause(s.input_ids.tolist(), want.input_ids, s.num_tokens, first_start(s.chunks))
    if named is None:
        return None
    cause, evidence = named
    return _found(cause, s, int(s.input_ids.numel()), len(want.input_ids), **evidence)


def first_start(chunks: Sequence[Mapping[str, Any]]) -> int:
    """The position of the first row that was computed (0 when the writer tells no chunks)."""
    return int(chunks[0].get("start", 0)) if chunks else 0


def covered(chunks: Sequence[Mapping[str, Any]]) -> int:
    """Up to which position the chunks join without a gap or an overlap, from 0."""
    end = 0
    for chunk in chunks:
        if int(chunk.get("start", 0)) != end or int(chunk.get("n", 0)) <= 0:
            break
        end += int(chunk["n"])
    return end


def _rows(s: States, want: Expected) -> Finding | None:
    m = len(want.input_ids)
    counts = [int(t.shape[0]) for t in (s.aux, s.last, s.pre) if t is not None]
    listed = sum(int(c.get("n", 0)) for c in s.chunks) if s.chunks else m
    if all(c == m for c in (*counts, s.num_tokens, listed)) and (not s.chunks or covered(s.chunks) == m):
        return None
    got, start = min(*counts, s.num_tokens, listed), first_start(s.chunks)
    chunks = [dict(c) for c in s.chunks[:32]]
    if start > 0:
        return _found(Cause.PREFIX_CACHED, s, got, m, missing_prefix=start)
    if max(counts) > m:
        why = "more rows than tokens: the cut went on into another request"
        return _found(Cause.NEIGHBOUR, s, max(counts), m, why=why, chunks=chunks)
    if counts[0] == 1 and m > 1:
        return _found(Cause.DECODE_STEP, s, got, m)
    return _found(Cause.PARTIAL_CHUNK, s, got, m, chunks=chunks, joined=covered(s.chunks))


def _layers(s: States, want: Expected) -> Finding | None:
    if s.layers == want.taps:
        return None
    return _found(Cause.WRONG_LAYERS, s, list(s.layers), list(want.taps))


def _width(s: States, want: Expected) -> Finding | None:
    width = len(want.taps) * want.hidden_size
    if int(s.aux.shape[1]) != width:
        return _found(Cause.WRONG_WIDTH, s, list(s.aux.shape), [len(want.input_ids), width])
    last = chosen_last(s, want.last)
    if want.last is not None and last is None:
        return _found(Cause.WRONG_LAYERS, s, "no last state", want.last)
    if last is not None and int(last.shape[1]) != want.hidden_size:
        return _found(Cause.WRONG_WIDTH, s, list(last.shape), [len(want.input_ids), want.hidden_size])
    return None


def _dtype(s: States, want: Expected) -> Finding | None:
    for t in (s.aux, chosen_last(s, want.last)):
        if t is not None and _dtype_name(t) != want.dtype:
            return _found(Cause.WRONG_DTYPE, s, _dtype_name(t), want.dtype)
    return None


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


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
