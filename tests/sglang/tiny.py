"""Tiny random models of the four kinds that the tests serve, made once a folder; and their lone forward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.models import offline, smollm2_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

offline()

LAYERS = 4
VOCABULARY = 512
HIDDEN = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def make(kind: str, folder: Path) -> Path:
    """``llama``, ``qwen3``, ``qwen3_moe`` or ``qwen3_next``: folder/kind with weights and config."""
    import transformers as t

    path = folder / kind
    if (path / "config.json").exists():
        return path
    wide = {**_COMMON, "intermediate_size": 128}
    model: Any
    if kind == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**wide))
    elif kind == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**wide))
    elif kind == "qwen3_moe":
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**wide, **_EXPERTS, decoder_sparse_step=1))
    else:
        model = t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**wide, **_EXPERTS, **_LINEAR))
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
        else:  # norms that differ from 1, so that pre and post cannot be confused
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(torch.float32).save_pretrained(path)
    t.AutoTokenizer.from_pretrained(smollm2_tokenizer()).save_pretrained(path)
    if kind == "qwen3_next":  # SGLang reads it, transformers does not write it
        config = json.loads((path / "config.json").read_text())
        config["full_attention_interval"] = 4
        (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path) -> Any:
    """The model in transformers, float32, eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@dataclass(frozen=True)
class Truth:
    """A lone forward: [S, H] each; ``taps`` by 0-based layer; ``pre`` is the final norm's input."""

    taps: dict[int, torch.Tensor]
    post: torch.Tensor
    pre: torch.Tensor


@torch.inference_mode()
def lone(model: Any, ids: Sequence[int]) -> Truth:
    """One prompt alone: no batch, no chunks. Every layer by a hook, so no convention of lists matters."""
    decoder = model.get_decoder()
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            seen[layer] = (out[0] if isinstance(out, tuple) else out)[0]

        return hook

    handles = [each.register_forward_hook(keep(i)) for i, each in enumerate(decoder.layers)]
    try:
        out = decoder(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Truth(seen, out.last_hidden_state[0], seen[len(decoder.layers) - 1])


def least_cosine(got: torch.Tensor, true: torch.Tensor) -> float:
    """Over the rows of two [S, H], in float64."""
    assert got.shape == true.shape
    return float(torch.nn.functional.cosine_similarity(got.double(), true.double(), dim=-1).min())
