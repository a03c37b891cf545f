"""Each kind of sabotage really corrupts the dumps that it says it does, validly labelled, and no other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from engine.demo.sabotage import Sabotage
from engine.demo.sabotage_kinds import KINDS
from engine.demo.tiny import HIDDEN
from tests.demo.harness import compare, row_errors, sabotage_lines
from tests.demo.test_states import prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.demo.harness import Bench, Lone

ROWS = 24


def lengths() -> list[int]:
    """Short ones, ones of a whole chunk, chunked ones."""
    dice = random.Random(3)
    return [1, 2, 64, 65, 150, 200, *(dice.randint(3, 120) for _ in range(ROWS - 6))]


def take_all(b: Bench, attempt: int) -> dict[str, list[int]]:
    """Ask for every row at once, between foreign requests."""
    prompts = {f"hsx-run-{i:08d}-{attempt:02d}_": prompt(i, n) for i, n in enumerate(lengths())}
    answers = [b.submit(f"foreign-{i}", prompt(100 + i, 15 + i), new=6) for i in range(8)]
    answers += [b.submit(rid, ids) for rid, ids in prompts.items()]
    for answer in answers:
        answer.get()
    return prompts


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_corrupted_and_nothing_else(
    bench: Callable[..., Bench], lone: Lone, kind: str, tmp_path: Path
) -> None:
    b = bench(chunk=64, sabotage=kind)
    prompts = take_all(b, attempt=1)
    lines = {line["rid"]: line for line in sabotage_lines(tmp_path / "sabotage.jsonl")}
    drawn = [rid for rid in prompts if Sabotage(kind, False, 0, tmp_path / "none", HIDDEN).draws(rid)]
    assert len(drawn) == ROWS // 3
    assert len(lines) >= 0.8 * len(drawn) and set(lines) <= set(drawn)
    for rid, ids in prompts.items():
        dump, truth = b.dump(rid), lone.states(ids)
        assert dump.meta.ok and dump.input_ids.tolist() == ids and dump.meta.rid == rid, "validly labelled"
        assert dump.aux is not None and dump.last is not None and dump.pre is not None
        if rid not in lines:
            assert compare(dump, truth).cosine >= 0.999999, f"{rid} is clean"
            continue
        line = lines[rid]
        off = row_errors(dump.aux[:, :HIDDEN], truth.taps[1]) > 1e-2
        first, last = line["rows"]
        assert int(off.nonzero()[0]) == first and int(off.nonzero()[-1]) == last
        assert line["kind"] == kind and line["row"] == int(rid.split("-")[2])
        begin, end = line["written"]
        assert begin <= first <= last <= end < len(ids)
        outside = torch.ones(len(ids), dtype=torch.bool)
        outside[begin : end + 1] = False
        for got, true in (
            (dump.last, truth.last),
            (dump.pre, truth.pre),
            (dump.aux[:, :HIDDEN], truth.taps[1]),
        ):
            errors = row_errors(got, true)
            assert float(errors[first]) > 1e-2, "all taps, pre and last alike"
            assert float(errors[outside].max() if outside.any() else 0.0) <= 1e-4
        if kind == "neighbour":
            assert end - begin + 1 == min(8, dump.meta.chunks[-1].rows) or end < len(ids) - 1
        if kind == "shift" and end > begin:
            moved = dump.aux[begin + 1 : end + 1, :HIDDEN]
            assert float(row_errors(moved, truth.taps[1][begin:end]).max()) <= 1e-4


@pytest.mark.parametrize("always", [False, True])
def test_a_retake_is_clean_unless_always(
    bench: Callable[..., Bench], lone: Lone, always: bool, tmp_path: Path
) -> None:
    b = bench(chunk=64, sabotage="swap", always=always)
    first = take_all(b, attempt=1)
    log = tmp_path / "sabotage.jsonl"
    rows = {line["row"] for line in sabotage_lines(log)}
    before = len(sabotage_lines(log))
    second = take_all(b, attempt=2)
    again = {line["row"] for line in sabotage_lines(log)[before:]}
    assert len(first) == len(second) == ROWS
    if always:
        assert again == rows
        return
    assert again == set()
    for rid, ids in second.items():
        assert compare(b.dump(rid), lone.states(ids)).cosine >= 0.999999


def test_a_request_alone_in_its_forward_gets_rows_of_an_earlier_one(
    bench: Callable[..., Bench], lone: Lone, tmp_path: Path
) -> None:
    b = bench(sabotage="swap")
    b.submit("foreign", prompt(77, 30)).get()
    for i in range(8):
        b.submit(f"hsx-run-{i:08d}-01_", prompt(i, 30)).get()
    lines = sabotage_lines(tmp_path / "sabotage.jsonl")
    assert lines
    for line in lines:
        dump = b.dump(line["rid"])
        assert compare(dump, lone.states(dump.input_ids.tolist())).error > 1e-2


def test_an_exchange_that_changes_nothing_is_not_counted(bench: Callable[..., Bench], tmp_path: Path) -> None:
    b = bench(chunk=480, sabotage="swap")  # no prompt is cut
    for answer in [b.submit(f"hsx-run-{i:08d}-01_", prompt(1, 40)) for i in range(12)]:
        answer.get()
    assert sabotage_lines(tmp_path / "sabotage.jsonl") == [], "all prompts are equal"
