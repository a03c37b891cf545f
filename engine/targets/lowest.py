"""The lowest layers of the target: what the recompute evidence needs (design.md 4).

The embedding and the layers up to the lowest tap are loaded alone, so the host pays a few per cent of the
model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.wire.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class TargetFacts:
    """What the configuration says of a target."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int


def load_config(model: str) -> Any:
    """The transformers configuration; PreflightError when there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"cannot load the target {model}", str(error).splitlines()[0], "check target.model"
        ) from error


def target_facts(model: str) -> TargetFacts:
    """Architecture and sizes of the (text) model."""
    config = load_config(model)
    text = config.get_text_config()
    return TargetFacts(
        architecture=(config.architectures or [type(config).__name__])[0],
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_positions=int(getattr(text, "max_position_embeddings", 0) or 0),
    )


class LowestLayers:
    """Embedding and decoder layers 0..tap of the target, on the CPU in float32."""

    def __init__(self, model: str, tap: int) -> None:
        import torch
        from transformers import AutoModel
        from transformers.utils import logging

        logging.set_verbosity_error()  # the layers left out are reported as unexpected keys
        logging.disable_progress_bar()
        config = copy.deepcopy(load_config(model))
        text = config.get_text_config()
        text.num_hidden_layers = tap + 1
        if getattr(text, "layer_types", None):
            text.layer_types = list(text.layer_types)[: tap + 1]
        self.tap = tap
        loaded: Any = AutoModel.from_pretrained(
            model, config=config, dtype=torch.float32, trust_remote_code=False
        )
        self._model: Any = loaded.get_decoder() if hasattr(loaded, "get_decoder") else loaded
        self._model.eval()
        self.norm: Any = self._model.norm
        self._seen: list[Tensor] = []
        self._model.layers[tap].register_forward_hook(self._keep)

    def _keep(self, _module: object, _args: object, out: Any) -> None:
        self._seen.append((out[0] if isinstance(out, tuple) else out)[0])

    def states(self, input_ids: Sequence[int]) -> Tensor:
        """The output of layer ``tap`` for the ids alone: float32 [S, H]."""
        import torch

        self._seen.clear()
        with torch.inference_mode():
            self._model(input_ids=torch.tensor([list(input_ids)]), use_cache=False)
        return self._seen.pop()

    def below(self, input_ids: Sequence[int]) -> list[Tensor]:
        """What lies under the tap, float32 [S, H] each: the embeddings, then the outputs of layers
        0..tap-1."""
        import torch

        self._seen.clear()
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([list(input_ids)]), use_cache=False, output_hidden_states=True
            )
        self._seen.clear()
        return [h[0] for h in out.hidden_states[: self.tap + 1]]


@dataclass(frozen=True)
class FinalNorm:
    """The final norm's weight [H], epsilon and flavour: x/rms * w ("plain") or x/rms * (1 + w)
    ("one_plus")."""

    weight: Tensor
    eps: float
    flavour: str

    def __call__(self, pre: Tensor) -> Tensor:
        """Post-norm states float32 [S, H] of pre-norm ones."""
        import torch

        x = pre.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (self.weight if self.flavour == "plain" else 1 + self.weight)


def final_norm(lowest: LowestLayers) -> FinalNorm:
    """The final norm, its flavour probed on the module itself and not assumed from the model's name.

    Only for who needs it: to turn the pre-norm state of the last layer into the post-norm one. Raises
    PreflightError when the norm is of no known kind.
    """
    import torch

    module = lowest.norm
    eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))
    weight = module.weight.detach().to(torch.float32).clone()
    x = torch.linspace(-2, 3, weight.numel())[None]
    with torch.inference_mode():
        truth = module(x)
    for flavour in ("plain", "one_plus"):
        norm = FinalNorm(weight, eps, flavour)
        if torch.allclose(norm(x), truth, rtol=1e-4, atol=1e-5):
            return norm
    raise PreflightError(
        f"the final norm {type(module).__name__} is neither RMS norm with w nor with 1 + w",
        "the pre-norm state could not be turned into the post-norm one",
        "set target.last to post or none, and leave the last layer out of target.taps",
    )
