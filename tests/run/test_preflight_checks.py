"""The preflight's checks as pure functions over what a real SGLang 0.5.23 said of itself (recorded/).

A server with most of these settings cannot be started without a GPU, a cluster or another release.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.run.capture_checks import Room, capture_active, dump_room, file_system
from engine.run.checklist import Check, error, info, merge, refuse_if_failed, warning
from engine.run.layer_checks import (
    conv_state,
    hidden_sizes,
    is_hybrid,
    layers_asked,
    layers_captured,
    taps_exist,
)
from engine.run.server_checks import Wanted, server_checks
from engine.run.server_settings import Settings, differences, schedulers
from engine.wire.errors import PreflightError

RECORDED = Path(__file__).parent / "recorded"
WANT = Wanted((0, 1, 2), "pre", 257, "LlamaForCausalLM", 4, 64)


def recorded() -> dict[str, Any]:
    """What GET /server_info of SGLang 0.5.23 answered (tiny Llama, CPU; --allow-auto-truncate taken out)."""
    found: dict[str, Any] = json.loads((RECORDED / "server_info.json").read_bytes())
    return found


def beacons() -> list[dict[str, Any]]:
    """What the plugin in that server wrote."""
    found: list[dict[str, Any]] = json.loads((RECORDED / "beacons.json").read_bytes())
    return found


def every(server_info: dict[str, Any], want: Wanted = WANT) -> list[Check]:
    """All checks of a server's settings."""
    checks = differences(server_info)
    for settings in schedulers(server_info):
        checks += server_checks(settings, want) + layers_asked(settings, want)
        checks += [c for c in [conv_state(settings, beacons(), want)] if c is not None]
    return checks


def changed(**settings: Any) -> dict[str, Any]:
    """The recorded server with other settings, everywhere."""
    found = recorded()
    states = [
        {**state, **{k: v for k, v in settings.items() if k in state}} for state in found["internal_states"]
    ]
    return {**found, **settings, "internal_states": states}


def test_dp_attention_is_counted_where_dp_size_says_one() -> None:
    told = changed(tp_size=2, dp_size=1, attn_dp_size=2, enable_dp_attention=True)
    (ranks,) = [c for c in every(told) if c.name == "ranks"]
    assert ranks.detail.startswith("tp 2, dp 2 with DP attention: 2 processes write")


def test_the_recorded_server_is_fit() -> None:
    checks = every(recorded())
    assert {c.severity for c in checks} == {"info"}, [c.line() for c in checks]
    said = {c.name: c.detail for c in checks}
    assert said["version"].startswith("SGLang 0.5.23")
    assert "extra_key" in said["prefix cache"]
    assert "of 128 tokens; the longest row has 257: 3 or more" in said["chunks"]
    assert said["layers"] == "taps [0, 1, 2], the server captures [0, 1, 2]"


IDS = "--return-aux-hidden-state-layer-ids 0 1 2"
NO_GRAPH = "--cuda-graph-backend-prefill disabled"
DFLASH = "--speculative-algorithm DFLASH"
DRAFTER = "--speculative-algorithm only"
CUDA = {"device": "cuda"}
GRAPH = {"cuda_graph_config": {"prefill": {"backend": "full"}}}
BREAKABLE = {"cuda_graph_config": {"prefill": {"backend": "breakable"}}}
EAGER = {"cuda_graph_config": {"prefill": {"backend": "disabled"}}}


@pytest.mark.parametrize(
    ("settings", "name", "severity", "mends"),
    [
        ({"version": "0.5.10.post1"}, "version", "error", "SGLang 0.5.23"),
        ({"version": "0.5.11"}, "version", "error", "SGLang 0.5.23"),
        ({"version": "0.5.22"}, "version", "error", "SGLang 0.5.23"),
        ({"version": "0.5.23.post2"}, "version", "info", ""),
        ({"version": "0.5.24rc1"}, "version", "warning", "SGLang 0.5.23"),
        ({"version": "1.0.0"}, "version", "warning", "SGLang 0.5.23"),
        ({"version": "main-abc123"}, "version", "warning", "SGLang 0.5.23"),
        ({"version": None}, "version", "warning", "SGLang 0.5.23"),
        ({"version": "hsx-demo-9.9"}, "version", "info", ""),
        ({"enable_return_aux_hidden_states": False}, "capture flags", "error", IDS),
        ({"aux_hidden_state_capture": "eagle3"}, "capture flags", "warning", DFLASH),
        ({"speculative_algorithm": "EAGLE3"}, "speculative decoding", "error", DRAFTER),
        ({"pp_size": 2}, "pipeline", "error", "--pp-size 1"),
        ({"disaggregation_mode": "prefill"}, "role", "error", "--disaggregation-mode null"),
        ({"disable_radix_cache": True}, "prefix cache", "info", ""),
        ({"chunked_prefill_size": -1}, "chunks", "info", ""),
        ({"allow_auto_truncate": True}, "truncation", "error", "without --allow-auto-truncate"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "precision", "warning", "unquantised"),
        ({"quantization": "awq"}, "precision", "warning", "unquantised"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap", "error", "--enable-two-batch-overlap"),
        ({**CUDA, **GRAPH}, "prefill graph", "error", NO_GRAPH),
        ({**CUDA, **BREAKABLE}, "prefill graph", "error", NO_GRAPH),
        ({**CUDA, "cuda_graph_config": None}, "prefill graph", "warning", NO_GRAPH),
        ({**CUDA, **EAGER}, "prefill graph", "info", ""),
        ({"return_aux_hidden_state_layer_ids": [0, 1]}, "layers", "error", IDS),
        ({"return_aux_hidden_state_layer_ids": None}, "layers", "error", IDS),
        ({"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, "ranks", "info", ""),
    ],
)  # fmt: skip
def test_a_setting_has_a_severity_an_effect_and_the_flag_that_mends_it(
    settings: dict[str, Any], name: str, severity: str, mends: str
) -> None:
    found = [c for c in every(changed(**settings)) if c.name == name]
    assert [c.severity for c in found] == [severity], [c.line() for c in found]
    assert mends in found[0].next_step
    if severity != "info":
        assert found[0].effect
        others = [c for c in every(changed(**settings)) if not c.ok and c.name != name]
        assert not others, [c.line() for c in others]


@pytest.mark.parametrize(
    ("settings", "want", "severities"),
    [
        ({**CUDA, **GRAPH}, {"last": "post"}, []),
        ({**GRAPH}, {}, []),
        ({"enable_two_batch_overlap": True}, {"last": "post"}, ["warning"]),
        ({"version": "0.5.9"}, {"by_rid": False}, []),
        ({"enable_return_aux_hidden_states": False}, {"by_rid": False}, []),
    ],
)
def test_what_matters_depends_on_what_is_wanted(
    settings: dict[str, Any], want: dict[str, Any], severities: list[str]
) -> None:
    checks = every(changed(**settings), replace(WANT, **want))
    assert [c.severity for c in checks if c.severity != "info"] == severities, [c.line() for c in checks]


def test_a_scheduler_that_has_other_settings_than_the_server_says_is_named_and_judged_by_its_own() -> None:
    told = recorded()
    told["internal_states"] = [{**told["internal_states"][0], "pp_size": 2, "stream_interval": 7}]
    checks = {c.name: c for c in every(told)}
    assert checks["settings read back"].severity == "warning"
    assert (
        "pp_size 1 is 2; disable_chunked" in checks["settings read back"].detail
    )  # what decides comes first
    assert "stream_interval 1 is 7" in checks["settings read back"].detail
    assert checks["pipeline"].severity == "error"
    cosmetic = recorded()
    cosmetic["internal_states"] = [{**cosmetic["internal_states"][0], "stream_interval": 7}]
    (only,) = differences(cosmetic)
    assert (only.severity, "stream_interval 1 is 7" in only.detail) == ("info", True)
    (none,) = differences({**told, "internal_states": None})
    assert none.severity == "warning"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("allow_auto_truncate", True),
        ("chunked_prefill_size", 64),
        ("context_length", 512),
        ("disable_radix_cache", True),
        ("dtype", "bfloat16"),
        ("enable_return_aux_hidden_states", False),
        ("return_aux_hidden_state_layer_ids", [0, 1]),
        ("speculative_algorithm", "EAGLE3"),
    ],
)
def test_a_scheduler_that_contradicts_the_server_where_it_matters_is_refused(
    name: str, other: object
) -> None:
    told = recorded()
    (state,) = told["internal_states"]
    assert told[name] == state[name] != other
    second = {**state, name: other}
    found = [
        c for c in differences({**told, "internal_states": [state, second]}) if c.name.startswith("sett")
    ]
    assert [c.severity for c in found if not c.ok] == ["error"]
    (refused,) = [c for c in found if not c.ok]
    assert f"{name} {told[name]} is {other} in scheduler 1" in refused.detail
    silent = {k: v for k, v in state.items() if k != name}
    for unsaid in (silent, {**state, name: None}):
        assert all(c.ok for c in differences({**told, "internal_states": [unsaid]}))


def test_the_last_layer_is_refused_where_it_kills_the_scheduler() -> None:
    want = replace(WANT, taps=(0, 1, 3))
    (wrong,) = [c for c in every(changed(return_aux_hidden_state_layer_ids=[0, 1, 3]), want) if not c.ok]
    assert wrong.name == "last layer"
    assert "dies at the first request" in wrong.effect
    assert "--return-aux-hidden-state-layer-ids 0 1" in wrong.next_step
    able = replace(want, architecture="GptOssForCausalLM")
    found = every(changed(return_aux_hidden_state_layer_ids=[0, 1, 3]), able)
    assert [c.severity for c in found if c.name == "last layer"] == ["warning"]
    assert not taps_exist(replace(WANT, taps=(0, 4))).ok
    assert "output of layers [0, 1, 2] = input of layers [1, 2, 3]" in taps_exist(WANT).detail


def test_what_the_loaded_model_captures_decides() -> None:
    (right,) = layers_captured(beacons(), WANT)
    assert right.severity == "info"
    assert "its own ids [1, 2, 3]" in right.detail
    one_early = [{**b, "taps": [0, 1], "engine_layer_ids": [1, 2]} for b in beacons()]
    (wrong,) = layers_captured(one_early, WANT)
    assert (wrong.name, wrong.severity) == ("layers captured", "error")
    (unknown,) = layers_captured([{**beacons()[0], "taps": [], "layers_error": "no such model file"}], WANT)
    assert unknown.severity == "error"
    unset: tuple[list[int] | None, ...] = (None, [])
    for taps in unset:
        (later,) = layers_captured([{**beacons()[0], "taps": taps, "engine_layer_ids": None}], WANT)
        assert later.severity == "info"
        assert "canary" in later.detail
    assert not hidden_sizes(beacons(), WANT)
    assert not hidden_sizes(beacons(), replace(WANT, hidden_size=128))[0].ok


HYBRID = replace(WANT, hybrid=True)


@pytest.mark.parametrize(
    ("dtype", "env", "severity"),
    [
        ("float32", {}, "error"),
        ("float32", {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}, "error"),
        ("float32", {"SGLANG_MAMBA_CONV_DTYPE": "float32"}, "info"),
        ("float32", None, "warning"),
        ("bfloat16", {}, "info"),
        ("bfloat16", None, "info"),
        ("bfloat16", {"SGLANG_MAMBA_CONV_DTYPE": "float16"}, "error"),
        ("float16", {"SGLANG_MAMBA_CONV_DTYPE": "float16"}, "info"),
    ],
)
def test_a_chunked_hybrid_wants_an_exact_conv_state(
    dtype: str, env: dict[str, str] | None, severity: str
) -> None:
    told = {k: v for k, v in beacons()[0].items() if k != "env"} | ({"env": env} if env is not None else {})
    found = conv_state(Settings({**recorded(), "dtype": dtype}), [told], HYBRID)
    assert found is not None
    assert found.severity == severity
    if severity != "info":
        assert "SGLANG_MAMBA_CONV_DTYPE=float32" in found.next_step
    for settings, want in (({"chunked_prefill_size": -1}, HYBRID), ({}, WANT)):
        assert conv_state(Settings({**recorded(), **settings}), [told], want) is None


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layers_block_type": ["mamba", "attention"]}, True),
        ({"hybrid_override_pattern": "M-M*-"}, True),
        ({"linear_attn_config": {"kda_layers": [1]}}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"num_hidden_layers": 4, "linear_attn_config": None}, False),
    ],
)
def test_a_hybrid_is_known_by_its_configuration(config: dict[str, Any], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid


def test_whether_the_capture_is_active(tmp_path: Path) -> None:
    alive = beacons()
    assert [c.severity for c in capture_active(alive, "", tmp_path, 1)] == ["info"]
    for found, trouble, processes in (([], "", 1), (alive, "mode 755", 1), (alive, "", 2)):
        (wrong,) = capture_active(found, trouble, tmp_path, processes)
        assert wrong.severity == "error"
        assert wrong.next_step
    (dead,) = capture_active([{**alive[0], "failed": "ValueError:\nno such layer"}], "", tmp_path, 1)
    assert (dead.severity, "ValueError: no such layer" in dead.detail) == ("error", True)
    shared = capture_active([*alive, {**alive[0], "pid": 7}], "", tmp_path, 1)
    assert [c.severity for c in shared] == ["info", "warning"]


def test_the_room_for_dumps_is_the_file_systems_and_the_captures_own(tmp_path: Path) -> None:
    def severities(room: Room, **limits: int) -> dict[str, str]:
        return {c.name: c.severity for c in dump_room(tmp_path, room, [{"limits": limits}])}

    fits = Room(1000, 100, 10_000)
    assert severities(fits, folder_bytes=2000, memory_bytes=2000) == {"dump folder": "info"}
    assert severities(replace(fits, free=1500)) == {"dump folder": "error"}
    assert severities(fits, folder_bytes=500)["capture's bounds"] == "warning"
    assert severities(fits, memory_bytes=99)["capture's bounds"] == "error"
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path) not in ("proc", "unknown")


def test_a_check_tells_how_bad_it_is_and_the_refusal_names_all_of_them() -> None:
    bad = error("layers", "two of three", "other layers would be stored", "start it with --x 1")
    doubt = warning("version", "untried", "a hook may not fit", "use another")
    well = info("model", "the same")
    assert [c.severity for c in (bad, doubt, well)] == ["error", "warning", "info"]
    assert [c.to_json()["ok"] for c in (bad, doubt, well)] == [False, True, True]
    assert bad.to_json() == {
        "name": "layers", "ok": False, "severity": "error", "detail": "two of three",
        "effect": "other layers would be stored", "next": "start it with --x 1",
    }  # fmt: skip
    assert "other layers would be stored; start it with --x 1" in bad.line()
    refuse_if_failed([doubt, well])
    with pytest.raises(PreflightError, match=r"layers, disk: two of three \(other .*\); full\."):
        refuse_if_failed([bad, doubt, error("disk", "full", "", "")])


def test_what_servers_have_in_common_is_said_once() -> None:
    same, mine = info("version", "0.5.23"), error("capture", "not active", "nothing is captured", "start it")
    merged = merge([("http://a", [same]), ("http://b", [same, mine])])
    assert [c.detail for c in merged] == ["0.5.23", "http://b: not active"]
    assert not merged[1].ok
