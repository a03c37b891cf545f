"""Which of the dumps that a request left are its own: pure rules, no files (docs/formats.md).

By token ids where the dumps have them, else by the number of tokens; and only when exactly one dump, or one
set of dumps, fits. Nothing is guessed: what is not proven is a finding with its cause, and the request is
sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.capture.states import Finding
from engine.wire.causes import Cause

FEW = 2
"""Without a forward mode a dump of so few tokens is a decode step, unless the prompt is as short."""

_MOST_CHUNKS = 4
"""So many unnamed dumps that add up to the prompt are taken for its chunks (in a finding, never to join)."""

_MOST_SETS = 4
"""Two sets of dumps that make up the prompt are too many; so many are named."""

_MOST_GAPS = 1000
"""A number may be anything, and a folder of that name may be anybody's."""

_PREFILL = (None, "extend", "mixed", "prefill")


@dataclass(frozen=True)
class Piece:
    """A dump as the matching sees it. ``ids``: what the forward saw, where the patch writes it."""

    number: int
    tokens: int
    mode: str | None = None
    ids: tuple[int, ...] | None = None
    rid: str | None = None

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"req_{self.number}"


@dataclass(frozen=True)
class Window:
    """What there is after an answer.

    Attributes:
        pieces: whole dumps that are new since the request was sent, by number.
        landing: dumps that have begun and are not whole.
        floor: the highest number that was seen before the request was sent; -1 when none was. A number up to
            it was given to an earlier request, however late its files come.
        leftover: what lay in the folder of the next number (floor + 1) when the request was sent.
        owed: token counts of other samples' dumps that may come now: they never came, or another dump of that
            length may have been taken for them.
    """

    pieces: tuple[Piece, ...]
    landing: tuple[int, ...] = ()
    floor: int = -1
    leftover: Piece | None = None
    owed: frozenset[int] = frozenset()

    @property
    def gaps(self) -> tuple[int, ...]:
        """Numbers below the highest new one that have no dump yet."""
        known = {p.number for p in self.pieces}
        top = max(known, default=self.floor)
        first = min(known, default=0) if self.floor < 0 else self.floor + 1
        return tuple(n for n in range(first, min(top, first + _MOST_GAPS)) if n not in known)


@dataclass(frozen=True)
class Match:
    """The dumps of a request, in the order of its tokens. ``by``: token_ids or count."""

    pieces: tuple[Piece, ...]
    by: str


def is_decode(piece: Piece, tokens: int) -> bool:
    """Whether a dump is a decode step, seen by a request of ``tokens`` tokens."""
    if piece.mode is not None:
        return piece.mode not in _PREFILL
    return piece.tokens <= FEW < tokens


def match(window: Window, rid: str, ids: tuple[int, ...], *, by_count: bool) -> Match | Finding | None:
    """The request's dumps; a Finding when they cannot be told from others; None when they are not there."""
    ours = [p for p in window.pieces if _may_be_ours(p, rid, len(ids))]
    sets = _sets([p for p in ours if p.ids is not None], ids)
    if len(sets) > 1:
        return _several(sets)
    if sets:
        return Match(sets[0], "token_ids")
    if not by_count:
        return None
    n = len(ids)
    named = [p for p in ours if p.ids is None and p.tokens == n and p.number > window.floor]
    if len(named) > 1:
        return _ambiguous(named, n)
    if named and n in window.owed:
        why = f"{named[0].name} may be the late dump of another sample with {n} tokens"
        return Finding(Cause.LATE, n, n, {"why": why, "folder": named[0].name})
    return Match((named[0],), "count") if named else None


def _may_be_ours(piece: Piece, rid: str, n: int) -> bool:
    judged = piece.mode is not None or piece.ids is None  # ids tell better than a few rows
    return piece.rid in (None, rid) and not (judged and is_decode(piece, n))


def _several(sets: list[tuple[Piece, ...]]) -> Finding:
    said = ["+".join(p.name for p in some[:6]) for some in sets]
    why = f"more than one of what came has our token ids: {', '.join(said)}"
    folders = list(dict.fromkeys(p.name for some in sets for p in some))[:12]
    count = f"{len(sets)}{' or more' if len(sets) == _MOST_SETS else ''} dumps of our token ids"
    return Finding(Cause.FOREIGN, count, "1 dump", {"why": why, "folders": folders})


def _ambiguous(named: list[Piece], n: int) -> Finding:
    names = [p.name for p in named]
    cause = Cause.DECODE_STEP if n <= FEW and all(p.mode is None for p in named) else Cause.FOREIGN
    evidence = {"why": f"{len(names)} dumps have {n} tokens: {', '.join(names[:6])}", "folders": names[:6]}
    return Finding(cause, f"{len(names)} dumps of {n} tokens", "1 dump", evidence)


def _sets(pieces: list[Piece], ids: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """The sets of dumps, in rising numbers, whose ids make up the prompt; of many, the first few.

    A dump holds the ids of one forward only. Behind a cached head, or as a later chunk, a stranger's may hold
    just our ids in another context: so not even two dumps of the whole prompt are as good as each other.
    """
    ends: dict[int, list[tuple[Piece, ...]]] = {0: [()]}  # by how many tokens are covered
    for piece in sorted(pieces, key=lambda p: p.number):
        for start in sorted(ends, reverse=True):  # backwards: no dump is put behind itself
            end = start + piece.tokens
            if piece.ids and ids[start:end] == piece.ids:
                known = ends.setdefault(end, [])
                known += [(*some, piece) for some in ends[start][: _MOST_SETS - len(known)]]
    return ends.get(len(ids), [])


def explain(window: Window, ids: tuple[int, ...], waited_s: float) -> Finding:
    """Why no dump of a request that was answered could be found."""
    n = len(ids)
    evidence: dict[str, Any] = {"waited_s": round(waited_s, 1), "new": [p.tokens for p in window.pieces][:20]}
    if window.gaps or window.landing:
        evidence["not_there_yet"] = [f"req_{k}" for k in (*window.gaps, *window.landing)][:10]
    chunks = parts(window, ids)
    if chunks:
        evidence["folders"] = [p.name for p in chunks]
        got = sum(p.tokens for p in chunks) if chunks[0].ids else max(p.tokens for p in chunks)
        return Finding(Cause.PARTIAL_CHUNK, got, n, evidence)
    if not window.pieces and not window.landing:
        evidence["why"] = "no dump at all came"
    else:
        evidence["why"] = f"no dump of {n} tokens came in time"
    return Finding(Cause.LATE, None, n, evidence)


def parts(window: Window, ids: tuple[int, ...]) -> tuple[Piece, ...]:
    """Dumps that are parts of the prompt, by their ids, or by adding up to it."""
    n = len(ids)
    prefill = [p for p in window.pieces if p.number > window.floor and not is_decode(p, n) and p.tokens < n]
    named = tuple(p for p in prefill if p.ids is not None and p.ids == ids[: p.tokens])
    if named:
        return named
    # A chunk is the last prompt of its forward, and the next chunk the first one of the next forward.
    unnamed = [p for p in window.pieces if p.ids is None and p.mode in _PREFILL]
    for count in range(2, _MOST_CHUNKS + 1):
        for first in range(len(unnamed) - count + 1):
            some = tuple(unnamed[first : first + count])
            if sum(p.tokens for p in some) == n and all(p in prefill for p in some):
                return some
    return ()


def naive(window: Window, ids: tuple[int, ...], chosen: Match | None) -> list[Finding]:
    """What matching by order would have credited to this request, wrongly, each with its cause.

    Two such ways were used in the field: the folder of the next number, whatever lies in it, and the first
    new folder.
    """
    n, out = len(ids), []
    taken = {p.number for p in chosen.pieces} if chosen else set[int]()
    if window.leftover is not None:
        out.append(_passed(Cause.STALE, window.leftover, n, "the folder of the next number, a leftover"))
    first = next((p for p in window.pieces if p.number not in taken), None)
    if first is not None and window.pieces[0] is first:
        out.append(_passed(_cause_of(first, window, ids), first, n, "the first new folder"))
    return out


def _cause_of(piece: Piece, window: Window, ids: tuple[int, ...]) -> Cause:
    n = len(ids)
    if piece.number <= window.floor:
        return Cause.LATE
    if is_decode(piece, n):
        return Cause.DECODE_STEP
    if piece in parts(window, ids):
        return Cause.PARTIAL_CHUNK
    return Cause.FOREIGN


def _passed(cause: Cause, piece: Piece, n: int, why: str) -> Finding:
    evidence: dict[str, Any] = {"folder": piece.name, "why": f"{piece.name}: {why}"}
    if piece.mode is not None:
        evidence["forward_mode"] = piece.mode
    return Finding(cause, piece.tokens, n, evidence)
