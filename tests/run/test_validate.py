"""The validator on a tiny real model: what one sample shows; a right one never pays for a wrong one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.capture.states import States
from engine.dataset.tokens import Sample
from engine.demo.tiny import HIDDEN, make_tiny
from engine.run.validate import Judged, Validator, compare_retake
from engine.targets.head import HeadRows
from engine.targets.lone import LoneForward
from engine.targets.lowest import LowestLayers, final_norm
from engine.wire.causes import Cause
from engine.wire.ids import rid
from engine.wire.spec import TargetSpec

if TYPE_CHECKING:
    from pathlib import Path

TAPS = (1, 3, 4)


class Model:
    """The tiny model and right states by a lone forward."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lone, self.lowest = LoneForward(str(folder)), LowestLayers(str(folder), TAPS[0])
        self.target = TargetSpec(str(folder), TAPS, "post", "float32")

    def sample(self, row: int, n: int = 20) -> Sample:
        g = torch.Generator().manual_seed(row)
        return Sample(row, None, tuple(torch.randint(20, 1000, (n,), generator=g).tolist()), (1,) * n)

    def states(self, sample: Sample, layers: tuple[int, ...] = TAPS) -> States:
        hidden = self.lone.states(sample.input_ids)
        aux = torch.cat([hidden[k + 1] for k in layers], -1)
        n = len(sample.input_ids)
        ids = torch.tensor(sample.input_ids)
        return States(rid("r", sample.row, 1), ids, aux, hidden[-1], None, n, TAPS)

    def recompute(self) -> Validator:
        return Validator(self.target, HIDDEN, "float32", lowest=self.lowest)

    def win_rate(self) -> Validator:
        head = HeadRows(str(self.folder))
        return Validator(self.target, HIDDEN, "float32", lowest=None, norm=final_norm(self.lowest), head=head)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(make_tiny(tmp_path_factory.mktemp("tiny")))


def judge(v: Validator, sample: Sample, states: States, attempt: int = 1) -> Judged:
    return v.judge(sample, states.rid, attempt, states, ())


def cause(judged: Judged) -> Cause | None:
    return judged.finding.cause if judged.finding else None


def wearing(sample: Sample, states: States) -> States:
    """Another's states under this sample's id and token ids."""
    return replace(states, rid=rid("r", sample.row, 1), input_ids=torch.tensor(sample.input_ids))


def test_a_layer_below_and_exchanged_columns_are_wrong_layers(model: Model) -> None:
    v, sample = model.recompute(), model.sample(1)
    assert cause(judge(v, sample, model.states(sample))) is None
    early = judge(v, sample, model.states(sample, (0, 3, 4)))
    assert early.finding is not None
    assert (early.finding.cause, early.finding.got, early.finding.expected) == (
        Cause.WRONG_LAYERS,
        "layer 0",
        "layer 1",
    )
    embeddings = judge(v, sample, model.states(sample, (-1, 3, 4)))
    assert embeddings.finding is not None
    assert (embeddings.finding.cause, embeddings.finding.got) == (Cause.WRONG_LAYERS, "the embeddings")
    assert cause(judge(v, sample, model.states(sample, (3, 1, 4)))) is Cause.WRONG_LAYERS
    assert cause(judge(v, sample, model.states(sample, (2, 4, 5)))) is Cause.EVIDENCE_LOW


def test_a_last_state_that_is_not_its_norms_is_seen_at_once(model: Model) -> None:
    v, sample = model.recompute(), model.sample(1)
    states = model.states(sample)
    g = torch.Generator().manual_seed(0)
    pre = torch.randn(20, HIDDEN, generator=g)
    whole = replace(states, pre=pre, last=final_norm(model.lowest)(pre))
    assert cause(judge(v, sample, whole)) is None
    assert whole.last is not None
    for wrong in (
        replace(whole, pre=torch.roll(pre, 1, 0)),
        replace(whole, last=torch.roll(whole.last, 1, 0)),
    ):
        judged = judge(v, sample, wrong)
        assert judged.finding is not None
        assert judged.finding.cause is Cause.EVIDENCE_LOW
        assert judged.finding.evidence["kind"] == "norm"
    tail = whole.last.clone()
    tail[-1] = whole.last[0]
    judged = judge(v, sample, replace(whole, last=tail))
    assert judged.finding is not None
    assert (judged.finding.evidence["first_row"], judged.finding.evidence["wrong_rows"]) == (19, 1)


def test_states_of_another_sample_are_duplicates_where_nothing_else_decides(model: Model) -> None:
    v, a, b = model.win_rate(), model.sample(1), model.sample(2)
    assert cause(judge(v, a, model.states(a))) is None
    twice = judge(v, b, wearing(b, model.states(a)))
    assert twice.finding is not None
    assert (twice.finding.cause, twice.finding.evidence["same_as_row"]) == (Cause.DUPLICATE, 1)
    assert cause(judge(v, b, model.states(b), attempt=2)) is None
    twin = replace(a, row=3)  # equal ids have equal states, rightly
    assert cause(judge(v, twin, wearing(twin, model.states(a)))) is None


def test_a_retake_that_rounds_differently_keeps_what_the_first_take_claimed(model: Model) -> None:
    v, a, b = model.win_rate(), model.sample(1), model.sample(2)
    first = model.states(a)
    assert judge(v, a, first).retake
    assert cause(judge(v, a, replace(first, aux=first.aux * (1 + 1e-6)))) is None
    assert cause(judge(v, b, wearing(b, first))) is Cause.DUPLICATE


def test_a_right_sample_is_taken_though_a_wrong_one_had_its_states_first(model: Model) -> None:
    """Without a proof the first claim stands until its sample is asked for again: then it was refused."""
    v, wrong, right = model.win_rate(), model.sample(1), model.sample(2)
    assert judge(v, wrong, wearing(wrong, model.states(right))).retake
    assert cause(judge(v, right, model.states(right))) is Cause.DUPLICATE
    assert cause(judge(v, wrong, model.states(wrong), attempt=2)) is None
    assert cause(judge(v, right, model.states(right), attempt=2)) is None


def test_two_takes_of_different_size_do_not_agree(model: Model) -> None:
    """A cosine alone is blind to it."""
    v, sample = model.win_rate(), model.sample(1)
    states = model.states(sample)
    one, same = judge(v, sample, states).record, judge(v, sample, states).record
    aux = states.aux.clone()
    aux[:, -HIDDEN:] *= 0.5
    halved = judge(v, sample, replace(states, aux=aux)).record
    assert one is not None
    assert same is not None
    assert halved is not None
    assert compare_retake(one, same) > 0.999999
    assert compare_retake(one, halved) == pytest.approx(0.5)
    assert compare_retake(halved, one) == pytest.approx(0.5)
