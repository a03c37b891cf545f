"""Requests end: by abort (by rid prefix), by a duplicate rid, by the end of the server; a capture fault ends
none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from engine.capture.pythonpath.hsx_capture.folder import Limits
from engine.demo.scheduler import DuplicateRid, NotAccepting
from tests.demo.test_states import prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.demo.harness import Bench


def test_abort_takes_every_rid_that_begins_with_it(bench: Callable[..., Bench]) -> None:
    b = bench(running=2)
    ten = b.submit("hsx-p10", prompt(1, 50), new=2000)
    other = b.submit("other", prompt(2, 50), new=2000)
    waits = b.submit("hsx-p1", prompt(3, 50))
    while b.scheduler.load().running < 2:
        time.sleep(0.005)
    b.scheduler.abort("hsx-p1")
    assert ten.get().finish == {"type": "abort", "message": "Aborted"}
    waiting = waits.get().meta_info()
    assert waiting["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert waiting["completion_tokens"] == 0
    assert "prompt_tokens" not in waiting and "hsx" not in waiting
    assert b.scheduler.load().running == 1, "the other one goes on"
    b.scheduler.abort("other")
    assert other.get().finish == {"type": "abort", "message": "Aborted"}
    load = b.scheduler.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)
    assert b.submit("hsx-p1", prompt(3, 50)).get().handshake is not None
    assert b.dump("hsx-p1").meta.ok, "the same rid again, after an abort"


def test_an_abort_in_the_middle_of_a_prefill_leaves_nothing(bench: Callable[..., Bench]) -> None:
    b = bench(chunk=8)
    answer = b.submit("hsx-run-00000001-01_", prompt(1, 1500))
    while b.scheduler.load().used_tokens < 16:
        time.sleep(0.001)
    b.scheduler.abort("hsx-run-00000001-01_")
    assert answer.get().finish == {"type": "abort", "message": "Aborted"}
    assert b.recorder.close()
    assert sorted(p.name for p in b.folder.iterdir()) == []


def test_a_live_rid_cannot_be_used_twice(bench: Callable[..., Bench]) -> None:
    b = bench()
    first = b.submit("same", prompt(1, 10), new=500)
    with pytest.raises(DuplicateRid):
        b.submit("same", prompt(2, 10))
    b.scheduler.abort("same")
    first.get()
    assert b.submit("same", prompt(2, 10)).get().finish == {"type": "length", "length": 1}


def test_stop_finishes_what_is_short_and_aborts_what_is_long(bench: Callable[..., Bench]) -> None:
    b = bench()
    short = b.submit("short", prompt(1, 10), new=20)
    b.scheduler.stop(30.0)
    assert short.get().finish == {"type": "length", "length": 20}
    with pytest.raises(NotAccepting):
        b.submit("late", prompt(1, 10))
    other = bench()
    long = other.submit("long", prompt(1, 10), new=100_000)
    other.scheduler.stop(0.2)
    assert long.get().finish == {"type": "abort", "message": "Aborted"}


def test_an_error_of_the_model_ends_every_request_and_is_told(bench: Callable[..., Bench]) -> None:
    b = bench()
    answer = b.submit("bad", [49152 + 5])  # HTTP refuses such an id; here it reaches the embedding
    finish = answer.get().finish
    assert finish is not None and finish["message"].startswith("the scheduler died: IndexError")
    with pytest.raises(NotAccepting):
        b.submit("next", prompt(1, 10))


def test_a_capture_without_room_fails_no_request(bench: Callable[..., Bench]) -> None:
    b = bench(limits=Limits(folder_bytes=1000, free_floor_bytes=0))
    request = b.submit("hsx-run-00000001-01_", prompt(1, 50), new=3).get()
    assert request.finish == {"type": "length", "length": 3}
    assert "no room" in request.meta_info()["hsx"]["error"]
