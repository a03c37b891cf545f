"""Content evidence: do these states belong to these token ids? (design.md 4; distributions in
docs/evidence.md)

A state can be cut at the wrong place inside the forward pass while request id, ids and length are all right
(sglang#4997). So every sample is judged by its numbers, in one of two ways:

recompute  the lowest tap is computed again from the ids alone and compared row by row;
win_rate   where the host cannot hold those layers: the share of pairs in which row i's logit for token i+1
beats the
           logits of the sample's own tokens one or two places beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.wire.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2, "float16": 5e-3}
"""Largest relative error of a right row of the lowest tap, by the dtype of the dump. Right rows of tap 1 of
SmolLM2: <= 1e-6 in float32, <= 1.7e-2 where the server computes in bfloat16. Wrong rows: >= 3.4e-3, all but
0.5 % above 3e-2; the worst row of a wrong sample: >= 0.6, unless its last row alone is wrong
(docs/evidence.md)."""

DOUBT = {"float32": 2e-3, "bfloat16": 0.1, "float16": 2e-2}
"""Up to this worst row error a sample beyond the tolerance is taken again alone instead of refused at
once: deeper
lowest taps of a server that computes in half precision reach 0.065 on right rows (docs/evidence.md). In
float32 there
is no doubt."""

WIN_ACCEPT, WIN_SHIFTED = 0.80, 0.85
"""Right samples: 0.79 / 0.93 / 0.97 (min, median, max), but 0.32 to 0.41 on raw ids; shifted 0.30 to 0.56,
swapped
0.49 to 0.77, second half foreign 0.65 to 0.87. Judged one place beside, shifted states reach 0.79 to 0.97
and right
chats at most 0.57 (docs/evidence.md). A low rate alone decides nothing: the sample is taken again alone."""

WIN_LEAST_PAIRS = 32


def row_errors(states: Tensor, truth: Tensor) -> Tensor:
    """||states - truth|| / ||truth|| for each row; float32 [S]. Both [S, H]."""
    a, b = states.float(), truth.float()
    errors: Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)
    return errors


@dataclass(frozen=True)
class Wrong:
    """Which rows do not fit, and whose they are as far as that can be told."""

    cause: Cause
    rows: int
    first_row: int
    last_row: int
    worst: float
    whose: str

    def to_json(self) -> dict[str, Any]:
        """The evidence of a mismatch."""
        return {
            "kind": "recompute",
            "value": round(self.worst, 6),
            "wrong_rows": self.rows,
            "first_row": self.first_row,
            "last_row": self.last_row,
            "whose": self.whose,
        }


@dataclass(frozen=True)
class Other:
    """The lowest tap of another request of ours: [S, H] by recomputation; ``flying`` = in flight at the
    same time."""

    name: str
    truth: Tensor
    flying: bool


def judge(
    states: Tensor, truth: Tensor, dtype: str, others: Sequence[Other] = ()
) -> tuple[float, Wrong | None]:
    """(largest row error, what is wrong or None) of the lowest tap [S, H] against its recomputation."""
    errors = row_errors(states, truth)
    worst = float(errors.max())
    tolerance = TOLERANCE[dtype]
    wrong = ~(errors <= tolerance)  # a NaN is wrong
    if not bool(wrong.any()):
        return worst, None
    return worst, _name(states.float(), truth, wrong, worst, tolerance, others)


def _name(
    s: Tensor, truth: Tensor, wrong: Tensor, worst: float, tolerance: float, others: Sequence[Other]
) -> Wrong:
    at = wrong.nonzero()[:, 0]
    first, last, count, n = int(at[0]), int(at[-1]), int(at.numel()), len(s)

    def out(cause: Cause, whose: str) -> Wrong:
        return Wrong(cause, count, first, last, worst, whose)

    for step, text in ((1, "its own rows, one late"), (-1, "its own rows, one early")):
        inner = at[(at - step >= 0) & (at - step < n)]
        if count > 1 and len(inner) >= 1:
            hits = row_errors(s[inner], truth[inner - step]) <= tolerance
            if float(hits.float().mean()) > 0.5 and int(hits.sum()) >= max(1, count // 2):
                return out(Cause.SHIFTED, text)
    places, share = _places(s[at], truth, tolerance)
    if share > 0.5:
        step = int((at - places).mode().values)
        if count > 1 and float((at - places == step).float().mean()) > 0.5:
            return out(Cause.SHIFTED, f"its own rows, {abs(step)} {'late' if step > 0 else 'early'}")
        return out(Cause.EVIDENCE_LOW, "its own rows, in another order")
    best = _best(s[at], others, tolerance)
    if best is not None:
        other, places = best
        if not other.flying:
            return out(Cause.STALE, f"{other.name}, answered before")
        exchanged = float((places == at).float().mean()) > 0.5 and _is_whole(s, other.truth, tolerance)
        return out(
            Cause.SWAPPED if exchanged else Cause.NEIGHBOUR, f"{other.name}, in flight at the same time"
        )
    factor = _factor(s[at], truth[at], tolerance)
    if factor is not None:
        return out(Cause.EVIDENCE_LOW, f"its own rows, times {factor:.4g}")
    if last == n - 1 and count < n and count == last - first + 1:
        return out(Cause.NEIGHBOUR, "a request that is not ours")
    return out(Cause.EVIDENCE_LOW, "unknown")


def _is_whole(s: Tensor, truth: Tensor, tolerance: float) -> bool:
    """Whether all of ``s`` is the other's [S, H], and not only the wrong rows (the other may be shorter)."""
    n = min(len(s), len(truth))
    return bool((row_errors(s[:n], truth[:n]) <= tolerance).all())


def _factor(rows: Tensor, truth: Tensor, tolerance: float) -> float | None:
    """The number (the median over the rows) by which ``truth`` [W, H] was multiplied, if that is all that is
    wrong with most of ``rows``."""
    t = truth.float()
    factors = (rows * t).sum(-1) / t.pow(2).sum(-1).clamp(min=1e-12)
    off = (rows - factors[:, None] * t).norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-12)
    return float(factors.median()) if float((off <= tolerance).float().mean()) > 0.5 else None


def _best(rows: Tensor, others: Sequence[Other], tolerance: float) -> tuple[Other, Tensor] | None:
    """The other that has most of ``rows`` [W, H], and where in it they stand (int64 [W]).

    Not the first that has more than half of them: samples that begin alike share many rows.
    """
    best, most = None, 0.5
    for other in others:
        places, share = _places(rows, other.truth, tolerance)
        if share > most:
            best, most = (other, places), share
        if share == 1:
            break
    return best


def _places(rows: Tensor, truth: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """Where in ``truth`` [S, H] each of ``rows`` [W, H] would stand (int64 [W]), and the share that does."""
    import torch

    t = truth.float()
    normalize = torch.nn.functional.normalize
    nearest = (normalize(rows, dim=-1) @ normalize(t, dim=-1).T).argmax(-1)
    hits = row_errors(rows, t[nearest]) <= tolerance
    return nearest, float(hits.float().mean())


def win_rate(post: Tensor, head_rows: Tensor, input_ids: Sequence[int], offset: int = 0) -> tuple[float, int]:
    """(share of pairs won, pairs): row i's logit for token i+1+offset against those of the tokens beside it.

    Args:
        post: [S, H] states after the final norm.
        head_rows: [S, H], the lm_head row of each of the sample's own tokens.
        input_ids: [S].
        offset: 0 for right states; -1 fits states that are one row late, +1 those that are one early.
    """
    import torch

    ids = torch.tensor(list(input_ids))
    n = len(ids)
    x, w = post.float(), head_rows.float()

    def logit(i: Tensor, place: Tensor) -> Tensor:
        return (x[i] * w[place]).sum(-1)  # only the band beside the diagonal, never [S, S]

    wins = pairs = 0
    ahead = 1 + offset
    for d in (-2, -1, 1, 2):
        first = max(0, -ahead, -ahead - d)
        end = min(n, n - ahead, n - ahead - d)
        if end <= first:
            continue
        i = torch.arange(first, end)
        decided = ids[i + ahead] != ids[i + ahead + d]
        wins += int(((logit(i, i + ahead) > logit(i, i + ahead + d)) & decided).sum())
        pairs += int(decided.sum())
    return (wins / pairs if pairs else 0.0), pairs


def judge_win_rate(rate: float, pairs: int, beside: float) -> bool | None:
    """True: they belong; False: they are shifted; None: undecidable, take the sample again alone.

    Args:
        beside: the larger of the rates one place late and one early.
    """
    if pairs < WIN_LEAST_PAIRS:
        return None
    if rate >= WIN_ACCEPT:
        return True
    return False if beside >= WIN_SHIFTED else None
