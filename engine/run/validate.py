"""From a source's answer to a checked sample: all that must hold before states are credited to a sample.

Runs in one worker thread: numbers only, no files.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.capture.checks import Expected, check_states, chosen_last
from engine.capture.evidence import DOUBT, WIN_ACCEPT, Other, judge, judge_win_rate, row_errors, win_rate
from engine.capture.states import Finding, States
from engine.store.records import Record, raw_bytes
from engine.targets.lowest import final_norm
from engine.wire.causes import Cause
from engine.wire.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.dataset.tokens import Sample
    from engine.targets.head import HeadRows
    from engine.targets.lowest import FinalNorm, LowestLayers
    from engine.wire.spec import TargetSpec

_KEEP_BYTES = 128 << 20
"""How much of recomputed lowest taps is kept, to tell whose wrong rows are."""


@dataclass(frozen=True)
class Judged:
    """A record that may be stored, or a finding. ``retake``: first take it again alone and compare (why)."""

    record: Record | None = None
    finding: Finding | None = None
    retake: str = ""


@dataclass(frozen=True)
class _Take:
    """Whose states are known by their digest: the row, the digest of its ids, whether evidence proved it."""

    row: int
    ids: bytes
    proven: bool


class Validator:
    """Judges the states of one run's samples.

    Args:
        target: what is stored.
        hidden_size: H.
        dtype: the source's own dtype (a torch dtype name).
        lowest: the lowest layers, for recompute evidence; or
        head: the lm_head and final norm, for win-rate evidence.
    """

    def __init__(
        self,
        target: TargetSpec,
        hidden_size: int,
        dtype: str,
        *,
        lowest: LowestLayers | None,
        norm: FinalNorm | None = None,
        head: HeadRows | None = None,
    ) -> None:
        self.target, self.hidden_size, self.dtype = target, hidden_size, dtype
        self._lowest, self._head = lowest, head
        self._norm = norm if norm is not None or lowest is None else _norm_of(lowest)
        self._truths: OrderedDict[int, Tensor] = OrderedDict()
        self._truth_bytes = 0
        self._seen: dict[bytes, _Take] = {}
        self._claims: dict[int, tuple[int, set[bytes]]] = {}
        self._range: dict[int, tuple[float, float]] = {}
        self._accepted = 0

    def judge(
        self, sample: Sample, rid: str, attempt: int, states: States, flying: Sequence[Sample]
    ) -> Judged:
        """All checks in order; the first that fails is the finding."""
        want = Expected(
            rid, sample.input_ids, self.target.taps, self.hidden_size, self.dtype, self.target.last
        )
        finding = check_states(states, want)
        if finding is not None:
            return Judged(finding=finding)
        k, h = len(self.target.taps), self.hidden_size
        taps = states.aux.view(-1, k, h)
        if self._lowest is not None:
            evidence, finding, retake = self._recompute(sample, states, taps, flying)
        else:
            evidence, finding, retake = self._win_rate(sample, states)
        finding = finding or self._last_is_its_norms(states)
        if finding is not None:
            return Judged(finding=finding)
        record = self._record(sample, rid, attempt, states, taps, evidence)
        finding = self._duplicate(sample, record, states, proven=not retake)
        if finding is not None:
            return Judged(finding=finding)
        return Judged(record=record, retake=retake or self._outlier(record))

    def _recompute(
        self, sample: Sample, states: States, taps: Tensor, flying: Sequence[Sample]
    ) -> tuple[dict[str, Any], Finding | None, str]:
        truth = self._truth(sample)
        value, wrong = judge(taps[:, 0], truth, self.dtype)
        evidence = {"kind": "recompute", "value": round(value, 8)}
        if wrong is None:
            return evidence, None, ""
        if value <= DOUBT[self.dtype]:
            return evidence, None, f"the lowest tap differs by {value:.3g}, more than rounding should"
        finding = self._other_layer(sample, states, taps, truth)
        if finding is not None:
            return {}, finding, ""
        near = {s.row for s in flying}
        others = [Other(f"row {s.row}", self._truth(s), True) for s in flying if s.row != sample.row]
        others += [
            Other(f"row {row}", t, False)
            for row, t in self._truths.items()
            if row != sample.row and row not in near
        ]
        _, wrong = judge(taps[:, 0], truth, self.dtype, others)
        assert wrong is not None  # the same numbers were judged a moment ago
        n = len(sample.input_ids)
        return {}, Finding(wrong.cause, n - wrong.rows, n, wrong.to_json(), states), ""

    def _other_layer(self, sample: Sample, states: States, taps: Tensor, truth: Tensor) -> Finding | None:
        """Whether the lowest tap's place holds the output of a layer below, or its rows stand in another
        tap's place."""
        assert self._lowest is not None
        lowest = self.target.taps[0]
        got: int | str | None = None
        for i, tap in enumerate(self.target.taps[1:], 1):
            if judge(taps[:, i], truth, self.dtype)[1] is None:
                got = f"layer {lowest} in the place of layer {tap}"
        for layer, below in enumerate(self._lowest.below(sample.input_ids), -1):
            if judge(taps[:, 0], below, self.dtype)[1] is None:
                got = f"layer {layer}" if layer >= 0 else "the embeddings"
        if got is None:
            return None
        return Finding(Cause.WRONG_LAYERS, got, f"layer {lowest}", {"kind": "recompute"}, states)

    def _last_is_its_norms(self, states: States) -> Finding | None:
        """Where a dump has the last state before and after the final norm, norm(pre) must be last, row by
        row: else one of the two was cut elsewhere."""
        if self._norm is None or self.target.last is None or states.pre is None or states.last is None:
            return None
        errors = row_errors(self._norm(states.pre), states.last)
        wrong = ~(errors <= DOUBT[self.dtype])
        if not bool(wrong.any()):
            return None
        n, at = len(errors), wrong.nonzero()[:, 0]
        evidence = {"kind": "norm", "value": round(float(errors.max()), 6), "wrong_rows": len(at)}
        evidence |= {"first_row": int(at[0]), "last_row": int(at[-1]), "whose": "unknown"}
        return Finding(Cause.EVIDENCE_LOW, n - len(at), n, evidence, states)

    def _win_rate(self, sample: Sample, states: States) -> tuple[dict[str, Any], Finding | None, str]:
        assert self._head is not None
        post = states.last
        if post is None and states.pre is not None and self._norm is not None:
            post = self._norm(states.pre)
        if post is None:
            return {"kind": "win_rate", "value": 0.0}, None, "the source gives no last state"
        head, ids = self._head.rows(sample.input_ids), sample.input_ids
        rate, pairs = win_rate(post, head, ids)
        beside = max(win_rate(post, head, ids, offset)[0] for offset in (-1, 1))
        evidence = {"kind": "win_rate", "value": round(rate, 6), "pairs": pairs, "beside": round(beside, 6)}
        verdict = judge_win_rate(rate, pairs, beside)
        if verdict is False:
            finding = Finding(Cause.SHIFTED, round(rate, 4), WIN_ACCEPT, evidence, states)
            return {}, finding, ""
        return evidence, None, "" if verdict else "the win rate does not decide"

    def _truth(self, sample: Sample) -> Tensor:
        """The recomputed lowest tap of a sample, float32 [S, H]."""
        assert self._lowest is not None
        truth = self._truths.pop(sample.row, None)
        if truth is None:
            truth = self._lowest.states(sample.input_ids)
            self._truth_bytes += truth.numel() * 4
        self._truths[sample.row] = truth
        while self._truth_bytes > _KEEP_BYTES and len(self._truths) > 1:
            _, old = self._truths.popitem(last=False)
            self._truth_bytes -= old.numel() * 4
        return truth

    def _record(
        self, sample: Sample, rid: str, attempt: int, states: States, taps: Tensor, evidence: dict[str, Any]
    ) -> Record:
        import torch

        dtype = getattr(torch, self.target.dtype)
        tensors = {
            "input_ids": states.input_ids.to(torch.int64).contiguous(),
            "loss_mask": torch.tensor(sample.loss_mask, dtype=torch.uint8),
            "taps": taps.to(dtype).contiguous(),
        }
        last = chosen_last(states, self.target.last)
        if last is not None:
            tensors["last"] = last.to(dtype).contiguous()
        stats = {str(tap): _stats(taps[:, i]) for i, tap in enumerate(self.target.taps)}
        return Record(sample.row, rid, attempt, tensors, stats, evidence)

    def _duplicate(self, sample: Sample, record: Record, states: States, proven: bool) -> Finding | None:
        """States equal to those of a sample with other ids. (Equal ids give equal states, rightly.)

        Which of the two is wrong is told only by evidence: one that is proven is kept, whoever came first.
        A row that is asked for once more was refused, so what its earlier attempts claimed is forgotten.
        """
        key = hashlib.blake2b(raw_bytes(record.tensors["taps"]), digest_size=16).digest()
        ids = hashlib.blake2b(raw_bytes(record.tensors["input_ids"]), digest_size=16).digest()
        attempt, claims = self._claims.setdefault(sample.row, (record.attempts, set()))
        if record.attempts > attempt:
            for claim in claims:
                if claim in self._seen and self._seen[claim].row == sample.row:
                    del self._seen[claim]
            self._claims[sample.row] = record.attempts, (claims := set())
        other = self._seen.get(key)
        wins = proven and other is not None and not other.proven
        if other is None or wins:
            self._seen[key] = _Take(sample.row, ids, proven)
            claims.add(key)
        if other is None or other.ids == ids or wins:
            return None
        n = len(sample.input_ids)
        evidence = {"same_as_row": other.row}
        return Finding(Cause.DUPLICATE, f"the states of row {other.row}", n, evidence, states)

    def _outlier(self, record: Record) -> str:
        """Why the per-tap statistics leave the run's own range by far ("" when they do not)."""
        why = ""
        for tap, s in record.stats.items():
            low, high = self._range.get(int(tap), (s["std"], s["std"]))
            if self._accepted >= 32 and not low / 8 <= s["std"] <= high * 8:
                why = f"std {s['std']:.4g} of tap {tap} is far outside of this run's {low:.4g} to {high:.4g}"
            self._range[int(tap)] = (min(low, s["std"]), max(high, s["std"]))
        self._accepted += 1
        return why


def _norm_of(lowest: LowestLayers) -> FinalNorm | None:
    """The final norm; None when it is of no known kind (then nothing can be compared with it)."""
    try:
        return final_norm(lowest)
    except PreflightError:
        return None


def compare_retake(a: Record, b: Record) -> float:
    """The least cosine over rows and taps (and last) of two takes of one sample; both as stored.

    A cosine is blind to size: where a row is more than a tenth longer than its like, it is their ratio.
    """
    import torch

    least = 1.0
    for name in ("taps", "last"):
        if name in a.tensors:
            x, y = a.tensors[name].double(), b.tensors[name].double()
            least = min(least, float(torch.nn.functional.cosine_similarity(x, y, dim=-1).min()))
            lengths = torch.stack([x.norm(dim=-1), y.norm(dim=-1)])
            ratio = float((lengths.amin(0) / lengths.amax(0).clamp(min=1e-30)).min())
            least = min(least, ratio) if ratio < _SAME_LENGTH else least
    return least


_SAME_LENGTH = 0.9
"""Right rows of a half precision differ by up to 0.065, along the row itself (docs/evidence.md)."""

RETAKE_COSINE = {"float32": 0.9999, "bfloat16": 0.99, "float16": 0.99}
"""Least cosine between two takes, by the source's dtype: other batch shapes round differently."""


def with_retake(record: Record, cosine: float) -> Record:
    """The record with the retake in its evidence, as its kind when nothing else decided."""
    evidence = dict(record.evidence)
    if evidence.get("kind") == "win_rate":
        evidence = {"kind": "retake", "value": round(cosine, 8), "win_rate": evidence["value"]}
    else:
        evidence["retake"] = round(cosine, 8)
    return replace(record, evidence=evidence)


def _stats(t: Tensor) -> dict[str, float]:
    import torch

    std, mean = torch.std_mean(t.float(), correction=0)
    return {"mean": float(mean), "std": float(std), "absmax": float(t.float().abs().max())}
