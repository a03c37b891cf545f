"""The lm_head rows of a sample's own tokens: what win-rate evidence needs, without the rest of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from engine.wire.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_TIED = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
)


class HeadRows:
    """Rows of lm_head [V, H] from a model folder's safetensors (the embedding when the two are tied)."""

    def __init__(self, model: str) -> None:
        from safetensors import safe_open

        self._file, self._name = _find(Path(model))
        with safe_open(self._file, framework="pt") as f:
            self._weight: Tensor = f.get_tensor(self._name)

    def rows(self, input_ids: Sequence[int]) -> Tensor:
        """float32 [S, H]."""
        import torch

        return self._weight[torch.tensor(list(input_ids))].float()


def _find(folder: Path) -> tuple[Path, str]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        where = {name: folder / file for name, file in weights.items()}
    else:
        single = folder / "model.safetensors"
        if not single.is_file():
            raise PreflightError(
                f"{folder} has no safetensors weights", "", "give target.model as a local folder"
            )
        with safe_open(single, framework="pt") as f:
            where = dict.fromkeys(f.keys(), single)
    for name in (*_NAMES, *_TIED):
        if name in where:
            return where[name], name
    raise PreflightError(
        f"no lm_head in {folder}", f"looked for {', '.join(_NAMES)}", "use evidence = recompute"
    )
