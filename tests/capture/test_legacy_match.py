"""Which dump is the request's: the tables of the field, and never a guess."""

from __future__ import annotations

import pytest

from engine.capture.legacy_match import Match, Piece, Window, explain, match, naive
from engine.capture.states import Finding
from engine.run.report import describe
from engine.wire.causes import Cause

RID = "hsx-t-00000000-01_"
IDS = tuple(range(100, 4810))
"""4710 tokens, as in the table of the stale counter."""


def by_count(window: Window, n: int) -> Match | Finding | None:
    return match(window, RID, tuple(range(n)), by_count=True)


def names(found: object) -> list[str]:
    assert isinstance(found, Match)
    return [p.name for p in found.pieces]


def test_a_stale_counter_got_1283_expected_4710() -> None:
    """The counter began anew; the folder of the next number holds a dump of the run before."""
    rows = [(0, 1283, 4710), (1, 4710, 1283), (2, 612, 2048), (3, 4711, 4710)]
    for number, left, expected in rows:
        ids = IDS[:expected] if expected <= len(IDS) else tuple(range(expected))
        window = Window((), floor=number, leftover=Piece(number + 1, left, "extend"))
        assert match(window, RID, ids, by_count=True) is None, "a leftover was credited"
        (finding,) = naive(window, ids, None)
        assert (finding.cause, finding.got, finding.expected) == (Cause.STALE, left, expected)
        assert f"got {left} tokens, expected {expected} [stale]" in describe(finding)


def test_a_leftover_of_equal_length_is_not_credited() -> None:
    window = Window((), floor=4, leftover=Piece(5, 33, "extend"))
    assert by_count(window, 33) is None


@pytest.mark.parametrize("mode", ["decode", None])
@pytest.mark.parametrize("got", [1, 2])
def test_decode_steps_got_1_got_2(got: int, mode: str | None) -> None:
    """The only new folder is a decode step of somebody: one row, or two of a batch."""
    window = Window((Piece(8, got, mode),), floor=7)
    assert by_count(window, 4710) is None
    (finding,) = naive(window, IDS, None)
    assert (finding.cause, finding.got, finding.expected) == (Cause.DECODE_STEP, got, 4710)
    assert f"got {got} tokens, expected 4710 [decode_step]" in describe(finding)


def test_the_dump_behind_a_decode_step_is_found() -> None:
    window = Window((Piece(8, 1, "decode"), Piece(9, 1), Piece(10, 33, "mixed"), Piece(11, 40)), floor=7)
    found = by_count(window, 33)
    assert names(found) == ["req_10"]
    assert isinstance(found, Match) and found.by == "count"
    assert [f.cause for f in naive(window, tuple(range(33)), found)] == [Cause.DECODE_STEP]
    assert naive(Window((Piece(10, 33),), floor=9), tuple(range(33)), by_count_match(33)) == []


def by_count_match(n: int) -> Match:
    found = by_count(Window((Piece(10, n),), floor=9), n)
    assert isinstance(found, Match)
    return found


def test_two_equal_lengths_are_never_guessed_between() -> None:
    found = by_count(Window((Piece(8, 40), Piece(9, 40, "extend")), floor=7), 40)
    assert isinstance(found, Finding)
    assert (found.cause, found.got) == (Cause.FOREIGN, "2 dumps of 40 tokens")
    assert found.evidence["folders"] == ["req_8", "req_9"]


def test_a_prompt_of_one_token_among_unnamed_decode_steps_is_not_guessed() -> None:
    found = by_count(Window((Piece(8, 1), Piece(9, 1), Piece(10, 1)), floor=7), 1)
    assert isinstance(found, Finding)
    assert found.cause is Cause.DECODE_STEP
    assert names(by_count(Window((Piece(8, 1, "decode"), Piece(9, 1, "extend")), floor=7), 1)) == ["req_9"]


def test_a_number_of_before_is_late_however_well_it_fits() -> None:
    window = Window((Piece(5, 40),), floor=7)
    assert by_count(window, 40) is None
    (finding,) = naive(window, tuple(range(40)), None)
    assert (finding.cause, finding.got, finding.expected) == (Cause.LATE, 40, 40)


def test_a_dump_that_may_be_owed_to_another_sample_is_doubted() -> None:
    found = by_count(Window((Piece(8, 40),), floor=7, owed=frozenset({40})), 40)
    assert isinstance(found, Finding)
    assert found.cause is Cause.LATE


def test_equal_ids_are_proof_and_other_ids_are_none() -> None:
    ids = (5, 6, 7)
    window = Window((Piece(8, 3, ids=(5, 6, 8)), Piece(9, 3, ids=ids), Piece(10, 3)), floor=7)
    for counting in (True, False):
        found = match(window, RID, ids, by_count=counting)
        assert names(found) == ["req_9"]
        assert isinstance(found, Match) and found.by == "token_ids"
    assert match(Window((Piece(8, 3, ids=(5, 6, 8)),)), RID, ids, by_count=True) is None
    assert match(Window((Piece(8, 3, ids=ids, rid="somebody"),)), RID, ids, by_count=True) is None
    assert match(Window((Piece(8, 3),)), RID, ids, by_count=False) is None, "no ids, no proof"


def test_chunks_are_joined_where_ids_prove_it() -> None:
    ids = tuple(range(10, 20))
    parts = (Piece(8, 4, ids=ids[:4]), Piece(9, 5, ids=(1, 2, 3, 4, 5)), Piece(11, 5, ids=ids[4:9]))
    last = Piece(14, 1, ids=ids[9:])
    assert names(match(Window((*parts, last)), RID, ids, by_count=False)) == ["req_8", "req_11", "req_14"]
    assert match(Window(parts), RID, ids, by_count=False) is None
    finding = explain(Window(parts, floor=7), ids, 5.0)
    assert (finding.cause, finding.got, finding.expected) == (Cause.PARTIAL_CHUNK, 4, 10)
    twin = Piece(12, 5, ids=ids[4:9])
    assert match(Window((*parts, twin)), RID, ids, by_count=False) is None, "the end is not there yet"
    told = match(Window((*parts, twin, last)), RID, ids, by_count=False)
    assert isinstance(told, Finding), "two fit one place"
    assert (told.cause, told.evidence["folders"]) == (Cause.FOREIGN, ["req_8", "req_11", "req_14", "req_12"])


@pytest.mark.parametrize("counting", [True, False])
def test_two_dumps_of_our_ids_are_never_guessed_between(counting: bool) -> None:
    """A dump of a stranger whose head was cached holds only the rest of its prompt: our ids, further back."""
    ids = (5, 6, 7)
    found = match(Window((Piece(8, 3, ids=ids), Piece(9, 3, ids=ids)), floor=7), RID, ids, by_count=counting)
    assert isinstance(found, Finding)
    assert (found.cause, found.got) == (Cause.FOREIGN, "2 dumps of our token ids")
    assert found.evidence["folders"] == ["req_8", "req_9"]
    assert "req_8, req_9" in describe(found)


def test_a_whole_dump_and_chunks_of_our_ids_are_ambiguous() -> None:
    ids = (5, 6, 7)
    pieces = (Piece(8, 2, ids=ids[:2]), Piece(9, 3, ids=ids), Piece(10, 1, ids=ids[2:]))
    found = match(Window(pieces), RID, ids, by_count=False)
    assert isinstance(found, Finding)
    assert "req_9" in found.evidence["why"]
    assert "req_8+req_10" in found.evidence["why"]
    twins = (Piece(7, 2, ids=ids[:2]), Piece(8, 2, ids=ids[:2]), Piece(10, 1, ids=ids[2:]))
    assert isinstance(match(Window(twins), RID, ids, by_count=False), Finding), "two heads, one end"


def test_many_dumps_of_equal_ids_make_no_work_without_bounds() -> None:
    ids = (7,) * 60
    found = match(Window(tuple(Piece(k, 1, ids=(7,)) for k in range(200))), RID, ids, by_count=False)
    assert isinstance(found, Finding)
    assert found.got == "4 or more dumps of our token ids"


def test_chunks_are_never_joined_by_count() -> None:
    window = Window((Piece(8, 1, "decode"), Piece(9, 30), Piece(10, 1, "decode"), Piece(11, 12)), floor=7)
    assert by_count(window, 42) is None
    finding = explain(window, tuple(range(42)), 5.0)
    assert (finding.cause, finding.got, finding.expected) == (Cause.PARTIAL_CHUNK, 30, 42)
    assert finding.evidence["folders"] == ["req_9", "req_11"]


def test_what_never_comes_is_late_and_says_which_numbers_are_missing() -> None:
    window = Window((Piece(8, 30), Piece(11, 12)), landing=(12,), floor=7)
    finding = explain(window, tuple(range(50)), 5.0)
    assert finding.cause is Cause.LATE
    assert finding.evidence["not_there_yet"] == ["req_9", "req_10", "req_12"]


def test_a_number_without_bounds_makes_no_list_without_bounds() -> None:
    window = Window((Piece(3, 1), Piece(10**11, 1)), floor=2)
    assert len(window.gaps) < 2000
