"""``python -m engine verify STORE``: the store read again, and with --recompute against a lone forward of
the target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from engine.dataset.samples import Samples
from engine.dataset.tokens import Tokens
from engine.run.report import say
from engine.store.identity import read_manifest
from engine.store.normfile import read_norm
from engine.store.verify import Report, verify_store
from engine.targets.lone import LoneForward
from engine.targets.lowest import FinalNorm
from engine.wire.errors import DatasetError, UsageError
from engine.wire.events import json_safe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.9999}


def verify(
    store: Path, recompute: int | None = None, dataset: Path | None = None
) -> tuple[Report, dict[str, Any] | None]:
    """(report, verified or None).

    Args:
        recompute: compare this many done samples (0 = all, else spread over the store) with a lone forward
        over their
            stored ids. ``verified``: {"samples", "min_cosine", "per_tap"}; a sample below 0.9999 is added
            to the bad (once, by its worst tensor). A cosine that is no number is "nan".
        dataset: tokenise its rows again with the store's model and compare the token ids.

    Raises UsageError (no store), DatasetError (not the dataset, or not the tokenizer, of the store).
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
    for item in verify_store(store, expected_ids(manifest, dataset) if dataset else None):
        if isinstance(item, Report):
            item.bad += wrong
            item.done -= len(wrong)
            if recompute is None:
                return item, None
            least_all = lowest(least)[1] if least else None
            return item, json_safe({"samples": count, "min_cosine": least_all, "per_tap": least})
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
            least[name] = lowest({"before": least.get(name, 1.0), "now": value})[1]
        worst, value = lowest(cosines)
        if not value >= LEAST_COSINE[manifest["dtype"]]:  # a NaN is not
            wrong.append((line.row, f"{worst} differs from a lone forward: cosine {value:.6f}"))
        say(f"row {line.row}: {line.n_tokens} tokens, least cosine {value:.7f}")
    raise AssertionError("verify_store ends with a Report")


def lowest(values: dict[str, float]) -> tuple[str, float]:
    """The name and value of the least one; a NaN is less than any number."""
    return min(values.items(), key=lambda item: -math.inf if math.isnan(item[1]) else item[1])


def expected_ids(manifest: dict[str, Any], dataset: Path) -> Callable[[int], tuple[int, ...]]:
    """The token ids of a dataset row under the store's model. DatasetError when it is another dataset or
    the model tokenises otherwise now."""
    template = manifest["chat_template"]
    tokens = Tokens(str(manifest["target"]["model"]), bool(template["thinking"]))
    samples = Samples(str(dataset), tokens)
    if samples.file.sha256 != manifest["dataset"]["sha256"]:
        raise DatasetError(
            f"{dataset} is not the dataset of this store",
            f"its sha256 is {samples.file.sha256}, the store was made from {manifest['dataset']['sha256']}",
            "give the file that the run read",
        )
    found, made = (
        (tokens.sha256, tokens.template_sha256),
        (manifest["tokenizer"]["sha256"], template["sha256"]),
    )
    if found != made:
        raise DatasetError(
            f"the model {manifest['target']['model']} tokenises otherwise than when the store was made",
            f"tokenizer and chat template are {found}, they were {made}",
            "restore the model's folder",
        )
    return lambda row: samples.sample(row).input_ids


def compare_with_lone(
    lone: LoneForward, manifest: dict[str, Any], tensors: dict[str, Tensor], store: Path
) -> dict[str, float]:
    """The least cosine over rows, per tap and for last; computed in float64."""
    import torch

    states = lone.states(tensors["input_ids"].tolist())
    out = {}
    layers = int(manifest["target"]["num_layers"])
    normed_tap = layers - 1 in manifest["taps"]
    norm = FinalNorm(*read_norm(store)) if normed_tap or manifest["last"] == "pre" else None

    def least(a: Tensor, b: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min())

    for i, tap in enumerate(manifest["taps"]):
        got = tensors["taps"][:, i]
        # after the last layer transformers gives the normed state only
        out[f"tap {tap}"] = least(norm(got) if norm and tap == layers - 1 else got, states[tap + 1])
    if manifest["last"] is not None:
        last = tensors["last"]
        out[f"last ({manifest['last']})"] = least(
            norm(last) if norm and manifest["last"] == "pre" else last, states[-1]
        )
    return out
