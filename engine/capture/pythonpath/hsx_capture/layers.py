"""Which layers a loaded model will really capture, as outputs of 0-based decoder layers.

SGLang's model files turn the asked ids into their own by their own rules: deepseek_v2, and so Kimi-K2.5,
adds one only when the first id is 1. So the asked ids prove nothing; the model's ``layers_to_capture`` does.
What an id means there was read in each model file of SGLang 0.5.23: the files in BEFORE capture the input of
layer i, which is the output of layer i - 1. A file that is not listed has an unknown meaning, and that is
said.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BEFORE = frozenset(
    {
        "apertus",
        "arcee",
        "bailing_moe",
        "deepseek_v2",
        "exaone_moe",
        "gemma3_causal",
        "gemma4_causal",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm5_next",
        "gpt_oss",
        "laguna",
        "llama",
        "longcat_flash",
        "mimo_v2",
        "minimax_m2",
        "minimax_m3",
        "nemotron_h",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
    }
)
"""Model files in which id i is the input of layer i."""

AFTER = frozenset({"bailing_moe_v3"})
"""Model files in which id i is the output of layer i."""


@dataclass(frozen=True)
class Layers:
    """What is captured. ``taps``: outputs of 0-based layers, ascending, () when unknown; ``raw``: the model's
    own ids; ``error``: why it is not known."""

    taps: tuple[int, ...]
    raw: tuple[int, ...]
    error: str = ""


def read_layers(model: Any) -> Layers:
    """Read them from a loaded model (torch.nn.Module)."""
    found = {}
    for module in model.modules():
        ids = getattr(module, "layers_to_capture", None)
        if ids:
            found[type(module).__module__.rpartition(".")[2], tuple(sorted(int(i) for i in ids))] = module
    if not found:
        return Layers((), (), "the model has no layers_to_capture: it captures nothing, or in its own way")
    if len({raw for _, raw in found}) > 1:
        return Layers((), (), f"the model names several sets of layers: {sorted(raw for _, raw in found)}")
    (file, raw), module = next(iter(found.items()))
    flagged = _flagged(module)
    if flagged is not None and flagged != raw:
        return Layers((), raw, f"layers_to_capture is {list(raw)}, but the layers marked are {list(flagged)}")
    for name in [type_.__module__.rpartition(".")[2] for type_ in type(module).__mro__]:
        if name in BEFORE:
            return Layers(tuple(i - 1 for i in raw), raw)
        if name in AFTER:
            return Layers(raw, raw)
    return Layers((), raw, f"it is not known what a layer id means in SGLang's model file {file}.py")


def _flagged(module: Any) -> tuple[int, ...] | None:
    """The layers that carry the mark by which some model files go; None where there is none."""
    layers = getattr(module, "layers", None)
    if layers is None:
        return None
    try:
        marked = tuple(i for i, layer in enumerate(layers) if getattr(layer, "_is_layer_to_capture", False))
    except TypeError:
        return None
    return marked or None
