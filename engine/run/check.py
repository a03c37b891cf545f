"""``python -m engine verify STORE``: the store read again, and with --recompute against a lone forward of
the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.run.report import say
from engine.store.identity import read_manifest
from engine.store.normfile import read_norm
from engine.store.verify import Report, verify_store
from engine.targets.lone import LoneForward
from engine.targets.lowest import FinalNorm
from engine.wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.9999}


def verify(store: Path, recompute: int | None = None) -> tuple[Report, dict[str, Any] | None]:
    """(report, verified or None).

    Args:
        recompute: compare this many done samples (0 = all, else spread over the store) with a lone forward
        over their
            stored ids. ``verified``: {"samples", "min_cosine", "per_tap"}; a sample below 0.9999 is added
            to the bad.
    """
    manifest = read_manifest(store)
    if manifest is None:
        raise UsageError(
            f"{store} is not a store", "it has no manifest.json", "give the folder that a run wrote to"
        )
    lone: LoneForward | None = None
    least: dict[str, float] = {}
    wrong: list[tuple[int, str]] = []
    count = seen = 0
    every = 1
    for item in verify_store(store):
        if isinstance(item, Report):
            item.bad += wrong
            item.done -= len(wrong)
            if recompute is None:
                return item, None
            least_all = min(least.values(), default=None)
            return item, {"samples": count, "min_cosine": least_all, "per_tap": least}
        if recompute is None:
            continue
        line, tensors = item
        if lone is None:
            lone = LoneForward(str(manifest["target"]["model"]))
            every = 1 if recompute == 0 else max(1, int(manifest["dataset"]["rows"]) // recompute)
        seen += 1
        if (seen - 1) % every:
            continue
        cosines = compare_with_lone(lone, manifest, tensors, store)
        count += 1
        for name, value in cosines.items():
            least[name] = min(least.get(name, 1.0), value)
            if value < LEAST_COSINE[manifest["dtype"]]:
                wrong.append((line.row, f"{name} differs from a lone forward: cosine {value:.6f}"))
        say(f"row {line.row}: {line.n_tokens} tokens, least cosine {min(cosines.values()):.7f}")
    raise AssertionError("verify_store ends with a Report")


def compare_with_lone(
    lone: LoneForward, manifest: dict[str, Any], tensors: dict[str, Tensor], store: Path
) -> dict[str, float]:
    """The least cosine over rows, per tap and for last; computed in float64."""
    import torch

    states = lone.states(tensors["input_ids"].tolist())
    out = {}
    layers = int(manifest["target"]["num_layers"])
    norm = FinalNorm(*read_norm(store))

    def least(a: Tensor, b: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min())

    for i, tap in enumerate(manifest["taps"]):
        got = tensors["taps"][:, i]
        # after the last layer transformers gives the normed state only
        out[f"tap {tap}"] = least(norm(got) if tap == layers - 1 else got, states[tap + 1])
    if manifest["last"] is not None:
        last = tensors["last"]
        out[f"last ({manifest['last']})"] = least(
            norm(last) if manifest["last"] == "pre" else last, states[-1]
        )
    return out
