"""norm.safetensors: the final norm, kept once beside the states, so that post-norm can be computed from
pre-norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.store.files import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def write_norm(store: Path, weight: Tensor, eps: float, flavour: str) -> None:
    """``weight`` float [H] with metadata {eps, flavour: plain | one_plus}; written once."""
    from safetensors.torch import save

    path = store / "norm.safetensors"
    if not path.exists():
        write_atomic(
            path, save({"weight": weight.contiguous()}, metadata={"eps": repr(eps), "flavour": flavour})
        )


def read_norm(store: Path) -> tuple[Tensor, float, str]:
    """(weight, eps, flavour)."""
    from safetensors import safe_open

    with safe_open(store / "norm.safetensors", framework="pt") as f:
        metadata = f.metadata()
        return f.get_tensor("weight"), float(metadata["eps"]), metadata["flavour"]
