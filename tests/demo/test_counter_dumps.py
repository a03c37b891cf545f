"""The small server as a patched one: a numbered folder for everything that it forwards, and its bounds."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.capture.legacy_folder import LegacyFolder, Scan
from engine.demo import counter_dumps
from engine.demo.attention import Segment
from engine.demo.counter_dumps import CounterDumps, parse_layout
from engine.demo.requests import Request, Sampling
from engine.demo.tiny import HIDDEN
from engine.wire.errors import UsageError
from tests.demo.harness import Lone, Server, row_errors, start_server, stop_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def patched(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("patched")
    flags = ("--dump-mode", "counter", "--dump-ids", "--chunked-prefill-size", "64")
    running = start_server(tiny, place, *flags)
    yield running
    stop_server(running.process)


def landed(server: Server, least: int) -> Scan:
    """What lies there, once so many are whole."""
    folder = LegacyFolder(server.folder)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        whole = {n: s for n, s in folder.scan().items() if "done" in s.files}
        if len(whole) >= least:
            return whole
        time.sleep(0.02)
    raise AssertionError("they did not land")


@pytest.mark.tiny
def test_everything_that_is_forwarded_has_a_number(patched: Server, lone: Lone) -> None:
    folder = LegacyFolder(patched.folder)
    metas = [folder.meta(s) for _, s in sorted(landed(patched, 8).items())]
    assert [(m.num_tokens, m.mode) for m in metas] == [(3, "extend")] + [(1, "decode")] * 7, "the warm-up"
    assert patched.get("/health").status_code == 200
    ids = [5 + 3 * i for i in range(100)]
    answer = patched.generate("hsx-t-00000000-01_", ids, new=2).json()
    assert "hsx" not in answer["meta_info"], "a patched server names no dump"
    scan = landed(patched, 12)
    assert sorted(scan) == list(range(12))
    after = [folder.meta(scan[n]) for n in range(8, 12)]
    assert [(m.num_tokens, m.mode) for m in after] == [
        (1, "extend"),
        (64, "extend"),
        (36, "extend"),
        (1, "decode"),
    ]
    assert after[1].input_ids == tuple(ids[:64])
    assert after[2].input_ids == tuple(ids[64:])
    assert all(m.rid is None for m in after)
    truth = lone.states(ids)
    first, second = folder.read(scan[9]), folder.read(scan[10])
    assert first.final is not None and second.final is not None
    assert float(row_errors(torch.cat([first.final, second.final]), truth.last).max()) < 1e-4
    for k, tap in enumerate(truth.taps.values()):
        assert float(row_errors(torch.cat([first.aux[k], second.aux[k]]), tap).max()) < 1e-4


@pytest.mark.parametrize(
    "text", ["", "json", "pt+safetensors", "pt+nothing", "pt+no-meta", "single", "pt,single", "pt+"]
)
def test_a_wrong_layout_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--dump-layout"):
        parse_layout(text, False)


def request_of(ids: list[int]) -> Request:
    return Request("somebody", 1, ids, Sampling(), lambda r: None)


def forward(writer: CounterDumps, ids: list[int]) -> None:
    rows = torch.ones(len(ids), 3 * HIDDEN)
    segment = Segment(request_of(ids), 0, len(ids), 0, True, None)
    writer.take([segment], rows, torch.tensor(ids))


def make(folder: Path, **more: Any) -> CounterDumps:
    writer = CounterDumps(folder, 1, HIDDEN, parse_layout("pt", False), **more)
    writer.start()
    return writer


def numbers(folder: Path) -> list[int]:
    return sorted(int(p.name[4:]) for p in folder.iterdir())


def test_a_new_process_counts_from_0_over_what_lies_there(tmp_path: Path) -> None:
    for tokens in (9, 4):
        writer = make(tmp_path / "d")
        for k in range(3 if tokens == 9 else 1):
            forward(writer, [k] * tokens)
        assert writer.close()
    metas = {n: json.loads((tmp_path / "d" / f"req_{n}" / "meta.json").read_bytes()) for n in range(3)}
    assert [m["num_tokens"] for m in metas.values()] == [4, 9, 9]


def test_some_land_late_and_the_same_ones_for_the_same_seed(tmp_path: Path) -> None:
    delays = []
    for seed in (5, 5, 6):
        writer = CounterDumps(tmp_path, 1, HIDDEN, parse_layout("pt", False), late_s=300.0, seed=seed)
        prompts = [Segment(request_of([k, k + 1]), 0, 2, 0, True, None) for k in range(200)]
        delays.append([writer._delay(s) for s in prompts])
        assert 300.0 not in [writer._delay(s) for s in prompts], "late only when a prompt comes first"
    assert delays[0] == delays[1] != delays[2]
    assert 5 <= delays[0].count(300.0) <= 40
    assert any(0 < d < 1 for d in delays[0]), "some are slow"


def test_what_is_late_is_written_at_the_end(tmp_path: Path) -> None:
    writer = make(tmp_path / "d", late_s=300.0, seed=5)
    for k in range(60):
        forward(writer, [k, k + 1])
    assert writer.close()
    assert numbers(tmp_path / "d") == list(range(60))


def test_nothing_is_written_to_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make(tmp_path / "d")
    monkeypatch.setattr(counter_dumps, "FREE_FLOOR_BYTES", 1 << 60)
    forward(writer, [1, 2])
    assert writer.close()
    assert numbers(tmp_path / "d") == []


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_dumps, "MOST_BYTES", 5 * 2 * 2 * HIDDEN * 4)
    writer = make(tmp_path / "d")
    for k in range(12):
        forward(writer, [k, k + 1])
    assert writer.close()
    assert numbers(tmp_path / "d") == list(range(7, 12))
