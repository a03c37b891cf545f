"""Which layers a run wants, which its servers were asked for, which they will really capture. Pure.

SGLang's model files capture the output of layer k as the input of layer k + 1, so most of them cannot capture
their last layer: asked for it, a server starts, and its scheduler dies at the first request
(logits_processor.py: "The model captured 3 aux hidden states, but ... names 4 layers").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.run.checklist import Check, error, info, warning
from engine.run.server_checks import flags_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.run.server_checks import Wanted
    from engine.run.server_settings import Settings

CAPTURE_LAST = frozenset(
    {
        "GptOssForCausalLM",
        "LagunaForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
    }
)
"""Architectures whose model files capture after the loop as well (read in SGLang 0.5.23, not tried)."""

EXACT_CONV = "SGLANG_MAMBA_CONV_DTYPE"

_RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm")
_RECURRENT_KEYS = (
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_conv",
    "mamba_d_state",
    "conv_L_cache",
)


def conventions(taps: Sequence[int]) -> str:
    """Taps in both conventions: what a person reads in a configuration of SGLang or vLLM may be the other."""
    return f"output of layers {list(taps)} = input of layers {[t + 1 for t in taps]} (vLLM's ids)"


def taps_exist(want: Wanted) -> Check:
    """Whether the target has such layers."""
    over = [t for t in want.taps if t >= want.num_layers]
    detail = f"{want.architecture} has layers 0..{want.num_layers - 1}; {conventions(want.taps)}"
    if over:
        effect = f"there is no output of layer {', '.join(map(str, over))}"
        return error("taps", detail, effect, "choose taps in that range (output of 0-based layer k)")
    return info("taps", detail)


def layers_asked(s: Settings, want: Wanted) -> list[Check]:
    """The ids that the server was started with."""
    ids = s.get("return_aux_hidden_state_layer_ids")
    if not isinstance(ids, list):
        if want.by_rid and s.get("enable_return_aux_hidden_states"):
            effect = "the model's own default layers would be captured, not the taps"
            detail = "the server names no return_aux_hidden_state_layer_ids"
            return [error("layers", detail, effect, f"start the server with {flags_for(want.taps)}")]
        return []
    asked = sorted(i for i in ids if isinstance(i, int))
    checks = []
    if tuple(asked) != want.taps:
        detail = f"taps {list(want.taps)}, the server captures {ids}"
        effect = "other layers would be stored under the taps' names"
        checks.append(error("layers", detail, effect, f"start the server with {flags_for(want.taps)}"))
    else:
        checks.append(info("layers", f"taps {list(want.taps)}, the server captures {ids}"))
    last = want.num_layers - 1
    if want.by_rid and last in asked and not s.embedded:
        checks.append(_last_layer(want, last))
    return checks


def _last_layer(want: Wanted, last: int) -> Check:
    detail = f"layer {last} is the last one of {want.architecture}"
    if want.architecture in CAPTURE_LAST:
        effect = "its model file captures it after the loop; that was read, not tried: the canary decides"
        return warning("last layer", detail, effect, "nothing, unless the canary refuses")
    effect = "this model file cannot capture it: the scheduler dies at the first request"
    keep = [t for t in want.taps if t != last]
    step = f'leave it out of the taps and take it as last = "pre" or "post": {flags_for(keep)}'
    return error("last layer", detail, effect, step)


def layers_captured(beacons: Sequence[Mapping[str, Any]], want: Wanted) -> list[Check]:
    """What the loaded model will capture, as the capture read it from the model itself."""
    checks: list[Check] = []
    for beacon in beacons:
        pid, taps, raw = beacon.get("pid"), beacon.get("taps"), beacon.get("engine_layer_ids")
        trouble = " ".join(str(beacon.get("layers_error") or "").split())[:300]
        if trouble:
            effect = "rows of unknown layers would be stored under the taps' names"
            step = "use a model file whose layer ids are known (hsx_capture/layers.py), or report it"
            checks.append(error("layers captured", f"process {pid}: {trouble}", effect, step))
        elif not isinstance(taps, list) or not taps:
            detail = f"process {pid} does not say yet what it captures: the canary's first reply will"
            checks.append(info("layers captured", detail))
        elif taps != list(want.taps):
            detail = f"taps {list(want.taps)}, the loaded model captures the output of {taps} (its ids {raw})"
            effect = "other layers would be stored under the taps' names"
            step = f"start the server with {flags_for(want.taps)}"
            checks.append(error("layers captured", detail, effect, step))
        else:
            checks.append(info("layers captured", f"the loaded model captures {taps} (its own ids {raw})"))
    return list(dict.fromkeys(checks))


def hidden_sizes(beacons: Sequence[Mapping[str, Any]], want: Wanted) -> list[Check]:
    """Whether the loaded model is as wide as the target."""
    sizes = {b["hidden_size"] for b in beacons if isinstance(b.get("hidden_size"), int)}
    if sizes <= {want.hidden_size}:
        return []
    detail = f"the target's hidden size is {want.hidden_size}, the loaded model's {sorted(sizes)}"
    return [error("hidden size", detail, "every dump would be of another width", "serve the run's target")]


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a (text) model's configuration names linear-attention, Mamba or convolution layers."""
    for name in ("layer_types", "layers_block_type"):
        kinds = config.get(name)
        if isinstance(kinds, list | tuple) and any(
            part in str(kind).lower() for kind in kinds for part in _RECURRENT
        ):
            return True
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        return True
    return any(config.get(name) for name in _RECURRENT_KEYS)


def conv_state(s: Settings, beacons: Sequence[Mapping[str, Any]], want: Wanted) -> Check | None:
    """Between chunks, SGLang keeps the convolution's inputs in bfloat16 unless told otherwise.

    A hybrid model's states then have cosine 0.99983 where they should have 1 (257 tokens in chunks of 128, in
    float32). Short rows are cut, too: the chunk is the budget of a forward, not of a row.
    """
    name = "chunked hybrid"
    if not want.hybrid or s.chunk is None or not want.by_rid:
        return None
    dtype = str(s.get("dtype") or "").removeprefix("torch.")
    told = {str(_env(b).get(EXACT_CONV, "bfloat16")) for b in beacons if "env" in b}
    if told == {"float32"} or (told and told == {dtype}):
        return info(name, f"the conv state is kept between chunks in {', '.join(told)}, as it is computed")
    if dtype == "bfloat16" and told <= {"bfloat16", "float32"}:
        return info(name, "the conv state is kept between chunks in bfloat16, which the model computes in")
    effect = "rows after a row's first chunk differ slightly (cosine 0.99983 was seen)"
    step = f"set {EXACT_CONV}=float32 for the server, or start it with --chunked-prefill-size -1"
    detail = f"the target has linear-attention or Mamba layers, and prompts are cut into chunks of {s.chunk}"
    if told:
        detail += f"; the conv state is kept in {', '.join(sorted(told))} between them"
        return error(name, detail, effect, step)
    return warning(name, f"{detail}; {EXACT_CONV} of the server is not known", effect, step)


def _env(beacon: Mapping[str, Any]) -> Mapping[str, Any]:
    env = beacon.get("env")
    return env if isinstance(env, dict) else {}
