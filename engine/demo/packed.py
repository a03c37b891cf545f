"""The target in transformers, computing several requests in one flattened forward, with its taps read by
hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.demo.attention import NAME

if TYPE_CHECKING:
    from pathlib import Path

    from engine.demo.attention import Segment


@dataclass(frozen=True)
class Shape:
    """What the server needs to know of a model."""

    architecture: str
    model_type: str
    layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eos: frozenset[int]

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def read_shape(config: Any, generation_config: Any) -> Shape:
    """From transformers' configurations."""
    eos = (
        generation_config.eos_token_id if generation_config.eos_token_id is not None else config.eos_token_id
    )
    return Shape(
        architecture=str((config.architectures or ["unknown"])[0]),
        model_type=str(config.model_type),
        layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        eos=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )


@dataclass(frozen=True, eq=False)
class Computed:
    """What a forward of T rows gave: ``last`` [T, H] after the final norm; with taps also ``states``
    [T, (K + 2) * H]: the K taps ascending, then last, then pre (before the final norm)."""

    last: torch.Tensor
    states: torch.Tensor | None


class PackedModel:
    """A causal decoder in float32 on the CPU. ``taps`` None: nothing is captured."""

    def __init__(self, model: Any, taps: tuple[int, ...] | None) -> None:
        self.shape = read_shape(model.config, model.generation_config)
        self.taps = taps
        self._model = model
        self._decoder = model.get_decoder()
        self._seen: dict[int, torch.Tensor] = {}
        model.set_attn_implementation(NAME)
        for layer in () if taps is None else sorted({*taps, self.shape.layers - 1}):
            self._decoder.layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self._seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def new_kv(self, tokens: int) -> torch.Tensor:
        """A K/V buffer for one request: [layers, 2, Hkv, tokens, D]."""
        s = self.shape
        return torch.empty(s.layers, 2, s.kv_heads, tokens, s.head_dim)

    def norm(self, pre: torch.Tensor) -> torch.Tensor:
        """The final norm: [n, H] -> [n, H]."""
        out: torch.Tensor = self._decoder.norm(pre)
        return out

    def forward(self, segments: list[Segment], ids: torch.Tensor, capture: bool) -> Computed:
        """One forward of all segments; ``ids`` int64 [T] are those of the packed batch."""
        positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
        out = self._decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, segments=segments
        )
        last = out.last_hidden_state[0]
        states = None
        if capture and self.taps is not None:
            pre = self._seen[self.shape.layers - 1][0]
            states = torch.cat([*(self._seen[t][0] for t in self.taps), last, pre], dim=-1)
        self._seen.clear()
        return Computed(last, states)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] after the final norm -> [n, vocabulary]."""
        out: torch.Tensor = self._model.lm_head(rows)
        return out


def load_weights(path: Path) -> Any:
    """The model of a folder, in float32. Raises what transformers raises."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    return model.eval()
