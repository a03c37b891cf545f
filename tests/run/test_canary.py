"""The canary: which rows it takes, that it sees what one sample alone does not show, and when it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from engine.capture.states import Finding, States
from engine.dataset.samples import Samples
from engine.dataset.tokens import Sample, Tokens
from engine.run.canary import COMPANY, LONE, TWIN, BesideStrangers, CanaryResult, refuse_if_failed, run_canary
from engine.run.canary_rows import (
    FOREIGN,
    LONGEST,
    SEARCHED,
    Chosen,
    choose,
    foreign_prompts,
    longest_shared_prefix,
)
from engine.run.validate import Validator
from engine.sources.sglang import SGLangSource
from engine.targets.lowest import LowestLayers
from engine.wire.causes import Cause
from engine.wire.errors import ConnectionFailed, PreflightError
from engine.wire.spec import extract_from_json
from tests.models import TINY_TAPS
from tests.run.conftest import Bench, token_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from pathlib import Path

    from engine.sources.protocol import Ask, Taken


def sample(row: int, *ids: int) -> Sample:
    return Sample(row, None, ids, (1,) * len(ids))


def samples_of(model: Path, place: Path, rows: list[dict[str, Any]]) -> Samples:
    return Samples(str(write_rows(place / "rows.jsonl", rows)), Tokens(str(model), False))


# Which rows


@pytest.mark.tiny
def test_it_takes_the_shortest_the_longest_and_the_two_that_begin_alike(
    chat_tiny: Path, tmp_path: Path
) -> None:
    rows = token_rows(40)
    rows[20] = {"input_ids": [*rows[30]["input_ids"][:17], 4, 4, 4]}
    samples = samples_of(chat_tiny, tmp_path, rows)
    counted = samples.count()
    chosen = choose(samples, counted, range(40), 3)
    longest = max(range(40), key=lambda r: (counted.n_tokens[r], r))
    assert [s.row for s in chosen.samples] == sorted({0, 20, 30, longest}, key=lambda r: counted.n_tokens[r])
    assert (chosen.shared, chosen.prefix, chosen.twice) == ((20, 30), 17, longest)


@pytest.mark.tiny
@pytest.mark.parametrize(("number", "want"), [(0, 0), (1, 1), (2, 2), (3, 3), (5, 5), (90, 12)])
def test_so_many_rows_are_taken_where_no_two_begin_alike(
    chat_tiny: Path, tmp_path: Path, number: int, want: int
) -> None:
    samples = samples_of(chat_tiny, tmp_path, token_rows(12))
    chosen = choose(samples, samples.count(), range(12), number)
    assert len({s.row for s in chosen.samples}) == len(chosen.samples) == want
    assert chosen.shared == ()
    assert choose(samples, samples.count(), [], number) == Chosen(())


@pytest.mark.tiny
def test_a_row_that_is_done_is_not_taken_nor_one_that_is_too_long(chat_tiny: Path, tmp_path: Path) -> None:
    rows = [*token_rows(8), {"input_ids": [7] * (LONGEST + 1)}]
    samples = samples_of(chat_tiny, tmp_path, rows)
    counted = samples.count()
    chosen = choose(samples, counted, [3, 5, 6, 8], 3)
    assert {s.row for s in chosen.samples} == {3, 5, 6}
    assert [s.row for s in choose(samples, counted, [8], 3).samples] == [8]  # there is no other


def test_the_longest_shared_prefix_is_found_among_all_pairs() -> None:
    many = [sample(r, 9, r, r % 7, 1) for r in range(60)]
    found = longest_shared_prefix([*many, sample(70, 9, 41, 6, 1, 5), sample(71, 9, 41, 6, 2)])
    assert found == (4, (41, 70))


def test_equal_samples_are_no_pair_and_a_sample_within_another_is() -> None:
    assert longest_shared_prefix([sample(0, 1, 2), sample(1, 1, 2)]) == (0, ())
    assert longest_shared_prefix([sample(0, 1, 2), sample(1, 1, 2), sample(2, 1, 2, 3)]) == (2, (0, 2))
    assert longest_shared_prefix([sample(0, 1, 2), sample(1, 2, 1)]) == (0, ())
    assert longest_shared_prefix([]) == (0, ())


def test_the_search_encodes_a_bounded_number_of_rows() -> None:
    asked: list[int] = []

    class Encoder:
        def sample(self, row: int) -> Sample:
            asked.append(row)
            return sample(row, row, 1)

    count = 20 * SEARCHED
    encoder: Any = Encoder()
    counted: Any = type("C", (), {"n_tokens": dict.fromkeys(range(count), 2)})()
    choose(encoder, counted, range(count), 3)
    assert len(asked) <= SEARCHED + 4


def test_foreign_prompts_are_few_short_and_of_known_ids() -> None:
    ours = [sample(0, 1), sample(1, *range(3, 200))]
    prompts = foreign_prompts(ours)
    assert len(prompts) == FOREIGN
    assert all(1 <= len(p) <= 24 for p in prompts)
    assert {i for p in prompts for i in p} <= {i for s in ours for i in s.input_ids}
    assert foreign_prompts([]) == []


# What it refuses


@pytest.mark.parametrize("cause", [Cause.NO_HANDSHAKE, Cause.WRONG_LAYERS, Cause.WRONG_WIDTH])
def test_one_sample_that_is_wrong_as_all_would_be_refuses_the_run(cause: Cause) -> None:
    seen = CanaryResult(cosines={1: 1.0, 2: 1.0, 3: 1.0}, findings={7: Finding(cause, 1, 2, {})})
    with pytest.raises(PreflightError, match="canary: 1 of 4 samples are wrong") as caught:
        refuse_if_failed(seen)
    assert "row 7" in caught.value.why


def test_another_wrong_sample_refuses_only_beside_as_many_more() -> None:
    late = Finding(Cause.LATE, None, 3, {})
    refuse_if_failed(CanaryResult(cosines={1: 1.0, 2: 1.0}, findings={3: late}))
    refuse_if_failed(CanaryResult(cosines={1: 1.0}, findings={3: late}))
    with pytest.raises(PreflightError, match="2 of 3"):
        refuse_if_failed(CanaryResult(cosines={1: 1.0}, findings={3: late, 4: "they differ"}))


# Against the small real server


@pytest.mark.tiny
def test_a_run_says_per_tap_how_well_company_and_alone_agree(bench: Bench) -> None:
    rows = token_rows(20)
    rows[9] = {"input_ids": [*rows[12]["input_ids"][:11], 5, 5]}
    dataset = write_rows(bench.place / "d.jsonl", rows)
    result = bench.run(bench.make_spec(dataset))
    assert (result.outcome, result.done) == ("complete", 20)
    (event,) = bench.of("canary")
    assert event["failed"] == {}
    assert set(event["by_tap"]) == {*map(str, TINY_TAPS), "last"}
    assert min(event["by_tap"].values()) >= 0.9999
    assert min(event["by_tap"].values()) == pytest.approx(event["min_cosine"], abs=1e-6)
    assert event["shared_prefix"] == {"rows": [9, 12], "tokens": 11}
    assert {9, 12, event["twice"]} <= set(event["rows"])
    assert event["foreign"] == {"answered": FOREIGN, "sent": FOREIGN}
    assert not list(bench.server.folder.glob("hsx-*"))


class Recording:
    """A source that passes on, and may change what comes back (the one fake here)."""

    attribution, trouble = "rid", ""

    def __init__(self, inner: SGLangSource, change: Callable[[Taken], Taken]) -> None:
        self.inner, self.change = inner, change
        self.asked: list[tuple[int, int, bool]] = []

    async def take(self, asks: AsyncIterator[Ask]) -> AsyncGenerator[Taken, None]:
        async for taken in self.inner.take(asks):
            self.asked.append((taken.ask.sample.row, taken.ask.attempt, taken.ask.alone))
            yield self.change(taken)


def canary_of(bench: Bench, change: Callable[[Taken], Taken]) -> tuple[CanaryResult, Recording]:
    """Three samples, row 2 twice, through a changed source."""
    dataset = write_rows(bench.place / "d.jsonl", token_rows(3))
    spec = extract_from_json(bench.make_spec(dataset))
    samples = [Sample(r, None, tuple(row["input_ids"]), (1,) * len(row["input_ids"])) for r, row in
               enumerate(token_rows(3))]  # fmt: skip
    lowest = LowestLayers(spec.target.model, spec.target.taps[0])
    validator = Validator(spec.target, lowest.norm.weight.numel(), "float32", lowest=lowest)

    async def go() -> tuple[CanaryResult, Recording]:
        inner = SGLangSource(spec.source, 4, spec.target.taps)
        source: Any = Recording(inner, change)
        try:
            return await run_canary("t", source, validator, Chosen(tuple(samples), 2), "float32"), source
        finally:
            await inner.clear("t")
            await inner.aclose()

    return asyncio.run(go())


@pytest.mark.tiny
def test_each_is_sent_in_company_then_alone_and_one_of_them_twice(bench: Bench) -> None:
    result, source = canary_of(bench, lambda taken: taken)
    together = [a for a in source.asked if not a[2]]
    alone = [a for a in source.asked if a[2]]
    assert source.asked == together + alone
    assert sorted(together) == [
        (0, COMPANY, False),
        (1, COMPANY, False),
        (2, COMPANY, False),
        (2, TWIN, False),
    ]
    assert sorted(alone) == [(r, LONE, True) for r in range(3)]
    assert (set(result.cosines), result.findings, result.foreign) == ({0, 1, 2}, {}, (0, 0))
    assert not isinstance(source, BesideStrangers)  # such a source is left without strangers


@pytest.mark.tiny
@pytest.mark.parametrize("attempt", [COMPANY, TWIN, LONE])
@pytest.mark.parametrize("tap", [1, 2])
def test_one_tap_of_one_take_that_is_anothers_is_found_and_named(
    bench: Bench, attempt: int, tap: int
) -> None:
    """Content evidence reads the lowest tap only; this is what the canary is for."""

    def shift(taken: Taken) -> Taken:
        if (taken.ask.sample.row, taken.ask.attempt) != (2, attempt) or taken.states is None:
            return taken
        hidden = taken.states.aux.shape[1] // len(TINY_TAPS)
        aux = taken.states.aux.clone()
        part = slice(tap * hidden, (tap + 1) * hidden)
        aux[:, part] = torch.roll(aux[:, part], 1, 0)
        states: States = dataclasses.replace(taken.states, aux=aux)
        return dataclasses.replace(taken, states=states)

    result, _ = canary_of(bench, shift)
    assert set(result.findings) == {2}
    assert set(result.cosines) == {0, 1}
    why = result.findings[2]
    assert isinstance(why, str)
    assert f"least in tap {TINY_TAPS[tap]}" in why
    assert result.by_tap[str(TINY_TAPS[tap])] < 0.9
    assert result.by_tap[str(TINY_TAPS[0])] >= 0.9999
    assert json.dumps(result.to_json())


@pytest.mark.tiny
def test_a_take_without_an_answer_is_a_finding_and_a_lost_source_an_error(bench: Bench) -> None:
    finding = Finding(Cause.NO_HANDSHAKE, None, "a path", {})

    def silent(taken: Taken) -> Taken:
        return (
            dataclasses.replace(taken, states=None, finding=finding) if taken.ask.attempt == TWIN else taken
        )

    result, source = canary_of(bench, silent)
    assert result.findings == {2: finding}
    assert (2, LONE, True) not in source.asked
    with pytest.raises(PreflightError, match="canary"):
        refuse_if_failed(result)
    with pytest.raises(ConnectionFailed, match="lost during the canary"):
        canary_of(bench, lambda taken: dataclasses.replace(taken, states=None, lost="gone"))


def traffic(bench: Bench) -> dict[str, int]:
    """Requests that the server took, by whose they are."""
    counts: dict[str, int] = httpx.get(f"{bench.server.url}/server_info").json()["hsx_demo"]["traffic"]
    return counts


@pytest.mark.tiny
def test_strangers_are_not_ours_and_a_dead_server_does_not_fail_them(bench: Bench) -> None:
    dataset = write_rows(bench.place / "d.jsonl", token_rows(3))
    spec = extract_from_json(bench.make_spec(dataset))

    async def send(url: str, prompts: list[tuple[int, ...]]) -> int:
        source = SGLangSource(dataclasses.replace(spec.source, url=url), 4)
        try:
            assert isinstance(source, BesideStrangers)
            return await source.foreign(prompts)
        finally:
            await source.aclose()

    before = traffic(bench)
    assert asyncio.run(send(bench.server.url, [(5, 6, 7), (8,), (5, 6)])) == 3
    after = traffic(bench)
    assert (after["foreign"] - before["foreign"], after["ours"] - before["ours"]) == (3, 0)
    assert asyncio.run(send("http://127.0.0.1:9", [(5, 6, 7)] * 3)) == 0
