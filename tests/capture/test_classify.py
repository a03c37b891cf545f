"""What the writer says of its dump, by the recorder's own code: every kind of bad dump has its cause."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.capture.classify import judge_dump
from engine.capture.pythonpath.hsx_capture.hostcopy import HostCopier
from engine.capture.pythonpath.hsx_capture.joining import Partial, Piece
from engine.capture.pythonpath.hsx_capture.recorder import CaptureFacts
from engine.capture.pythonpath.hsx_capture.writing import Finished, build_dump
from engine.capture.states import Finding, States
from engine.wire.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.capture.pythonpath.hsx_capture.dumpfile import Dump

IDS = tuple(range(10, 18))
RID = "hsx-r-00000007-01_"
H = 4


def norm(pre: torch.Tensor) -> torch.Tensor:
    """Any will do."""
    return pre * 2


def built(
    spans: Sequence[tuple[int, int]],
    *,
    seen: Sequence[int] = IDS,
    pre: torch.Tensor | None = None,
    prompt: Sequence[int] = IDS,
) -> Dump:
    """The dump of a request whose forwards computed these spans of the prompt."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(len(prompt), H, generator=g)
    partial, copier = Partial(RID, 1, tuple(prompt), 0.0), HostCopier()
    for start, end in spans:
        mine = states if pre is None else pre
        piece = Piece(
            RID, 1, tuple(prompt), start, states[start:end], norm(states)[start:end], mine[start:end],
            torch.tensor(list(seen))[start:end],
        )  # fmt: skip
        partial.note(piece, 0.0)
        if not partial.error:
            partial.parts.append(copier.copy(piece.slices()))
    return build_dump(Finished(partial, "1-1"), CaptureFacts((1,), (2,), "m", "test"), norm)


def cause(dump: Dump, promised: str = "1-1", rid: str = RID) -> Cause:
    found = judge_dump(dump, rid, IDS, promised)
    assert isinstance(found, Finding)
    return found.cause


def test_a_right_dump_gives_its_states() -> None:
    found = judge_dump(built([(0, 3), (3, 8)]), RID, IDS, "1-1")
    assert isinstance(found, States)
    assert (found.rid, found.num_tokens, found.layers, len(found.chunks)) == (RID, 8, (1,), 2)


def test_ids_that_nobody_compared_are_not_believed() -> None:
    dump = built([(0, 8)])
    assert cause(replace(dump, meta=replace(dump.meta, ids_checked=False))) is Cause.IDS_DIFFER


NAN = torch.full((8, H), float("nan"))


@pytest.mark.parametrize(
    ("dump", "right"),
    [
        (built([(3, 8)]), Cause.PREFIX_CACHED),
        (built([(0, 3), (5, 8)]), Cause.PARTIAL_CHUNK),
        (built([(0, 5), (3, 8)]), Cause.PARTIAL_CHUNK),
        (built([(0, 8)], seen=(*IDS[:-1], 99)), Cause.IDS_DIFFER),
        (built([(0, 8)], pre=torch.ones(8, H)), Cause.EVIDENCE_LOW),
        (built([(0, 8)], pre=NAN), Cause.NON_FINITE),
        (built([(1, 4)], prompt=IDS[:4]), Cause.PREFIX_CACHED),
        (built([(0, 2), (3, 4)], prompt=IDS[:4]), Cause.TRUNCATED_INPUT),
    ],
)
def test_the_recorders_own_words_are_understood(dump: Dump, right: Cause) -> None:
    assert not dump.meta.ok
    assert cause(dump) is right


def test_whose_dump_it_is_comes_first() -> None:
    good = built([(0, 8)])
    assert cause(good, promised="1-2") is Cause.STALE
    assert cause(good, rid="hsx-r-00000007-02_") is Cause.STALE
    assert cause(good, rid="hsx-r-00000008-01_") is Cause.FOREIGN
    assert cause(good, rid="hsx-r-00000008-01_", promised="1-2") is Cause.FOREIGN


def test_a_dump_that_says_ok_and_is_not_whole() -> None:
    good = built([(0, 8)])
    assert cause(replace(good, aux=None)) is Cause.UNREADABLE
    assert (
        cause(replace(good, input_ids=torch.arange(8))) is Cause.IDS_DIFFER
    )  # the digest is of the capture's
    unknown = replace(good, meta=replace(good.meta, ok=False, error="something new"), aux=None)
    assert cause(unknown) is Cause.WRITER_ERROR
