"""Several servers of one run: what they must have in common, how they share the work, what is logged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from engine.sources.sglang import SGLangSource, differing
from engine.wire.errors import PreflightError
from engine.wire.spec import Endpoint, SourceSpec
from tests.demo.harness import Server, start_server, stop_server
from tests.run.conftest import Bench, token_rows, write_rows
from tests.run.test_dead_server import replica_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(300)]


@pytest.fixture
def other_layers(chat_tiny: Path, tmp_path: Path) -> Iterator[Server]:
    place = tmp_path / "other"
    place.mkdir()
    server = start_server(chat_tiny, place, "--chunked-prefill-size", "64", "--taps", "1 2 4")
    yield server
    stop_server(server.process)


@pytest.fixture
def bare(chat_tiny: Path, tmp_path: Path) -> Iterator[Server]:
    place = tmp_path / "bare"
    place.mkdir()
    (place / "dumps").mkdir(mode=0o700)
    server = start_server(chat_tiny, place, "--chunked-prefill-size", "64", "--no-capture")
    yield server
    stop_server(server.process)


def test_a_second_server_with_other_layers_is_refused_by_name(bench: Bench, other_layers: Server) -> None:
    rows = write_rows(bench.place / "rows.jsonl", token_rows(4))
    with pytest.raises(PreflightError) as caught:
        bench.run(replica_spec(bench, rows, other_layers))
    told = str(caught.value)
    name = "return_aux_hidden_state_layer_ids"
    assert f"{name} is [1, 3, 4] at {bench.server.url}, [1, 2, 4] at {other_layers.url}" in told
    failed = [c for c in bench.of("preflight")[0]["checks"] if not c["ok"]]
    assert {c["name"] for c in failed} == {"server settings", "layers", "layers captured"}
    assert all(other_layers.url in c["detail"] for c in failed)
    assert all(c["severity"] == "error" and c["effect"] and c["next"] for c in failed)
    assert not (bench.store / "manifest.json").exists()
    assert bench.server.traffic()["ours"] == other_layers.traffic()["ours"] == 0


def test_a_second_server_without_the_capture_is_refused(bench: Bench, bare: Server) -> None:
    rows = write_rows(bench.place / "rows.jsonl", token_rows(4))
    with pytest.raises(PreflightError, match=f"{bare.url}: no live process says"):
        bench.run(replica_spec(bench, rows, bare))


def test_an_attempt_records_every_server(bench: Bench, chat_tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "second"
    place.mkdir()
    second = start_server(chat_tiny, place, "--chunked-prefill-size", "128")
    try:
        rows = write_rows(bench.place / "rows.jsonl", token_rows(8))
        spec = replica_spec(bench, rows, second)
        spec["canary"] = 3
        result = bench.run(spec)
    finally:
        stop_server(second.process)
    assert (result.outcome, result.done) == ("complete", 8)
    (attempt,) = map(json.loads, (bench.store / "attempts.jsonl").read_text().splitlines())
    flags = attempt["server"]["flags"]
    assert flags["chunked_prefill_size"] == 64
    assert [(r["url"], r["chunked_prefill_size"]) for r in flags["replicas"]] == [(second.url, 128)]
    said = [c["detail"] for c in bench.of("preflight")[0]["checks"] if c["name"] == "chunks"]
    assert [text.split(": ")[0] for text in said] == [bench.server.url, second.url]


def test_what_the_servers_must_have_in_common() -> None:
    one = {
        "model_path": "/m",
        "dtype": "bfloat16",
        "version": "0.5.23",
        "weight_version": "default",
        "port": 1,
    }
    assert not differing(one, {**one, "port": 2, "max_running_requests": 8})
    for name, value in (
        ("weight_version", "v2"),
        ("dtype", "float32"),
        ("model_path", "/n"),
        ("version", "0.5.24"),
    ):
        assert differing(one, {**one, name: value}) == [(name, one[name], value)]


async def test_the_concurrency_is_divided_and_rounded_up(tmp_path: Path) -> None:
    replicas = tuple(Endpoint("http://127.0.0.1:9", str(tmp_path / name)) for name in "bc")
    source = SGLangSource(SourceSpec("http://127.0.0.1:9", str(tmp_path / "a"), replicas=replicas), 8)
    assert [e.limit for e in source.endpoints] == [3, 3, 3]
    assert [e.folder.name for e in source.endpoints] == ["a", "b", "c"]
    await source.aclose()
