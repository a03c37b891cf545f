"""Right hidden states of the shipped samples, each computed in several ways.

A lone forward of the whole model; the layers up to the lowest tap packed and in chunks, as the small real
server computes; the same layers in bfloat16 and float16 throughout, as a GPU server does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.corruptions import CHUNK
from engine.demo.batching import BatchRules, plan
from engine.demo.packed import PackedModel
from engine.demo.requests import Request, Sampling
from engine.targets.lone import LoneForward
from engine.targets.lowest import LowestLayers, load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.corruptions import Shipped

TAP, UPPER, DEEPEST = 1, 14, 5
COMPANY = 8
"""Requests in flight at once."""


@dataclass(frozen=True)
class Taken:
    """Of every sample, [S, H] each.

    Attributes:
        lone, upper, last: the lowest tap, tap 14 and the post-norm last state of the lone forward.
        states: by dtype, the lowest tap as a server of that dtype computes it.
        truth: by dtype, what the product recomputes from the ids (float32, from the weights that the server
            had).
    """

    lone: list[Tensor]
    upper: list[Tensor]
    last: list[Tensor]
    states: dict[str, list[Tensor]]
    truth: dict[str, list[Tensor]]


def take(model: str, samples: Sequence[Shipped]) -> Taken:
    """Every right state that is measured."""
    lowest, lone = LowestLayers(model, TAP), LoneForward(model)
    out = Taken([], [], [], {"float32": packed_forward(model, samples)}, {"float32": []})
    for s in samples:
        states = lone.states(s.ids)
        out.truth["float32"].append(lowest.states(s.ids))
        out.lone.append(states[TAP + 1].clone())
        out.upper.append(states[UPPER + 1].clone())
        out.last.append(states[-1].clone())
    for dtype in ("bfloat16", "float16"):
        pairs = rounded_forward(model, samples, dtype, TAP)
        out.states[dtype] = [states[TAP] for states, _ in pairs]
        out.truth[dtype] = [truth[TAP] for _, truth in pairs]
    return out


def lowest_alone(model: str, dtype: torch.dtype, tap: int) -> Any:
    """The causal model cut off above a tap."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(load_config(model))
    config.num_hidden_layers = tap + 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=dtype, trust_remote_code=False
    )
    return loaded.eval()


def packed_forward(model: str, samples: Sequence[Shipped]) -> list[Tensor]:
    """The lowest tap of each, computed side by side with others in chunks of 256."""
    computed = PackedModel(lowest_alone(model, torch.float32, TAP), (TAP,))
    hidden = computed.shape.hidden_size
    waiting = [
        Request(f"r{i}", i, list(s.ids), Sampling(max_new_tokens=0), lambda _: None)
        for i, s in enumerate(samples)
    ]
    parts: list[list[Tensor]] = [[] for _ in waiting]
    while waiting:
        running = waiting[:COMPANY]
        for r in running:
            r.kv = computed.new_kv(len(r.prompt)) if r.kv is None else r.kv
        segments = plan(running, BatchRules(CHUNK), False)
        ids = torch.tensor([t for s in segments for t in s.request.next_ids(s.rows)])
        with torch.inference_mode():
            states = computed.forward(segments, ids, True).states
        assert states is not None
        for s in segments:
            parts[s.request.serial].append(states[s.packed, :hidden].clone())
            s.request.computed = s.end
        waiting = [r for r in waiting if r.in_prefill]
    return [torch.cat(p) for p in parts]


def rounded_forward(
    model: str, samples: Sequence[Shipped], dtype: str, tap: int
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each sample (layers 0..tap computed in ``dtype`` throughout, in float32 from the same weights)."""
    loaded = lowest_alone(model, getattr(torch, dtype), tap)
    seen: list[Tensor] = []
    for layer in loaded.get_decoder().layers:
        layer.register_forward_hook(
            lambda _m, _a, out: seen.append((out[0] if isinstance(out, tuple) else out)[0])
        )

    def run() -> list[list[Tensor]]:
        out = []
        with torch.inference_mode():
            for s in samples:
                loaded.get_decoder()(input_ids=torch.tensor([s.ids]), use_cache=False)
                out.append(list(seen))
                seen.clear()
        return out

    states = run()
    loaded.float()
    return list(zip(states, run(), strict=True))
