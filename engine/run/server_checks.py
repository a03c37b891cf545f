"""What a SGLang server's settings would do to a capture, one check a setting. Pure.

Facts: sglang.md 1, 2 and 6.4, read in SGLang 0.5.23. docs/preflight.md lists the checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.capture.plugin import server_flags
from engine.run.checklist import Check, error, info, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.run.server_settings import Settings

PLUGINS_FROM = (0, 5, 11)
"""SGLang loads plugins from this release on."""

CAPTURES_FROM = (0, 5, 23)
"""--enable-return-aux-hidden-states is there from this release on."""

TRIED = (0, 5, 23)
"""The newest release that the capture was run with."""

CAPTURE_FLAG = "--enable-return-aux-hidden-states"


@dataclass(frozen=True)
class Wanted:
    """What a run wants of each of its servers.

    Attributes:
        taps: outputs of 0-based layers. last: "pre", "post" or None. longest: of the pending rows, in tokens.
        architecture, num_layers, hidden_size: the target's. hybrid: it has linear-attention or Mamba layers.
        by_rid: the capture plugin writes the dumps (else a patched server numbers them).
    """

    taps: tuple[int, ...]
    last: str | None
    longest: int
    architecture: str
    num_layers: int
    hidden_size: int
    hybrid: bool = False
    by_rid: bool = True


def server_checks(s: Settings, want: Wanted) -> list[Check]:
    """Every check of one scheduler's settings."""
    checks: list[Callable[[Settings, Wanted], Check | None]] = [
        _version, _speculative, _pipeline, _role, _ranks, _radix, _chunks, _truncation, _precision,
        _overlapping, _cosmetics,
    ]  # fmt: skip
    if want.by_rid:
        checks[1:1] = [_capture_flag]
        checks += [_prefill_graph]
    return [found for check in checks if (found := check(s, want)) is not None]


def flags_for(taps: Sequence[int]) -> str:
    """The flags under which a server captures these taps, as one would type them."""
    return " ".join(server_flags(taps))


def _version(s: Settings, want: Wanted) -> Check:
    name, release = "version", s.release
    if s.embedded:
        return info(name, f"the embedded server ({s.version})")
    if not want.by_rid:
        return info(name, f"SGLang {s.version or '?'}; its dumps come from a patch of its own")
    if release is None:
        detail = f"SGLang says version {s.version or 'nothing'}: no release that is known"
        return warning(name, detail, "the capture may not fit it; the canary decides", "use SGLang 0.5.23")
    if release < PLUGINS_FROM:
        detail = f"SGLang {s.version} loads no plugins (from 0.5.11 on it does)"
    elif release < CAPTURES_FROM:
        detail = f"SGLang {s.version} loads plugins, but has no {CAPTURE_FLAG} (0.5.23 has)"
    elif release > TRIED:
        detail = f"SGLang {s.version} is newer than 0.5.23, the newest that was tried"
        return warning(name, detail, "a hook may not fit it; the canary decides", "use SGLang 0.5.23")
    else:
        return info(name, f"SGLang {s.version}: plugins, {CAPTURE_FLAG}, last_hidden_states")
    step = 'use SGLang 0.5.23; or, on a server with a patch of its own, dump_mode = "counter"'
    return error(name, detail, "nothing would be captured", step)


def _capture_flag(s: Settings, want: Wanted) -> Check:
    name, method = "capture flags", str(s.get("aux_hidden_state_capture") or "")
    if not s.get("enable_return_aux_hidden_states"):
        detail = f"the server was not started with {CAPTURE_FLAG}"
        return error(name, detail, "it gives no hidden states", f"start it with {flags_for(want.taps)}")
    if method in ("dflash", ""):
        return info(name, f"{CAPTURE_FLAG}{f' under {method}' if method else ''}: id k is layer k's output")
    detail = f"{CAPTURE_FLAG} under {method}: what an id means there differs between model files"
    effect = "a tap could be another layer; what the capture says it takes decides (layers)"
    return warning(name, detail, effect, "start it with --speculative-algorithm DFLASH instead")


def _speculative(s: Settings, want: Wanted) -> Check | None:
    algorithm = s.get("speculative_algorithm")
    if not algorithm:
        return info("speculative decoding", "off")
    return error(
        "speculative decoding",
        f"{algorithm} is active",
        "rows would be a draft's, and a neighbour's (sglang#26163)",
        f"start the server without a drafter: --speculative-algorithm only beside {CAPTURE_FLAG}",
    )


def _pipeline(s: Settings, want: Wanted) -> Check | None:
    size = s.number("pp_size") or 1
    if size == 1:
        return None
    effect = "only the layers of the last pipeline rank could be captured"
    return error("pipeline", f"pp_size is {size}", effect, "start the server with --pp-size 1")


def _role(s: Settings, want: Wanted) -> Check | None:
    mode = s.get("disaggregation_mode")
    if mode in (None, "null", ""):
        return None
    effect = "prefill and decode happen in different servers, and a request to one of them ends nowhere"
    detail = f"disaggregation_mode is {mode}"
    return error("role", detail, effect, "use a server that does both: --disaggregation-mode null")


def _ranks(s: Settings, want: Wanted) -> Check | None:
    tp = s.number("tp_size") or 1
    dp = max(s.number("dp_size") or 1, s.number("attn_dp_size") or 1)  # under DP attention, dp_size may say 1
    if dp == 1 and tp == 1:
        return None
    how = " with DP attention" if s.get("enable_dp_attention") else ""
    writers = "one process writes" if dp == 1 else f"{dp} processes write, each for its own requests"
    return info("ranks", f"tp {tp}, dp {dp}{how}: {writers}")


def _radix(s: Settings, want: Wanted) -> Check | None:
    if s.get("disable_radix_cache"):
        return info("prefix cache", "off")
    if not want.by_rid:
        return None  # preflight_counter.py judges it: an extra_key of ours keeps no stranger's head out of it
    detail = "on: every request of ours has an extra_key of its own, so no prefix is shared; a hit is refused"
    return info("prefix cache", detail)


def _chunks(s: Settings, want: Wanted) -> Check | None:
    if not want.by_rid:
        return None  # preflight_counter.py judges them
    if s.chunk is None:
        return info("chunks", "prompts are not cut into chunks")
    parts = -(-want.longest // s.chunk)
    joined = ", joined by their start positions" if parts > 1 else ""
    return info("chunks", f"of {s.chunk} tokens; the longest row has {want.longest}: {parts} or more{joined}")


def _truncation(s: Settings, want: Wanted) -> Check | None:
    if not s.get("allow_auto_truncate"):
        return None
    effect = "a prompt that is too long would be cut in silence; its prompt_tokens give it away"
    step = "start the server without --allow-auto-truncate"
    return error("truncation", "allow_auto_truncate is on", effect, step)


def _precision(s: Settings, want: Wanted) -> Check | None:
    """What makes the states others than the checkpoint's. The dtype has a check of its own."""
    cache, quantised = str(s.get("kv_cache_dtype") or "auto"), s.get("quantization")
    found = [f"the weights are quantised ({quantised})"] if quantised else []
    if cache not in ("auto", str(s.get("dtype")), "bf16", "bfloat16"):
        found.append(f"the KV cache is {cache}")
    if not found:
        return None
    effect = (
        "the states are those of the model as it is served, not of the checkpoint as transformers runs it"
    )
    return warning(
        "precision", "; ".join(found), effect, "capture from an unquantised server if that matters"
    )


def _overlapping(s: Settings, want: Wanted) -> Check | None:
    if not s.get("enable_two_batch_overlap"):
        return None
    step = "start the server without --enable-two-batch-overlap"
    if want.by_rid and want.last == "pre":
        effect = "the final norm runs twice in a forward, so the state before it is not given"
        return error("two-batch overlap", 'is on, and last is "pre"', effect, step)
    effect = "a forward runs as two halves; capturing beside that was not tried, the canary decides"
    return warning("two-batch overlap", "is on", effect, step)


def _prefill_graph(s: Settings, want: Wanted) -> Check | None:
    """The hook on the final norm is Python: it does not run when a CUDA graph is replayed. Under "breakable",
    the default on CUDA, only attention runs between the graphs, and the final norm is in the last of them."""
    if want.last != "pre" or s.get("device") != "cuda":
        return None
    name, step = "prefill graph", "start the server with --cuda-graph-backend-prefill disabled"
    effect = 'the state before the final norm (last = "pre") would be missing'
    config = s.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, dict) else None
    backend = prefill.get("backend") if isinstance(prefill, dict) else None
    if backend == "disabled" or s.get("disable_cuda_graph"):
        return info(name, "the prefill runs eagerly, so the final norm's input can be taken")
    if backend:
        detail = f"the prefill is replayed from a CUDA graph (backend {backend})"
        return error(name, detail, f"{effect} in every dump of up to that graph's size", step)
    detail = "the prefill's CUDA graph backend is not told"
    return warning(name, detail, f"{effect}, if it is replayed; the canary decides", step)


def _cosmetics(s: Settings, want: Wanted) -> Check:
    """What people ask about, and what it is: no matter."""
    said = []
    if s.get("skip_tokenizer_init"):
        said.append("skip_tokenizer_init is on: token ids only, which is what is sent")
    mixed = (
        "on: decode rows share forwards, and are told apart by the batch"
        if s.get("enable_mixed_chunk")
        else "off"
    )
    said.append(f"mixed chunks {mixed}")
    said.append(f"overlap schedule {'off' if s.get('disable_overlap_schedule') else 'on'}")
    return info("schedule", "; ".join(said))
