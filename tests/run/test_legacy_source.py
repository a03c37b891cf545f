"""Runs from a server that writes counter-numbered dumps: nothing is credited to the wrong sample."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.dataset.samples import Counted
from engine.run.check import verify
from engine.run.preflight_counter import counter_checks
from engine.sources.legacy import LegacySource
from engine.sources.protocol import SourceFacts
from engine.store.aside import rows_aside
from engine.store.identity import read_manifest
from engine.store.store import read_index
from engine.wire.errors import PreflightError, UsageError
from engine.wire.spec import extract_from_json
from tests.demo.harness import Server, start_server, stop_server
from tests.run.conftest import Bench, token_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.capture.legacy_folder import Seen
    from engine.capture.legacy_match import Window
    from engine.capture.states import Finding

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(400)]

COUNTER = ("--dump-mode", "counter", "--chunked-prefill-size", "64")


@pytest.fixture(scope="module")
def counter_server(chat_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Dumps without ids, none late, chunks of 64."""
    running = start_server(chat_tiny, tmp_path_factory.mktemp("counter"), *COUNTER)
    yield running
    stop_server(running.process)


@pytest.fixture
def counted(tmp_path: Path, counter_server: Server, chat_tiny: Path) -> Bench:
    return Bench(tmp_path, counter_server, chat_tiny)


@pytest.fixture
def started(tmp_path: Path, chat_tiny: Path) -> Iterator[Callable[..., Bench]]:
    """Servers with flags of their own; called again, the server before is ended and begins anew in its
    place."""
    running: list[Server] = []

    def start(*flags: str) -> Bench:
        place = tmp_path / "server"
        place.mkdir(exist_ok=True)
        if running:
            stop_server(running.pop().process)
            (place / "port").unlink()
        running.append(start_server(chat_tiny, place, *COUNTER, *flags))
        return Bench(tmp_path, running[-1], chat_tiny)

    yield start
    for server in running:
        stop_server(server.process)


def same_length(count: int, n: int) -> list[dict[str, Any]]:
    """Rows that a count cannot tell apart."""
    return [
        {"input_ids": [20 + (7919 * (row + 1) + 104729 * i) % 40000 for i in range(n)]}
        for row in range(count)
    ]


def spec_of(bench: Bench, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    source = {"dump_mode": "counter", **changes.pop("source", {})}
    target = {"last": "post", **changes.pop("target", {})}
    dataset = write_rows(bench.place / "d.jsonl", rows)
    return bench.make_spec(dataset, source=source, target=target, retake_every=10, **changes)


def all_right(bench: Bench, done: int) -> None:
    """Every stored sample is what a lone forward of transformers gives for its own ids."""
    report, verified = verify(bench.store, recompute=0)
    assert not report.bad
    assert verified is not None
    assert (verified["samples"], report.done) == (done, done)
    assert verified["min_cosine"] > 0.9999


def causes(bench: Bench) -> Counter[str]:
    return Counter(e["cause"] for e in bench.of("mismatch"))


class Meddled(LegacySource):
    """``meddle(source, name, ids)`` is called while a request is in flight, in a thread, after it was
    answered."""

    meddle: Callable[[Meddled, str, tuple[int, ...]], None]

    async def _send(self, name: str, ids: tuple[int, ...]) -> Finding | str | None:
        reply = await super()._send(name, ids)
        await asyncio.to_thread(type(self).meddle, self, name, ids)
        return reply


def meddling(
    monkeypatch: pytest.MonkeyPatch, meddle: Callable[[Meddled, str, tuple[int, ...]], None], wait_s: float
) -> None:
    monkeypatch.setattr(Meddled, "meddle", staticmethod(meddle), raising=False)
    monkeypatch.setattr("engine.run.job.open_source", lambda spec: Meddled(spec, wait_s))


@contextlib.contextmanager
def foreign_traffic(server: Server, longest: int) -> Iterator[list[int]]:
    """Others' requests of up to ``longest`` tokens with decode steps, and health checks."""
    stop, sent = threading.Event(), [0]

    def ask(seed: int) -> None:
        turn = seed
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                turn += 1
                ids = [7 + (31 * turn * (i + 1)) % 40000 for i in range(1 + (turn * 13) % longest)]
                params = {"max_new_tokens": 1 + turn % 5, "temperature": 0, "ignore_eos": True}
                client.post(
                    "/generate",
                    json={"rid": f"other-{turn}-{seed}", "input_ids": ids, "sampling_params": params},
                )
                if turn % 7 == 0:
                    client.get("/health")
                sent[0] += 1
                stop.wait(0.15)  # a crowd without a gap has a request of every length at all times

    threads = [threading.Thread(target=ask, args=(1000 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_by_count_beside_foreign_traffic(counted: Bench) -> None:
    rows = token_rows(24, longest=40)
    with foreign_traffic(counted.server, 40) as sent:
        result = counted.run(spec_of(counted, rows, attempts=8))
    assert sent[0] > 30
    assert (result.pending, result.server["attribution"]) == (0, "count")
    manifest = read_manifest(counted.store)
    assert manifest is not None
    assert (manifest["attribution"], manifest["last"]) == ("count", "post")
    assert result.done >= 19
    all_right(counted, result.done)
    seen = causes(counted)
    assert seen["decode_step"] and seen["foreign"], seen
    assert 4 in rows_aside(counted.store), "65 tokens in chunks of 64"
    checks = {c["name"]: c for e in counted.of("preflight") for c in e["checks"]}
    assert "by count" in checks["attribution"]["detail"]
    assert "4 (65)" in checks["chunks"]["detail"]
    assert {c["name"] for c in checks.values()}.isdisjoint({"capture"})


def test_alone_on_the_server_every_row_is_taken_at_once(counted: Bench) -> None:
    rows = same_length(12, 30)
    left = len(list(counted.server.folder.iterdir()))
    result = counted.run(spec_of(counted, rows))
    assert (result.done, result.quarantined) == (12, 0)
    all_right(counted, 12)
    assert counted.of("mismatch") == []
    assert len(list(counted.server.folder.iterdir())) <= left, "what was taken is removed"
    index, _ = read_index(counted.store)
    assert all(line.attempts == 1 for line in index.values())


def test_without_ids_chunks_are_never_joined(counted: Bench) -> None:
    result = counted.run(spec_of(counted, same_length(3, 150) + same_length(4, 20)))
    assert (result.done, result.quarantined) == (4, 3)
    all_right(counted, 4)
    found = [(e["row"], e["cause"], e["got"], e["expected"], e["outcome"]) for e in counted.of("mismatch")]
    assert found == [(row, "partial_chunk", 64, 150, "quarantined") for row in range(3)]
    assert sorted(rows_aside(counted.store)) == [0, 1, 2]


@pytest.mark.parametrize("layout", ["pt", "safetensors+single+no-meta+no-mode"])
def test_ids_join_chunks_and_prove_every_row(started: Callable[..., Bench], layout: str) -> None:
    bench = started("--dump-ids", "--dump-layout", layout)
    with foreign_traffic(bench.server, 90):
        result = bench.run(spec_of(bench, token_rows(30), canary=0))  # no canary is needed with ids
    assert (result.done, result.server["attribution"]) == (30, "token_ids")
    all_right(bench, 30)


def test_by_count_the_canary_is_mandatory(counted: Bench) -> None:
    with pytest.raises(PreflightError, match="attribution by count needs the canary"):
        counted.run(spec_of(counted, same_length(3, 20), canary=0))
    assert read_manifest(counted.store) is None


def test_what_a_dump_lacks_is_said_before_the_run(started: Callable[..., Bench]) -> None:
    bench = started("--dump-layout", "pt+no-final")
    rows = same_length(4, 20)
    for last, words in (("post", "no final state"), ("pre", "before the final norm")):
        with pytest.raises(PreflightError, match=words):
            bench.run(spec_of(bench, rows, target={"last": last}))
    assert bench.run(spec_of(bench, rows, target={"last": None})).done == 4
    all_right(bench, 4)


def test_a_folder_into_which_nothing_comes_is_said_before_the_run(counted: Bench, tmp_path: Path) -> None:
    rows = same_length(3, 20)
    with pytest.raises(PreflightError, match="is dump_dir right"):
        counted.run(spec_of(counted, rows, source={"dump_dir": str(tmp_path / "none")}))
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(PreflightError, match="is it the server's folder"):
        counted.run(spec_of(counted, rows, source={"dump_dir": str(tmp_path / "empty")}))


def test_one_run_at_a_time_and_no_replicas(counted: Bench) -> None:
    spec = spec_of(counted, same_length(3, 20))
    other = LegacySource(extract_from_json(spec))
    other.folder.hold()
    try:
        with pytest.raises(PreflightError, match="another run reads"):
            counted.run(spec)
    finally:
        asyncio.run(other.aclose())
    spec["source"]["replicas"] = [{"url": "http://127.0.0.1:9", "dump_dir": str(counted.place)}]
    with pytest.raises(UsageError, match="a run of its own"):
        counted.run(spec)


def test_two_equal_lengths_are_sent_again(counted: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real request of somebody with as many tokens is answered while ours is in flight."""

    def twin(source: Meddled, name: str, ids: tuple[int, ...]) -> None:
        if name.endswith("-01_"):
            counted.server.generate(f"other-{name}", [9 + 3 * i for i in range(len(ids))])

    meddling(monkeypatch, twin, 5.0)
    result = counted.run(spec_of(counted, same_length(6, 30)))
    assert (result.done, result.quarantined) == (6, 0)
    all_right(counted, 6)
    found = [e for e in counted.of("mismatch") if e["got"] == "2 dumps of 30 tokens"]
    assert sorted(e["row"] for e in found) == list(range(6))
    assert {(e["cause"], e["outcome"]) for e in found} == {("foreign", "retried")}


def test_a_stranger_s_dump_in_place_of_ours_is_refused_by_its_numbers(
    counted: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours never lands, and the only new dump of that length is somebody else's: only content can tell."""

    def replace(source: Meddled, name: str, ids: tuple[int, ...]) -> None:
        if not name.endswith("-01_"):
            return
        folder = counted.server.folder
        while not (ours := newest(folder, len(ids))):
            continue
        shutil.rmtree(ours)
        counted.server.generate(f"other-{name}", [9 + 3 * i for i in range(len(ids))])

    def newest(folder: Path, n: int) -> Path | None:
        done = [p.parent for p in folder.glob("req_*/done")]
        fit = [p for p in done if f'"num_tokens": {n},' in (p / "meta.json").read_text()]
        return max(fit, key=lambda p: int(p.name[4:]), default=None)

    for path in counted.server.folder.iterdir():
        shutil.rmtree(path)
    meddling(monkeypatch, replace, 5.0)
    rows = [same_length(5, 31 + k)[k] for k in range(5)]  # a length that is owed would be doubted
    result = counted.run(spec_of(counted, rows))
    assert (result.done, result.quarantined) == (5, 0)
    all_right(counted, 5)
    refused = [e for e in counted.of("mismatch") if e["evidence"].get("kind") == "recompute"]
    assert sorted(e["row"] for e in refused) == list(range(5)), "a stranger's states passed"


def test_a_stranger_s_dump_of_a_lower_number_is_not_taken_first(
    counted: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger's dump is whole when our answer is there. Ours, of the next number, has not begun: it is
    put into its place once the source has looked at the folder and found the stranger's alone."""
    folder = counted.server.folder
    held: list[Path] = []
    alone: list[str] = []

    class Held(LegacySource):
        async def _send(self, name: str, ids: tuple[int, ...]) -> Finding | str | None:
            if not name.endswith("-01_"):
                return await super()._send(name, ids)
            strangers = [9 + 3 * i for i in range(len(ids))]
            await asyncio.to_thread(counted.server.generate, f"other-{name}", strangers)
            reply = await super()._send(name, ids)
            await asyncio.to_thread(self.hold_back, len(ids))
            return reply

        def hold_back(self, n: int) -> None:
            while len(fit := [s for s in self.folder.scan().values() if self.whole(s, n)]) < 2:
                continue
            ours = folder / max(fit, key=lambda s: s.number).name
            held.append(ours.rename(folder / f"held_{ours.name}"))

        def whole(self, seen: Seen, n: int) -> bool:
            piece = self._piece(seen) if seen.number > self._top else None
            return piece is not None and piece.tokens == n

        def _window(self, *args: Any) -> Window:
            window = super()._window(*args)
            if held:
                alone.extend(p.name for p in window.pieces if p.tokens >= 30)
                ours = held.pop()
                ours.rename(folder / ours.name.removeprefix("held_"))
            return window

    for path in folder.iterdir():
        shutil.rmtree(path)
    monkeypatch.setattr("engine.run.job.open_source", lambda spec: Held(spec, 5.0))
    rows = [same_length(4, 30 + k)[k] for k in range(4)]
    result = counted.run(spec_of(counted, rows))
    assert (result.done, result.quarantined) == (4, 0)
    all_right(counted, 4)
    assert len(alone) == 4, "the stranger's dump did not stand alone"
    refused = {(e["row"], e["cause"], e["got"]) for e in counted.of("mismatch") if e["got"] != 30 + e["row"]}
    assert refused == {(k, "foreign", f"2 dumps of {30 + k} tokens") for k in range(4)}
    assert not [e for e in counted.of("mismatch") if e["evidence"].get("kind") == "recompute"]


def test_a_dump_that_may_be_of_the_row_before_is_not_the_next_row_s(
    counted: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are on the server, so what was taken by count may have been theirs: the real dump of that row is
    held back until the next row of that length is in flight, whose own dump is lost."""
    folder = counted.server.folder
    held: list[Path] = []

    def newest(n: int) -> Path:
        while True:
            done = [p.parent for p in folder.glob("req_*/done")]
            fit = [p for p in done if f'"num_tokens": {n},' in (p / "meta.json").read_text()]
            if fit:
                return max(fit, key=lambda p: int(p.name[4:]))

    def meddle(source: Meddled, name: str, ids: tuple[int, ...]) -> None:
        if name == "hsx-t-00000000-01_":
            ours = newest(len(ids))
            held.append(ours.rename(folder / f"held_{ours.name}"))
            counted.server.generate(f"other-{name}", [9 + 3 * i for i in range(len(ids))], new=3)
        elif held and name == "hsx-t-00000001-01_":
            shutil.rmtree(newest(len(ids)))
            ours = held.pop()
            number = source._top + 5  # as high as one that had not begun
            ours.rename(folder / f"req_{number}")

    for path in folder.iterdir():
        shutil.rmtree(path)
    meddling(monkeypatch, meddle, 5.0)
    result = counted.run(spec_of(counted, same_length(3, 32), concurrency=1))
    assert (result.done, result.quarantined) == (3, 0)
    all_right(counted, 3)
    assert not held, "the second row was not asked for"
    late = [e for e in counted.of("mismatch") if "may be the late dump" in str(e["evidence"].get("why"))]
    assert 1 in {e["row"] for e in late}
    wrong = [e["row"] for e in counted.of("mismatch") if e["evidence"].get("kind") == "recompute"]
    assert wrong == [0], "only the stranger's states came as far as the evidence"


def win_rate_spec(bench: Bench) -> dict[str, Any]:
    return spec_of(bench, same_length(3, 20), evidence="win_rate")


def test_the_win_rate_does_not_do_where_a_dump_may_be_a_part(counted: Bench) -> None:
    with pytest.raises(PreflightError, match=r"chunks of 64 tokens, and the evidence is win_rate") as refused:
        counted.run(win_rate_spec(counted))
    assert "evidence = recompute" in str(refused.value.next_step)
    assert read_manifest(counted.store) is None


@pytest.mark.parametrize(
    ("radix_off", "size", "words"),
    [
        (True, -1, ""),
        (False, -1, "the prefix cache is on"),
        (None, -1, "the prefix cache is on"),
        (True, 64, "chunks of 64"),
        (True, None, "does not say its chunk"),
    ],
)
def test_parts_of_others_are_judged_by_the_settings(
    tmp_path: Path, radix_off: bool | None, size: int | None, words: str
) -> None:
    flags = {"disable_radix_cache": radix_off, "chunked_prefill_size": size, "attribution": "token_ids"}
    facts = SourceFacts("m", "float32", "0.5.23", None, 0, flags=flags)
    plain = {
        "run": "t", "store": str(tmp_path), "dataset": {"path": "d"}, "target": {"model": "m", "taps": [0]},
        "source": {"url": "http://127.0.0.1:9", "dump_dir": "/dumps", "dump_mode": "counter"},
    }  # fmt: skip
    for evidence in ("win_rate", "recompute"):
        spec = extract_from_json({**plain, "evidence": evidence})
        checks = {c.name: c for c in counter_checks(spec, facts, Counted({0: 20}, {0: 20}))}
        check = checks["parts of others' prompts"]
        assert words in check.detail
        assert check.ok is (evidence == "recompute" or not words), check.line()
        assert "every request of ours has an extra_key" not in check.detail


def test_a_dump_that_lands_after_the_deadline_is_nobody_s(
    started: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows have one length, so a late dump would fit every later sample."""
    bench = started("--dump-late", "1.5")
    monkeypatch.setattr("engine.run.job.open_source", lambda spec: LegacySource(spec, wait_s=0.6))
    result = bench.run(spec_of(bench, same_length(40, 30), attempts=6))
    assert (result.done, result.quarantined) == (40, 0)
    all_right(bench, 40)
    assert causes(bench)["late"] >= 1


def test_leftovers_of_the_server_s_earlier_life_are_nobody_s(started: Callable[..., Bench]) -> None:
    """The counter begins at 0 again, over real dumps of the same length."""
    bench = started()
    for k in range(40):
        bench.server.generate(f"other-{k}", [11 + k + 3 * i for i in range(30)], new=2)
    before = {p.name for p in bench.server.folder.iterdir()}
    assert len(before) >= 80
    again = started()
    result = again.run(spec_of(again, same_length(12, 30)))
    assert (result.done, result.quarantined) == (12, 0)
    all_right(again, 12)
    stale = [e for e in again.of("mismatch") if e["cause"] == "stale"]
    assert stale
    assert {e["expected"] for e in stale} == {30}
    assert {e["got"] for e in stale} <= {1, 30}


def test_a_server_that_begins_anew_in_the_middle_is_noticed(
    started: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are small again; they are not taken for late ones for ever."""
    bench = started()
    for k in range(30):
        bench.server.generate(f"other-{k}", [11 + k + 3 * i for i in range(9)], new=2)

    def restart(source: Meddled, name: str, ids: tuple[int, ...]) -> None:
        if name == "hsx-t-00000003-01_":
            started("--port", bench.server.url.rpartition(":")[2])

    meddling(monkeypatch, restart, 1.0)
    result = bench.run(spec_of(bench, same_length(8, 30)))
    assert (result.done, result.quarantined) == (8, 0)
    all_right(bench, 8)
    log = bench.server.log.read_text()
    assert "fired up" in log, "the second server did not begin"
