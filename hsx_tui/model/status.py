"""One word for how the link, the server and the run stand, and whether what is known is fresh. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.wire.verbs import EXIT_ABORTED
from hsx_tui.model import loading as loading_of
from hsx_tui.model.eta import Eta, estimate
from hsx_tui.model.messages import Link
from hsx_tui.model.runs import is_live

if TYPE_CHECKING:
    from hsx_tui.model.state import ConsoleState

STALE_INTERVALS = 3


class Tone(enum.StrEnum):
    """What a word means for the user; a symbol and a colour are chosen by it."""

    OK = "ok"
    BUSY = "busy"
    WARN = "warn"
    BAD = "bad"
    IDLE = "idle"
    WAIT = "wait"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Status:
    """A word in capitals and its tone."""

    tone: Tone
    word: str


@dataclass(frozen=True, slots=True)
class Freshness:
    """``age``: seconds since the last good sample, None before the first; ``stale``: too old to be
    believed.
    """

    age: float | None
    stale: bool


def freshness(seen_at: float | None, now: float, interval: float) -> Freshness:
    """How old something is that should come every ``interval`` seconds."""
    if seen_at is None:
        return Freshness(None, False)
    age = max(0.0, now - seen_at)
    return Freshness(age, age > STALE_INTERVALS * interval)


def link_status(state: ConsoleState) -> Status:
    """The link to the host."""
    return {
        Link.CONNECTED: Status(Tone.OK, "CONNECTED"),
        Link.CONNECTING: Status(Tone.BUSY, "CONNECTING"),
        Link.LOST: Status(Tone.BAD, "LOST"),
    }[state.connection.link]


def server_status(state: ConsoleState, now: float, interval: float) -> Status:
    """The inference server; UNKNOWN when nothing recent is known of it."""
    server, loading = state.server, state.server.loading
    if freshness(server.seen_at, now, interval).stale:
        return Status(Tone.UNKNOWN, "UNKNOWN")
    if server.ready:
        return Status(Tone.OK, "HEALTHY")
    if loading.failed:
        return Status(Tone.BAD, "FAILED")
    if loading.begun and not loading.fired:
        if loading.line_at is not None and now - loading.line_at > loading_of.QUIET_AFTER_S:
            return Status(Tone.WARN, "NO PROGRESS")
        return Status(Tone.BUSY, f"LOADING {loading.fraction:.0%}")
    if server.configured:
        return (
            Status(Tone.BAD, "NOT READY") if server.error or loading.fired else Status(Tone.WAIT, "WAITING")
        )
    return Status(Tone.WAIT, "WAITING")


def run_eta(state: ConsoleState, now: float) -> Eta:
    """The time that the run still takes. Only a run at work has one, and only such a run can stall."""
    run = state.run
    if not is_live(run) or run.paused:
        return Eta("done", 0.0, 0.0) if _complete(state) else Eta("unknown")
    return estimate(run.track, state.clock.host_now(now))


def _complete(state: ConsoleState) -> bool:
    progress = state.run.progress
    return progress is not None and progress.total > 0 and progress.pending == 0


def run_status(state: ConsoleState, now: float, interval: float) -> Status:
    """The run that is followed."""
    run = state.run
    if not run.run:
        return Status(Tone.WAIT, "WAITING")
    if is_live(run) or (run.state == "" and not run.finished):
        if freshness(run.seen_at, now, interval).stale:
            return Status(Tone.UNKNOWN, "UNKNOWN")
        if run.paused:
            return Status(Tone.WAIT, "PAUSED")
        if run.state == "orphaned":
            return Status(Tone.WARN, "ORPHANED")
        if run_eta(state, now).kind == "stalled":
            return Status(Tone.WARN, "STALLED")
        return Status(Tone.BUSY, "STARTING") if run.state == "starting" else Status(Tone.OK, "RUNNING")
    return _ended(state)


def _ended(state: ConsoleState) -> Status:
    run, progress = state.run, state.run.progress
    lost = {"lost-killed": "KILLED", "lost-reboot": "LOST BY REBOOT"}.get(run.state)
    if _complete(state) and progress is not None:
        # All rows are accounted for on disk, however the process ended.
        if progress.quarantined:
            return Status(Tone.WARN, f"DONE, {progress.quarantined} QUARANTINED")
        return Status(Tone.OK, "DONE")
    if lost:
        return Status(Tone.BAD, lost)
    if run.state == "never-started":
        return Status(Tone.IDLE, "NOT STARTED")
    if run.exit_code == EXIT_ABORTED:
        return Status(Tone.IDLE, "ABORTED")
    if run.exit_signal is not None:
        return Status(Tone.BAD, f"ENDED BY SIGNAL {run.exit_signal}")
    if run.exit_code not in (None, 0):
        return Status(Tone.BAD, f"FAILED {run.exit_code}")
    return Status(Tone.IDLE, "ENDED")


def can_start(state: ConsoleState) -> str:
    """Why a run cannot be started now; "" when it can."""
    if state.connection.link is not Link.CONNECTED:
        return "no link to the host"
    if is_live(state.run):
        return "it is running"
    if state.run.state not in ("", "never-started"):
        return "it has been started: resume it"
    return ""


def can_resume(state: ConsoleState) -> str:
    """Why the run cannot be resumed now; "" when it can."""
    if state.connection.link is not Link.CONNECTED:
        return "no link to the host"
    if is_live(state.run):
        return "it is running"
    if state.run.state in ("", "never-started"):
        return "it has not been started"
    return "every row is done" if _complete(state) else ""


def can_abort(state: ConsoleState) -> str:
    """Why the run cannot be aborted now; "" when it can."""
    if state.connection.link is not Link.CONNECTED:
        return "no link to the host"
    return "" if is_live(state.run) else "it is not running"
