"""--abort-at ends the attempt of its own command only, and only once."""

from __future__ import annotations

from typing import Any

from hsx_tui.services.abort_mark import AbortMark

Event = dict[str, Any]


def attempt(number: int, *done: int, total: int = 40) -> list[Event]:
    """The events of an attempt that reports ``done`` samples, one report after another."""
    reports: list[Event] = [
        {"type": "progress", "done": n, "quarantined": 0, "pending": total - n, "buffered": 0} for n in done
    ]
    return [{"type": "run_started", "attempt": number}, *reports]


def crossings(mark: AbortMark, *events: Event) -> list[int]:
    return [i for i, event in enumerate(events) if mark.crossed_by(event)]


def test_the_attempt_that_begins_below_the_mark_is_aborted_over_it() -> None:
    events = attempt(1, 0, 10, 19, 20)
    assert crossings(AbortMark(50, 1), *events) == [len(events) - 1]


def test_the_history_of_earlier_attempts_aborts_nothing() -> None:
    """A resume reads the events from the first attempt on, while it lives itself."""
    history = attempt(1, 0, 10, 20, 22)
    assert crossings(AbortMark(50, 2), *history, *attempt(2, 22, 30, 39)) == []
    assert crossings(AbortMark(75, 2), *history, *attempt(2, 22, 31)) == [len(history) + 2]


def test_a_finished_attempt_is_not_aborted() -> None:
    assert crossings(AbortMark(50, 1), *attempt(1, 0, 40)) == []


def test_what_is_checked_and_not_yet_durable_counts() -> None:
    first, second = attempt(1, 0, 4)[1:]
    second["buffered"] = 16
    mark = AbortMark(50, 1)
    assert crossings(mark, {"type": "run_started", "attempt": 1}, first, second) == [2]
