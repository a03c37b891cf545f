"""What every view is: a pure function from state and frame to rows, and the parts that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx_tui.model.messages import Link
from hsx_tui.model.state import ConsoleState
from hsx_tui.model.status import Freshness, freshness
from hsx_tui.widgets.numbers import age, stamp
from hsx_tui.widgets.rows import MUTED, Row

if TYPE_CHECKING:
    from hsx_tui.widgets.glyphs import Glyphs


WIDE = 90
"""From so many cells on, what else takes two rows is put on one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The room a view has, in cells, and when it is drawn.

    ``now``: the console's monotonic seconds; ``interval``: seconds between two facts of a live host.
    """

    width: int
    height: int
    now: float
    interval: float
    g: Glyphs


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel's content: its title and what stands at the title's right; ``stale`` dims the border and
    ``rows``, which keep their last values below the lines that say so.
    """

    title: Row
    right: Row
    rows: list[Row]
    stale: bool = False
    cause: list[Row] | None = None


View = Callable[[ConsoleState, Frame], Drawn]


def age_row(fresh: Freshness, g: Glyphs, none: str = "no data yet") -> Row:
    """The right end of a title: how old the panel is."""
    if fresh.age is None:
        return [(none, MUTED)]
    if fresh.stale:
        return [(f"STALE {age(fresh.age)}", "bold $error")]
    return [(f"{age(fresh.age)} ago", MUTED)]


def stale_rows(state: ConsoleState, fresh: Freshness, from_iso: str, f: Frame) -> list[Row]:
    """Why a panel is stale, when the next try is due, and from when its values are; one row where room is
    short.
    """
    connection = state.connection
    if connection.link is Link.CONNECTED:
        cause = "the link is up but the host sends nothing"
    else:
        cause = connection.cause or ("connecting" if connection.link is Link.CONNECTING else "link lost")
    retry = next_retry(state, f.now)
    origin = f"values from {stamp(from_iso)}"
    mark = f.g.symbol_bad
    if f.height < 6:
        return [
            [(f"{mark} {origin}", "bold $error"), (f"  {retry}  " if retry else "  ", ""), (cause, "$error")]
        ]
    first: Row = [(f"{mark} STALE  ", "bold $error"), (cause, "$error")]
    good = f"last good sample {age(fresh.age or 0.0)} ago, expected every {f.interval:g} s"
    when: Row = [(f"{retry}  {f.g.dot}  " if retry else "", ""), (origin, "bold")]
    if f.width >= WIDE:
        return [first, [(f"{good}  {f.g.dot}  ", ""), *when]]
    return [first, [(good, "")], when]


def next_retry(state: ConsoleState, now: float) -> str:
    """When the next try to connect is due and how to have it now; "" when none is planned."""
    connection = state.connection
    if connection.link is Link.CONNECTED:
        return ""
    number = f"retry {connection.attempt + 1}" if connection.attempt else "retry"
    if connection.retry_at is None:
        return "r retry now" if connection.link is Link.LOST else ""
    left = connection.retry_at - now
    return f"{number} in {left:.0f} s (r now)" if left >= 0.5 else f"{number} under way"


def panel_freshness(seen_at: float | None, f: Frame) -> Freshness:
    """Freshness by the frame's interval."""
    return freshness(seen_at, f.now, f.interval)
