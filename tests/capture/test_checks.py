"""Every cause that needs no model, each by the input that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.capture.checks import Expected, check_states, first_difference
from engine.capture.states import States
from engine.wire.causes import Cause

H, TAPS = 4, (1, 3)
IDS = (10, 11, 12, 13, 14)
RID = "hsx-r-00000007-01_"
WANT = Expected(RID, IDS, TAPS, H, "float32", "pre")


def states(ids: tuple[int, ...] = IDS, **changes: Any) -> States:
    n = len(ids)
    g = torch.Generator().manual_seed(1)
    made = States(
        rid=RID,
        input_ids=torch.tensor(ids),
        aux=torch.randn(n, len(TAPS) * H, generator=g),
        last=torch.randn(n, H, generator=g),
        pre=torch.randn(n, H, generator=g),
        num_tokens=n,
        layers=TAPS,
        chunks=({"start": 0, "n": n},),
    )
    return replace(made, **changes)


def aux(change: tuple[int, int], value: float) -> torch.Tensor:
    t = states().aux.clone()
    t[change[0], change[1]] = value
    return t


def zeroed() -> torch.Tensor:
    t = states().aux.clone()
    t[2, H:] = 0
    return t


def repeated() -> torch.Tensor:
    t = states().aux.clone()
    t[3, :H] = t[2, :H]
    return t


def test_right_states_pass() -> None:
    assert check_states(states(), WANT) is None


@pytest.mark.parametrize(
    ("made", "cause", "got", "expected"),
    [
        (states(rid="hsx-r-00000008-01_"), Cause.FOREIGN, "hsx-r-00000008-01_", RID),
        (states(rid="hsx-r-00000007-02_"), Cause.STALE, "hsx-r-00000007-02_", RID),
        (states(IDS[2:], chunks=({"start": 2, "n": 3},)), Cause.PREFIX_CACHED, 3, 5),
        (states((10,)), Cause.DECODE_STEP, 1, 5),
        (states(IDS[:3]), Cause.TRUNCATED_INPUT, 3, 5),
        (states((10, 11, 99, 13, 14)), Cause.IDS_DIFFER, 5, 5),
        (states((10, 11, 12, 13, 14, 15)), Cause.IDS_DIFFER, 6, 5),
        (states(aux=states().aux[:4]), Cause.PARTIAL_CHUNK, 4, 5),
        (states(pre=states().aux[:3, :H]), Cause.PARTIAL_CHUNK, 3, 5),
        (states(layers=(2, 3)), Cause.WRONG_LAYERS, [2, 3], [1, 3]),
        (states(pre=None), Cause.WRONG_LAYERS, "no last state", "pre"),
        (states(aux=states().aux[:, :H]), Cause.WRONG_WIDTH, [5, 4], [5, 8]),
        (states(pre=torch.randn(5, 3)), Cause.WRONG_WIDTH, [5, 3], [5, 4]),
        (states(aux=states().aux.half()), Cause.WRONG_DTYPE, "float16", "float32"),
        (states(aux=aux((3, 5), float("nan"))), Cause.NON_FINITE, 4, 5),
        (states(aux=aux((0, 0), float("inf"))), Cause.NON_FINITE, 4, 5),
        (states(aux=zeroed()), Cause.ZERO_ROWS, 4, 5),
        (states(aux=repeated()), Cause.REPEATED_STATES, 3, 5),
        # chunks that do not join, whatever the number of rows
        (states(chunks=({"start": 0, "n": 2}, {"start": 3, "n": 2})), Cause.PARTIAL_CHUNK, 4, 5),
        (states(chunks=({"start": 0, "n": 2}, {"start": 3, "n": 3})), Cause.PARTIAL_CHUNK, 5, 5),
        (states(chunks=({"start": 0, "n": 3}, {"start": 2, "n": 2})), Cause.PARTIAL_CHUNK, 5, 5),
        (states(chunks=({"start": 2, "n": 3},)), Cause.PREFIX_CACHED, 3, 5),
        (states(num_tokens=3), Cause.PARTIAL_CHUNK, 3, 5),
        # rows beyond the request
        (states(aux=torch.randn(7, 2 * H)), Cause.NEIGHBOUR, 7, 5),
        # a piece of the prompt, ids and rows
        (states(IDS[1:3], chunks=({"start": 1, "n": 2},), num_tokens=5), Cause.PARTIAL_CHUNK, 2, 5),
        (states(IDS[:2], num_tokens=5), Cause.PARTIAL_CHUNK, 2, 5),
        (states(IDS[2:]), Cause.PREFIX_CACHED, 3, 5),
        (states((14,)), Cause.DECODE_STEP, 1, 5),
        (states((14,), chunks=({"start": 4, "n": 1},)), Cause.PREFIX_CACHED, 1, 5),
        # ranks that would break the counting
        (
            states(input_ids=torch.tensor([IDS])),
            Cause.UNREADABLE,
            "input_ids int64 [1, 5]",
            "input_ids int64 [S]",
        ),
        (
            states(input_ids=torch.tensor(IDS).float()),
            Cause.UNREADABLE,
            "input_ids float32 [5]",
            "input_ids int64 [S]",
        ),
        (states(aux=torch.randn(1, 5, 2 * H)), Cause.WRONG_WIDTH, [1, 5, 8], "[S, width]"),
        (states(aux=torch.randn(2 * H, 5)), Cause.WRONG_WIDTH, [8, 5], [5, 8]),
        (states(last=torch.tensor(1.0)), Cause.WRONG_WIDTH, [], "[S, width]"),
    ],
)
def test_each_fault_has_its_cause(made: States, cause: Cause, got: object, expected: object) -> None:
    finding = check_states(made, WANT)
    assert finding is not None
    assert (finding.cause, finding.got, finding.expected) == (cause, got, expected)


def test_where_is_said() -> None:
    finding = check_states(states(aux=aux((3, 5), float("nan"))), WANT)
    assert finding is not None
    assert finding.evidence == {"where": "tap 3", "first_row": 3}
    differ = check_states(states((10, 11, 99, 13, 14)), WANT)
    assert differ is not None
    assert differ.evidence["position"] == 2
    assert (differ.evidence["got_ids"][2], differ.evidence["expected_ids"][2]) == (99, 12)


def test_equal_rows_of_equal_tokens_are_right() -> None:
    ids = (10, 11, 11, 13, 14)
    made = states(ids)
    made.aux[2] = made.aux[1]
    assert made.pre is not None
    made.pre[2] = made.pre[1]
    assert check_states(made, replace(WANT, input_ids=ids)) is None


def test_first_difference() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_float32_where_bfloat16_is_declared_is_refused() -> None:
    finding = check_states(states(), replace(WANT, dtype="bfloat16"))
    assert finding is not None
    assert (finding.cause, finding.got, finding.expected) == (Cause.WRONG_DTYPE, "float32", "bfloat16")


@pytest.mark.parametrize(
    ("got", "expected", "cause"),
    [(1283, 4710, Cause.IDS_DIFFER), (1, 4710, Cause.DECODE_STEP), (2, 4710, Cause.IDS_DIFFER)],
)
def test_what_went_wrong_in_the_field_is_refused(got: int, expected: int, cause: Cause) -> None:
    """1283 tokens for 4710 after a stale counter, 1 and 2 on decode steps: where a dump has ids, they tell
    that it is another request's. (Where it has none, the source of such dumps judges by the count.)"""
    made = states(tuple(range(20_000, 20_000 + got)))
    finding = check_states(made, replace(WANT, input_ids=tuple(range(expected))))
    assert finding is not None
    assert (finding.cause, finding.got, finding.expected) == (cause, got, expected)
