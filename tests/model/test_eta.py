"""The ETA: right after a resume, honest in a stall, the same for a backlog as for a live view."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx_tui.model.eta import FIRST_STALL_S, MAX_POINTS, WINDOW_S, Track, estimate, observe, stall_after

T0 = 1_796_000_000.0


def steady(
    rate: float, seconds: int, start: float = 0.0, total: float = 1000.0, period: float = 1.0
) -> tuple[Track, float]:
    """A track that gains ``rate`` units a second, from ``start`` of ``total``; and the time of its last
    point.
    """
    track, t = Track(), 0.0
    while t <= seconds:
        done = start + rate * t
        track = observe(track, T0 + t, done, total - done, "samples")
        t += period
    return track, T0 + t - period


def test_a_steady_run_counts_down_to_its_end() -> None:
    track, now = steady(2.0, 100)
    eta = estimate(track, now)
    assert eta.kind == "running"
    assert eta.rate == pytest.approx(2.0)
    assert eta.seconds == pytest.approx((1000 - 200) / 2.0)
    assert eta.plus_minus == pytest.approx(0.02 * 400, rel=0.01)


@pytest.mark.parametrize("after", [6, 10, 30, 60])
def test_after_a_resume_at_60_percent_the_first_estimate_is_right(after: int) -> None:
    track, now = steady(1.0, after, start=600.0)
    eta = estimate(track, now)
    assert eta.seconds == pytest.approx(400 - after, rel=0.02)


def test_a_backlog_read_at_once_gives_the_same_as_watching() -> None:
    # Points carry the host's time, so when they were read makes no difference: only the last "now" counts.
    track, last = steady(1.0, 300)
    assert estimate(track, last).seconds == pytest.approx(700, rel=0.02)


def test_a_stall_is_said_and_is_no_countdown() -> None:
    track, last = steady(1.0, 60)
    limit = stall_after(track)
    assert limit == 20.0
    assert estimate(track, last + limit - 1).kind == "running"
    eta = estimate(track, last + 300)
    assert (eta.kind, eta.seconds, eta.quiet_s) == ("stalled", None, 300.0)


def test_while_nothing_finishes_the_estimate_grows() -> None:
    track, last = steady(1.0, 60)
    seconds = [estimate(track, last + quiet).seconds or 0 for quiet in (0, 5, 10, 19)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_a_slow_run_is_not_called_stalled_between_two_samples() -> None:
    track, last = steady(1 / 30, 600, period=30.0)
    assert estimate(track, last + 60).kind == "running"
    assert estimate(track, last + 30 * 8 + 1).kind == "stalled"


def test_the_first_batch_of_a_large_target_has_its_time() -> None:
    track = observe(Track(), T0, 0, 100, "samples")
    assert estimate(track, T0 + FIRST_STALL_S - 1).kind == "unknown"
    assert estimate(track, T0 + FIRST_STALL_S + 1).kind == "stalled"


def test_after_a_stall_the_rate_comes_back() -> None:
    track, last = steady(1.0, 60, total=2000)
    assert estimate(track, last + 100).kind == "stalled"
    for t in range(1, 700):
        track = observe(track, last + 200 + t, 60 + t, 2000 - 60 - t, "samples")
    eta = estimate(track, last + 200 + 699)
    assert eta.rate == pytest.approx(1.0, rel=0.05)


def test_fewer_units_than_before_begin_anew() -> None:
    track, last = steady(1.0, 60)
    track = observe(track, last + 1, 40, 960, "samples")  # buffered rows were lost in a crash
    assert len(track.points) == 1
    assert estimate(track, last + 1).kind == "unknown"


def test_a_change_of_unit_begins_anew() -> None:
    track, last = steady(1.0, 60)
    assert len(observe(track, last + 1, 20_000, 5, "tokens").points) == 1


def test_an_uneven_run_has_a_wider_uncertainty() -> None:
    track, units = Track(), 0.0
    for t in range(200):
        units += 10 if (t // 25) % 2 else 1
        track = observe(track, T0 + t, units, 5000 - units, "tokens")
    eta = estimate(track, T0 + 199)
    assert eta.seconds is not None and eta.plus_minus is not None
    assert eta.plus_minus > 0.15 * eta.seconds


def test_nothing_left_is_done_and_no_clock_is_unknown() -> None:
    track = observe(Track(), T0, 10, 0, "samples")
    assert estimate(track, T0 + 999).kind == "done"
    assert estimate(steady(1.0, 60)[0], None).kind == "unknown"


def test_a_long_run_keeps_few_points_and_forgets_what_is_old() -> None:
    track, last = steady(1.0, 5000, total=10_000)
    assert len(track.points) <= MAX_POINTS
    assert last - track.points[0].at <= WINDOW_S + 5


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e9), st.floats(-10, 1e9)), max_size=60),
    st.floats(-1e7, 1e7),
)
def test_no_order_of_times_or_counts_breaks_it(seen: list[tuple[float, float, float]], now: float) -> None:
    track = Track()
    for at, units, remaining in seen:
        track = observe(track, at, units, remaining, "samples")
    eta = estimate(track, now)
    if eta.kind == "running":
        assert eta.seconds is not None and eta.seconds >= 0
        assert eta.plus_minus is not None and eta.plus_minus >= 0
