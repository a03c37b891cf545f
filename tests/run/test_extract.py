"""The extraction loop against the small real server: complete, accounted, resumed, refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from engine.run.check import verify
from engine.store.store import read_index
from engine.wire.errors import (
    ConnectionFailed,
    DatasetError,
    IdentityError,
    LockedError,
    PreflightError,
    SpecError,
)
from engine.wire.ids import parse_rid
from tests.demo.harness import sabotage_lines, start_server, stop_server
from tests.run.conftest import Bench, token_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.tiny

KINDS = ("swap", "shift", "neighbour", "stale")


def check_accounting(bench: Bench) -> None:
    """done + quarantined + pending == dataset in each progress event; what waits for its shard is pending."""
    progress = bench.of("progress")
    assert len({e["done"] + e["quarantined"] + e["pending"] for e in progress}) == 1
    assert all(e["buffered"] <= e["pending"] for e in progress)


def test_every_row_is_taken_once_and_right(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(40))
    result = bench.run(bench.make_spec(dataset, retake_every=10))
    assert (result.outcome, result.done, result.quarantined, result.pending) == ("complete", 40, 0, 0)
    check_accounting(bench)
    index, _ = read_index(bench.store)
    assert sorted(index) == list(range(40))
    for row, line in index.items():
        name = parse_rid(line.rid)
        assert name is not None
        assert (name.run, name.row) == ("t", row)
        assert line.evidence["kind"] == "recompute"
        assert line.evidence["value"] < 1e-4
    assert sum("retake" in line.evidence for line in index.values()) == 4
    report, verified = verify(bench.store, recompute=0)
    assert not report.bad
    assert verified is not None
    assert verified["samples"] == 40
    assert verified["min_cosine"] >= 0.9999
    kinds = [e["type"] for e in bench.events]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
    assert len(bench.of("sample_done")) == 40
    assert bench.of("mismatch") == []
    assert bench.of("preflight")[0]["estimate"]["tokens"] == result.tokens
    assert bench.of("canary")[0]["failed"] == {}
    assert not list(bench.server.folder.glob("hsx-*"))


def test_win_rate_evidence_takes_undecided_samples_again(bench: Bench) -> None:
    """A random model predicts nothing, so the win rate decides nothing and every sample is taken twice."""
    dataset = write_rows(bench.place / "d.jsonl", token_rows(6, longest=30))
    result = bench.run(bench.make_spec(dataset, evidence="win_rate", canary=0))
    index, _ = read_index(bench.store)
    short = [row for row, line in index.items() if line.n_tokens <= 2]
    assert result.done >= len(short) > 0
    assert all(index[row].evidence["kind"] == "retake" for row in short)
    assert result.done + result.quarantined == 6


@pytest.mark.parametrize("kind", KINDS)
def test_every_sabotaged_dump_is_refused_and_taken_again(
    sabotaged: Callable[[str], Bench], kind: str
) -> None:
    bench = sabotaged(kind)
    dataset = write_rows(bench.place / "d.jsonl", token_rows(40))
    result = bench.run(bench.make_spec(dataset))
    truth = {line["rid"] for line in sabotage_lines(bench.server.sabotage_log)}
    refused = {e["rid"]: e for e in bench.of("mismatch")}
    assert len(truth) >= 5
    assert set(refused) == truth
    assert all(e["outcome"] == "retried" for e in refused.values())
    assert (result.outcome, result.done, result.quarantined) == ("complete", 40, 0)
    report, verified = verify(bench.store, recompute=0)
    assert not report.bad
    assert verified is not None
    assert verified["min_cosine"] >= 0.9999
    index, _ = read_index(bench.store)
    assert not truth & {line.rid for line in index.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_wrong_ends_in_quarantine(sabotaged: Callable[[str], Bench], kind: str) -> None:
    bench = sabotaged(f"{kind}:always")
    dataset = write_rows(bench.place / "d.jsonl", token_rows(30))
    result = bench.run(bench.make_spec(dataset, retake_every=0, canary=0))
    truth = {line["row"] for line in sabotage_lines(bench.server.sabotage_log)}
    index, _ = read_index(bench.store)
    assert result.quarantined > 0
    assert result.done + result.quarantined == 30
    set_aside = {int(p.stem) for p in (bench.store / "quarantine").glob("*.json")}
    assert set_aside <= truth
    assert not set_aside & set(index)
    report, verified = verify(bench.store, recompute=0)
    assert not report.bad
    assert report.quarantined == len(set_aside)
    assert verified is not None
    assert verified["min_cosine"] >= 0.9999
    # a resume leaves them where they are
    again = bench.run(bench.make_spec(dataset, retake_every=0, canary=0), attempt=2)
    assert (again.done, again.quarantined) == (result.done, result.quarantined)


def test_a_graceful_stop_loses_nothing_and_the_resume_goes_on(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(60))
    spec = bench.make_spec(dataset, shard_bytes=50_000)
    first = bench.run(spec, stop_after=10)
    assert first.outcome == "aborted"
    assert 10 <= first.done < 60
    before, _ = read_index(bench.store)
    second = bench.run(spec, attempt=2)
    assert (second.outcome, second.done) == ("complete", 60)
    after, _ = read_index(bench.store)
    assert {r: line.rid for r, line in before.items()} == {r: after[r].rid for r in before}
    assert [e["attempt"] for e in bench.of("run_started")] == [1, 2]
    attempts = (bench.store / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 2
    assert not verify(bench.store)[0].bad
    third = bench.run(spec, attempt=3)
    assert (third.outcome, third.done, third.tok_per_s) == ("complete", 60, 0.0)


def test_a_dump_left_behind_is_never_taken(bench: Bench) -> None:
    """An earlier attempt's dump of the same name, with right ids and other states, is removed unread."""
    dataset = write_rows(bench.place / "d.jsonl", token_rows(6))
    ids = token_rows(6)[5]["input_ids"]
    bench.server.generate("hsx-t-00000005-01_", ids)
    bench.server.dump("hsx-t-00000005-01_")
    result = bench.run(bench.make_spec(dataset))
    assert (result.done, result.pending) == (6, 0)
    assert any("removed unread" in e["text"] for e in bench.of("warning"))


def test_a_dump_of_huge_values_is_refused_and_does_not_end_the_run(bench: Bench) -> None:
    """Uninitialised memory is finite: its error overflows, and the evidence must still be written."""
    import torch

    from engine.capture.evidence import judge
    from engine.wire.events import encode

    states, truth = torch.full((3, 4), 1e30), torch.ones(3, 4)
    value, wrong = judge(states, truth, "float32")
    assert wrong is not None
    assert value > 1e9
    assert encode(1, "mismatch", {"evidence": wrong.to_json()})


def test_an_error_in_the_middle_keeps_what_was_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be read ends the run; the samples before it are durable all the same."""
    from engine.dataset.samples import Samples

    real = Samples.sample

    def sample(self: Samples, row: int) -> Any:
        if row == 20 and not counting:
            raise DatasetError("row 20 is gone", "somebody cut the file", "restore it")
        return real(self, row)

    counting: list[bool] = [True]
    real_count = Samples.count

    def count(self: Samples) -> Any:
        try:
            return real_count(self)
        finally:
            counting.clear()

    monkeypatch.setattr(Samples, "sample", sample)
    monkeypatch.setattr(Samples, "count", count)
    dataset = write_rows(bench.place / "d.jsonl", token_rows(40))
    with pytest.raises(DatasetError, match="row 20 is gone"):
        bench.run(bench.make_spec(dataset, shard_bytes=1 << 30, canary=0))
    done, _ = read_index(bench.store)
    assert len(done) >= 10
    assert bench.events[-1]["type"] == "run_finished"


def test_a_shard_is_written_when_it_is_old_enough_though_nothing_comes(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(30))
    result = bench.run(bench.make_spec(dataset, shard_bytes=1 << 30, shard_seconds=0.0))
    assert result.done == 30
    assert len(bench.of("shard_committed")) > 3


def test_a_stop_before_the_extraction_is_an_abort(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(5))
    spec = bench.make_spec(dataset)
    result = bench.run(spec, stop_after=0)
    assert result.outcome in ("aborted", "complete")
    assert bench.run(spec, attempt=2).done == 5


def test_a_server_that_dies_is_waited_for(bench: Bench, chat_tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "mortal"
    place.mkdir()
    server = start_server(chat_tiny, place, "--chunked-prefill-size", "64")
    mine = Bench(tmp_path, server, chat_tiny)
    dataset = write_rows(tmp_path / "d.jsonl", token_rows(60))
    spec = mine.make_spec(dataset, shard_bytes=50_000)
    port = server.url.rsplit(":", 1)[1]
    revived: list[Any] = []

    def kill_and_revive() -> None:
        while not (tmp_path / "run" / "events.jsonl").exists() or not any(
            e["type"] == "sample_done" for e in mine.events
        ):
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        (place / "port").unlink()
        revived.append(start_server(chat_tiny, place, "--chunked-prefill-size", "64", "--port", port))

    thread = threading.Thread(target=kill_and_revive)
    thread.start()
    try:
        result = mine.run(spec)
        thread.join(60)
    finally:
        for s in revived:
            stop_server(s.process)
    assert (result.outcome, result.done) == ("complete", 60)
    assert mine.of("paused")
    assert mine.of("resumed")
    assert not verify(mine.store)[0].bad


def good(bench: Bench) -> Path:
    return write_rows(bench.place / "d.jsonl", token_rows(3))


def test_another_identity_is_refused(bench: Bench) -> None:
    bench.run(bench.make_spec(good(bench)))
    other = write_rows(bench.place / "e.jsonl", token_rows(4))
    before = {p: p.read_bytes() for p in bench.store.rglob("*") if p.is_file()}
    with pytest.raises(IdentityError, match=r"dataset\.rows: the store has 3, this run has 4"):
        bench.run(bench.make_spec(other), attempt=2)
    assert {p: p.read_bytes() for p in bench.store.rglob("*") if p.is_file()} == before


def test_two_runs_on_one_store(bench: Bench) -> None:
    from engine.run.output import hold_output

    with hold_output(bench.store, supervised=False), pytest.raises(LockedError, match="is in use"):
        bench.run(bench.make_spec(good(bench)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dataset": {"max_tokens": 64}}, r"lengths: 1 rows are longer than 64 tokens .*4 \(65\)"),
        ({"target": {"taps": [1, 3]}}, "layers, layers captured: taps .1, 3., the server captures .1, 3, 4."),
        ({"source": {"dump_dir": "/nowhere/at/all"}}, "capture: the dump folder cannot be used"),
    ],
)
def test_preflight_refuses(bench: Bench, changes: dict[str, Any], match: str) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(5))
    with pytest.raises(PreflightError, match=match) as caught:
        bench.run(bench.make_spec(dataset, **changes))
    assert caught.value.next_step
    assert bench.events[-1]["outcome"] == "failed"
    assert not bench.store.joinpath("manifest.json").exists()
    assert bench.run(bench.make_spec(dataset), attempt=2).done == 5  # corrected, the same store is used


def test_over_long_rows_can_be_set_aside_instead(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(5))
    result = bench.run(bench.make_spec(dataset, dataset={"max_tokens": 64, "over_long": "quarantine"}))
    assert (result.outcome, result.done, result.quarantined) == ("complete", 4, 1)
    assert bench.of("quarantined")[0]["cause"] == "truncated_input"


def test_an_empty_loss_mask_is_refused(bench: Bench) -> None:
    rows = [*token_rows(2), {"messages": [{"role": "user", "content": "Hi"}]}]
    with pytest.raises(PreflightError, match="1 rows have no supervised token: 2"):
        bench.run(bench.make_spec(write_rows(bench.place / "d.jsonl", rows)))


def test_bad_datasets_and_specs_are_refused_before_anything_is_written(bench: Bench) -> None:
    bad: list[tuple[list[dict[str, Any]], str]] = [([], "is empty"), ([{"messages": []}], "row 0")]
    for rows, match in bad:
        with pytest.raises(DatasetError, match=match):
            bench.run(bench.make_spec(write_rows(bench.place / "d.jsonl", rows)))
    assert not (bench.store / "manifest.json").exists()
    for changes, match in (
        ({"concurrency": 0}, "concurrency"),
        ({"target": {"taps": [3, 1]}}, "taps"),
        ({"colour": "red"}, "unknown keys: colour"),
    ):
        with pytest.raises(SpecError, match=match):
            bench.run(bench.make_spec(good(bench), **changes))


def test_no_server(bench: Bench) -> None:
    with pytest.raises(ConnectionFailed, match="does not answer /server_info"):
        bench.run(bench.make_spec(good(bench), source={"url": "http://127.0.0.1:9"}))
