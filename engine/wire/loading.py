"""How far a server is with loading, read from its log: a list of phases, each with its elapsed time.

The lines are those of SGLang 0.5 (`Load weight begin.` and so on); the embedded server writes the same ones,
and "Converting ..." before them the first time. A list of known phases can say "3 of 6", which a spinner
cannot. "fired up and ready to roll" ends the last phase here, but whether the server is ready is what /ready
answers.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PHASES = ("convert", "start", "init", "weights", "kv cache", "graphs", "http", "warm-up")
"""All phases in order. "convert" and "graphs" are shown only where they happen."""

OPTIONAL = frozenset({"convert", "graphs"})
QUIET_AFTER_S = 90.0
"""Without a new line for this long a loading server is said to make no progress (seconds)."""

_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?[^\]]{0,24}\]\s*")
_LEVEL = re.compile(r"^(?:INFO|WARNING|ERROR):\s+")
_SHARDS = re.compile(r"shards:\s*(\d{1,3})% Completed")


@dataclass(frozen=True, slots=True)
class Phase:
    """``began``, ``ended``: seconds by the log's own stamps; ``fraction``: 0 to 1 where the log tells."""

    name: str
    began: float | None = None
    ended: float | None = None
    fraction: float | None = None

    @property
    def state(self) -> str:
        """pending, running or done."""
        if self.ended is not None:
            return "done"
        return "pending" if self.began is None else "running"


@dataclass(frozen=True, slots=True)
class Loading:
    """The phases seen so far.

    Attributes:
        stamp: the newest time in the log (seconds; the host's local time, so only differences mean anything).
        line_at: when the newest line came (monotonic seconds of whoever reads).
        failed: the line that told of a failure, "" without one.
        fired: the server said that it is ready to roll.
        last: the newest line that was not about a phase.
    """

    phases: tuple[Phase, ...] = field(
        default_factory=lambda: tuple(Phase(name) for name in PHASES if name not in OPTIONAL)
    )
    stamp: float | None = None
    line_at: float | None = None
    failed: str = ""
    fired: bool = False
    last: str = ""

    @property
    def begun(self) -> bool:
        """Any phase was seen."""
        return any(p.began is not None for p in self.phases)

    @property
    def current(self) -> int | None:
        """The index of the running phase."""
        return next((i for i, p in enumerate(self.phases) if p.state == "running"), None)

    @property
    def fraction(self) -> float:
        """Finished phases, and the part of the running one that is known, of all phases."""
        done = sum(1.0 for p in self.phases if p.state == "done")
        running = sum(p.fraction or 0.0 for p in self.phases if p.state == "running")
        return (done + running) / len(self.phases)

    def elapsed(self, phase: Phase, now: float) -> float | None:
        """Seconds that ``phase`` took, or has taken by ``now``; None when the log has no times."""
        if phase.began is None:
            return None
        if phase.ended is not None:
            return max(0.0, phase.ended - phase.began)
        if self.stamp is None or self.line_at is None:
            return None
        return max(0.0, self.stamp - phase.began + now - self.line_at)

    def total(self, now: float) -> float | None:
        """Seconds from the first phase's beginning to the last one's end, or to ``now``."""
        began = [p.began for p in self.phases if p.began is not None]
        if not began:
            return None
        ended = [p.ended for p in self.phases]
        if all(e is not None for e in ended):
            return max(0.0, max(e for e in ended if e is not None) - min(began))
        if self.stamp is None or self.line_at is None:
            return None
        return max(0.0, self.stamp - min(began) + now - self.line_at)


# What a line tells: the phase that it begins. Every phase before that one is over.
_BEGINS: tuple[tuple[str, str], ...] = (
    ("Converting ", "convert"),
    ("server_args=", "start"),
    ("Init parallel begin", "init"),
    ("Load weight begin", "weights"),
    ("Load weight end", "kv cache"),
    ("Capture target ", "graphs"),
    ("Capture cuda graph begin", "graphs"),
    ("Engine startup timings", "http"),
    ("Application startup complete", "warm-up"),
)
_FAILURES = ("Scheduler hit an exception", "SIGQUIT received", "Traceback (most recent call last)")
_FATAL = re.compile(
    r"Scheduler hit an exception|SIGQUIT received|Subprocess \S{1,64} \(pid=\d{1,10}\) crashed"
)
_FIRED = "The server is fired up and ready to roll"


def read_line(loading: Loading, line: str, now: float) -> Loading:
    """Take in one cleaned line of the server's log, which came at ``now``."""
    stamp, text = split_stamp(line)
    loading = replace(loading, line_at=now, stamp=loading.stamp if stamp is None else stamp)
    shards = _SHARDS.findall(text)
    if shards:
        # A redrawn progress bar can leave several states in one line; the last one counts.
        return _progress(loading, "weights", min(1.0, int(shards[-1]) / 100))
    if text.startswith(_FIRED):
        return replace(_enter(loading, None), fired=True)
    if text.startswith(_FAILURES) and not loading.fired:
        return replace(loading, failed=text)
    begins = next((name for start, name in _BEGINS if text.startswith(start)), None)
    if begins is None:
        return replace(loading, last=text) if text else loading
    if begins in ("convert", "start") and (loading.fired or loading.failed or _seen(loading, begins)):
        loading = Loading(stamp=loading.stamp, line_at=now)  # another server began to load into the same log
    return _enter(loading, begins)


def fatal(line: str) -> bool:
    """Whether a cleaned line of the log says that the server is dying, loading or serving.

    Only the server's own stamp at the beginning, with the words right behind it, counts: a request that is
    logged may quote them anywhere else.
    """
    stamp, text = split_stamp(line)
    return stamp is not None and _FATAL.match(text) is not None


def split_stamp(line: str) -> tuple[float | None, str]:
    """The time of a line (seconds, by a clock without a zone) and what follows it."""
    m = _STAMP.match(line)
    if m is None:
        return None, line
    try:
        when = datetime.datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        return None, line
    return when.timestamp(), _LEVEL.sub("", line[m.end() :])


def _seen(loading: Loading, name: str) -> bool:
    return any(p.name == name and p.began is not None for p in loading.phases)


def _enter(loading: Loading, name: str | None) -> Loading:
    """End every phase before ``name`` and begin it; None ends all."""
    loading = _with_optional(loading, name)
    names = [p.name for p in loading.phases]
    index = len(names) if name is None else names.index(name)
    at = loading.stamp if loading.stamp is not None else loading.line_at
    if name is not None and any(p.began is not None for p in loading.phases[index + 1 :]):
        return loading  # a line of an earlier phase, come late: nothing goes backwards

    def change(i: int, phase: Phase) -> Phase:
        if i < index and phase.ended is None:
            return replace(phase, began=phase.began if phase.began is not None else at, ended=at)
        if i == index and phase.began is None:
            return replace(phase, began=at)
        return phase

    return _map(loading, change)


def _progress(loading: Loading, name: str, fraction: float) -> Loading:
    loading = _enter(loading, name)
    return _map(
        loading, lambda _, p: replace(p, fraction=fraction) if p.name == name and p.ended is None else p
    )


def _map(loading: Loading, change: Callable[[int, Phase], Phase]) -> Loading:
    return replace(loading, phases=tuple(change(i, p) for i, p in enumerate(loading.phases)))


def _with_optional(loading: Loading, name: str | None) -> Loading:
    if name not in OPTIONAL or name in {p.name for p in loading.phases}:
        return loading
    names = {p.name: p for p in loading.phases} | {name: Phase(name)}
    return replace(loading, phases=tuple(names[n] for n in PHASES if n in names))
