"""Content evidence on a real (tiny) model: right states pass, every wrong cut is seen and named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.capture.evidence import Other, judge, judge_win_rate, row_errors, win_rate
from engine.demo.tiny import make_tiny
from engine.targets.lone import LoneForward
from engine.targets.lowest import FinalNorm, LowestLayers, final_norm, target_facts
from engine.wire.causes import Cause

if TYPE_CHECKING:
    from pathlib import Path

TAP = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lowest(model: Path) -> LowestLayers:
    return LowestLayers(str(model), TAP)


@pytest.fixture(scope="module")
def lone(model: Path) -> LoneForward:
    return LoneForward(str(model))


def ids(n: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(20, 1000, (n,), generator=g).tolist()


def test_the_lowest_layers_equal_the_whole_model(lowest: LowestLayers, lone: LoneForward) -> None:
    for n in (1, 2, 63, 64, 65, 200):
        mine, truth = lowest.states(ids(n, n)), lone.states(ids(n, n))[TAP + 1]
        assert mine.shape == truth.shape
        assert float(row_errors(mine, truth).max()) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_states_pass_in_every_dtype(lowest: LowestLayers, lone: LoneForward, dtype: str) -> None:
    for n in (1, 2, 8, 65, 150):
        states = lone.states(ids(n, n))[TAP + 1].to(getattr(torch, dtype))
        value, wrong = judge(states, lowest.states(ids(n, n)), dtype)
        assert wrong is None, (n, value)


@pytest.mark.parametrize("n", [2, 9, 40, 120])
def test_each_way_to_be_wrong_is_named(lowest: LowestLayers, n: int) -> None:
    truth = lowest.states(ids(n, 1))
    other = lowest.states(ids(n, 2))
    flying, before = Other("row 5", other, True), Other("row 5", other, False)

    def cause(states: torch.Tensor, *others: Other) -> tuple[Cause, int, int] | None:
        _, wrong = judge(states, truth, "float32", others)
        return None if wrong is None else (wrong.cause, wrong.first_row, wrong.last_row)

    assert cause(truth) is None
    assert cause(other, flying) == (Cause.SWAPPED, 0, n - 1)
    assert cause(other, before) == (Cause.STALE, 0, n - 1)
    assert cause(other) == (Cause.EVIDENCE_LOW, 0, n - 1)
    shifted = torch.cat([other[-1:], truth[:-1]])
    assert cause(shifted, flying) == (Cause.SHIFTED, 0, n - 1)
    assert cause(torch.cat([truth[1:], other[:1]]), flying) == (Cause.SHIFTED, 0, n - 1)
    k = min(8, n // 2)
    tail = torch.cat([truth[:-k], other[:k]])
    assert cause(tail) == (Cause.NEIGHBOUR, n - k, n - 1)
    assert cause(tail, flying) == (Cause.NEIGHBOUR, n - k, n - 1)


def test_its_own_rows_elsewhere_or_scaled_are_told(lowest: LowestLayers) -> None:
    truth = lowest.states(ids(40, 1))

    def told(states: torch.Tensor) -> tuple[Cause, str]:
        _, wrong = judge(states, truth, "float32", [Other("row 5", lowest.states(ids(40, 2)), True)])
        assert wrong is not None
        return wrong.cause, wrong.whose

    assert told(torch.roll(truth, 8, 0)) == (Cause.SHIFTED, "its own rows, 8 late")
    assert told(torch.roll(truth, -5, 0)) == (Cause.SHIFTED, "its own rows, 5 early")
    assert told(truth.flip(0)) == (Cause.EVIDENCE_LOW, "its own rows, in another order")
    assert told(truth * 1.5) == (Cause.EVIDENCE_LOW, "its own rows, times 1.5")
    assert told(-truth) == (Cause.EVIDENCE_LOW, "its own rows, times -1")
    part = torch.cat([truth[:30], -truth[30:]])  # a wrong tail, and nobody's but its own
    assert told(part) == (Cause.EVIDENCE_LOW, "its own rows, times -1")
    late = torch.cat([truth[:20], torch.roll(truth[20:], 1, 0)])
    assert told(late)[0] is Cause.SHIFTED


def test_what_lies_below_the_tap(lowest: LowestLayers, lone: LoneForward) -> None:
    below = lowest.below(ids(33, 1))
    whole = lone.states(ids(33, 1))
    assert len(below) == TAP + 1
    for mine, truth in zip(below, whole, strict=False):
        assert float(row_errors(mine, truth).max()) < 1e-4
    assert float(row_errors(lowest.states(ids(33, 1)), whole[TAP + 1]).max()) < 1e-4  # and states still works


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_another_at_the_same_places_is_no_swap(lowest: LowestLayers, dtype: str) -> None:
    """A swap leaves nothing of the sample's own but a prefix that both share."""
    prefix, half = ids(20, 3), 30
    mine, theirs = prefix + ids(40, 1), prefix + ids(40, 2)
    truth, other = lowest.states(mine), lowest.states(theirs)
    flying = [Other("row 5", other, True)]

    def cause(states: torch.Tensor) -> tuple[Cause, int, int]:
        _, wrong = judge(states.to(getattr(torch, dtype)), truth, dtype, flying)
        assert wrong is not None
        return wrong.cause, wrong.first_row, wrong.last_row

    assert cause(other) == (Cause.SWAPPED, 20, 59)
    assert cause(torch.cat([truth[:half], other[half:]])) == (Cause.NEIGHBOUR, half, 59)
    assert cause(torch.cat([truth[:half], other[half:50], truth[50:]])) == (Cause.NEIGHBOUR, half, 49)


def test_the_best_fit_is_named_and_not_the_first(lowest: LowestLayers) -> None:
    """A bystander that begins like the culprit has more than half of the wrong rows too."""
    begin = ids(30, 4)
    culprit, bystander = lowest.states(begin + ids(10, 5)), lowest.states(begin + ids(10, 6))
    others = [Other("row 7", bystander, True), Other("row 8", culprit, False)]
    _, wrong = judge(culprit, lowest.states(ids(40, 1)), "float32", others)
    assert wrong is not None
    assert (wrong.cause, wrong.whose) == (Cause.STALE, "row 8, answered before")


def test_the_smallest_difference_between_two_samples_is_seen_in_float32() -> None:
    """Wrong rows were measured down to a relative error of 0.0034 (docs/evidence.md); right ones to 1e-6."""
    truth = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.nn.functional.normalize(torch.randn(6, 64), dim=-1) * truth.norm(dim=-1, keepdim=True)
    assert judge(truth + 1e-6 * noise, truth, "float32")[1] is None
    _, wrong = judge(truth + 0.0033 * noise, truth, "float32")
    assert wrong is not None
    assert wrong.rows == 6
    assert judge(truth + 0.017 * noise, truth, "bfloat16")[1] is None
    assert judge(truth + 0.035 * noise, truth, "bfloat16")[1] is not None


def test_a_single_wrong_row_is_seen(lowest: LowestLayers) -> None:
    truth = lowest.states(ids(50, 1))
    for row in (0, 20, 49):
        states = truth.clone()
        states[row] = lowest.states(ids(50, 2))[row]
        _, wrong = judge(states, truth, "float32")
        assert wrong is not None
        assert (wrong.rows, wrong.first_row) == (1, row)


def test_a_nan_is_wrong(lowest: LowestLayers) -> None:
    truth = lowest.states(ids(5, 1))
    states = truth.clone()
    states[3, 0] = float("nan")
    _, wrong = judge(states, truth, "float32")
    assert wrong is not None
    assert wrong.first_row == 3


def test_the_norms_flavour_is_probed(lowest: LowestLayers) -> None:
    norm = final_norm(lowest)
    assert norm.flavour == "plain"
    pre = torch.randn(3, norm.weight.numel())
    assert torch.allclose(norm(pre), lowest.norm(pre), atol=1e-5)
    other = FinalNorm(norm.weight - 1, norm.eps, "one_plus")
    assert torch.allclose(other(pre), norm(pre), atol=1e-5)


def pointing(tokens: list[int], head: torch.Tensor) -> torch.Tensor:
    """Rows that point at the head row of their next token, with some noise: [S, H]."""
    g = torch.Generator().manual_seed(5)
    return torch.cat([head[tokens[1:]], head[:1]]) + 0.05 * torch.randn(len(tokens), 32, generator=g)


def verdict(post: torch.Tensor, rows: torch.Tensor, tokens: list[int]) -> bool | None:
    rate, pairs = win_rate(post, rows, tokens)
    beside = max(win_rate(post, rows, tokens, offset)[0] for offset in (-1, 1))
    return judge_win_rate(rate, pairs, beside)


def test_win_rate_sees_rows_that_predict_their_next_token() -> None:
    g = torch.Generator().manual_seed(0)
    head = torch.nn.functional.normalize(torch.randn(400, 32, generator=g), dim=-1)
    tokens = torch.randint(0, 400, (120,), generator=g).tolist()
    post, rows = pointing(tokens, head), head[torch.tensor(tokens)]
    assert verdict(post, rows, tokens) is True
    assert verdict(torch.roll(post, 1, 0), rows, tokens) is False
    assert verdict(torch.roll(post, -1, 0), rows, tokens) is False
    # another sample's states, or states that predict nothing: a low rate alone decides nothing
    other = torch.randint(0, 400, (120,), generator=g).tolist()
    assert verdict(pointing(other, head), rows, tokens) is None
    assert verdict(torch.randn(120, 32, generator=g), rows, tokens) is None


def test_win_rate_does_not_decide_on_too_little() -> None:
    for n in (1, 2, 3, 5):
        assert verdict(torch.zeros(n, 4), torch.zeros(n, 4), list(range(n))) is None
    assert win_rate(torch.zeros(1, 4), torch.zeros(1, 4), [1]) == (0.0, 0)
    assert win_rate(torch.zeros(60, 4), torch.zeros(60, 4), [7] * 60) == (0.0, 0)
    assert judge_win_rate(1.0, 3, 0.0) is None


def test_target_facts(model: Path) -> None:
    facts = target_facts(str(model))
    assert (facts.architecture, facts.num_layers) == ("LlamaForCausalLM", 6)
