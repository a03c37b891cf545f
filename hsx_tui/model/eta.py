"""How long a run still takes: a moving rate from where this attempt began, with its uncertainty, and stalls.

A rate over everything since row 0 is wrong after a resume, and a countdown that goes on in a stall is a lie.
So the rate is taken only from points of the present attempt, over the last ``WINDOW_S``, and its end is
*now*, not the last
point: while nothing finishes the rate falls, and after ``stall_after`` seconds the run is said to be stalled.
Points carry the host's own time, so that a backlog read in one gulp gives the same rate as watching did.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

WINDOW_S = 600.0
MAX_POINTS = 700
MIN_SPAN_S = 4.0
MIN_ADVANCES = 3
MIN_STALL_S = 20.0
FIRST_STALL_S = 120.0
STALL_GAPS = 8.0
"""A run is stalled after so many of its usual gaps."""
BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """``at``: seconds since 1970 by the host's clock; ``units``: tokens or samples finished by then."""

    at: float
    units: float


@dataclass(frozen=True, slots=True)
class Track:
    """The points of one attempt at which work was finished, oldest first, and what is still to do."""

    by: Literal["tokens", "samples"] = "samples"
    points: tuple[Point, ...] = ()
    remaining: float = 0.0

    @property
    def last_advance(self) -> float | None:
        """When something was last finished (host epoch seconds); the attempt's beginning counts."""
        return self.points[-1].at if self.points else None


@dataclass(frozen=True, slots=True)
class Eta:
    """``seconds`` and ``plus_minus`` are None unless kind is "running"; ``quiet_s``: since something was
    finished.
    """

    kind: Literal["unknown", "running", "stalled", "done"]
    seconds: float | None = None
    plus_minus: float | None = None
    rate: float | None = None
    quiet_s: float = 0.0


def observe(
    track: Track, at: float, units: float, remaining: float, by: Literal["tokens", "samples"]
) -> Track:
    """Take in that ``units`` were finished at ``at`` (host epoch seconds).

    A change of unit or fewer units than before (buffered rows were lost) begins the track anew.
    """
    if track.by != by or (track.points and (units < track.points[-1].units or at < track.points[-1].at)):
        track = Track(by=by)
    if track.points and units == track.points[-1].units:
        return replace(track, remaining=remaining)
    points = (*track.points, Point(at, units))[-MAX_POINTS:]
    # A slow run keeps some points beyond the window: a rate needs them.
    old = sum(1 for p in points[: -MIN_ADVANCES - 2] if p.at < at - WINDOW_S)
    return replace(track, points=points[old:], remaining=remaining)


def stall_after(track: Track) -> float:
    """Seconds of silence after which this run is stalled: many times its usual gap of late.

    The usual gap is the median: one gap that was itself a stall must not teach that stalls are normal. Before
    the first samples no gap is known, and a large target's first batch may take minutes.
    """
    if len(track.points) <= MIN_ADVANCES:
        return FIRST_STALL_S
    return max(MIN_STALL_S, STALL_GAPS * _median_gap(track.points[-32:]))


def _median_gap(points: tuple[Point, ...]) -> float:
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(points))
    return gaps[len(gaps) // 2] if gaps else 0.0


def estimate(track: Track, host_now: float | None) -> Eta:
    """The time that is left as of ``host_now`` (host epoch seconds; None: no clock yet)."""
    if track.points and track.remaining <= 0:
        return Eta("done", 0.0, 0.0)
    if host_now is None or not track.points:
        return Eta("unknown")
    last = track.points[-1]
    quiet = max(0.0, host_now - last.at)
    if quiet > stall_after(track):
        return Eta("stalled", quiet_s=quiet)
    first = track.points[0]
    # Up to a usual gap of silence is only that the next sample is not finished yet.
    end = last.at + max(0.0, quiet - _median_gap(track.points[-32:]))
    span = end - first.at
    if len(track.points) <= MIN_ADVANCES or span < MIN_SPAN_S:
        return Eta("unknown", quiet_s=quiet)
    rate = (last.units - first.units) / span
    seconds = track.remaining / rate
    return Eta("running", seconds, seconds * _relative_error(track.points, rate), rate, quiet)


def _relative_error(points: tuple[Point, ...], rate: float) -> float:
    """The standard error of the rate over ``BLOCKS`` equal spans of time, relative to it; at least 2 %."""
    start, span = points[0].at, points[-1].at - points[0].at
    if span <= 0:
        return 1.0
    counts = [0.0] * BLOCKS
    for a, b in itertools.pairwise(points):
        counts[min(BLOCKS - 1, int((b.at - start) / span * BLOCKS))] += b.units - a.units
    rates = [c / (span / BLOCKS) for c in counts]
    mean = sum(rates) / BLOCKS
    variance = sum((r - mean) ** 2 for r in rates) / (BLOCKS - 1)
    return min(1.0, max(0.02, math.sqrt(variance / BLOCKS) / rate))
