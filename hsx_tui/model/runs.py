"""RunStatus objects and engine events into the state of the run. Never raises on odd ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.wire.verbs import LIVE, STATES
from hsx_tui.model.eta import Track, observe
from hsx_tui.model.fields import count, epoch, mapping, number, text
from hsx_tui.model.state import Progress, RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_GAPS = 32


def take_status(run: RunState, status: Mapping[str, Any], now: float, at_iso: str = "") -> RunState:
    """The run as a RunStatus tells it. The status of another run is only taken where none is followed yet."""
    name = text(status.get("run"), 40)
    if not name or (run.run and name != run.run):
        return run
    attempt = count(status.get("attempt"))
    if run.attempt is not None and attempt is not None and attempt < run.attempt:
        return run  # an answer that was overtaken
    state = text(status.get("state"), 20)
    ended = mapping(status.get("exit"))
    if attempt != run.attempt and run.attempt is not None:
        run = _new_attempt(run)
    return replace(
        run,
        run=name,
        seen_at=now,
        at_iso=at_iso or text(status.get("now"), 40) or run.at_iso,
        attempt=attempt if attempt is not None else run.attempt,
        state=state if state in STATES else run.state,
        pid=count(status.get("pid")),
        started_iso=text(status.get("started_at"), 40),
        heartbeat_age_s=number(status.get("heartbeat_age_s")),
        exit_code=_exit(ended.get("rc")),
        exit_signal=_exit(ended.get("signal")),
        exit_error=text(ended.get("error")) or run.exit_error,
        output=text(status.get("output"), 200),
    )


def _exit(value: Any) -> int | None:
    got = number(value)
    return None if got is None else int(got)


def _new_attempt(run: RunState) -> RunState:
    """What belongs to one attempt only is forgotten; the counts stay until the new attempt tells its own."""
    return replace(
        run,
        track=Track(),
        paused=False,
        finished=False,
        phase="",
        phase_detail="",
        exit_code=None,
        exit_signal=None,
        exit_error="",
        resumed_at_fraction=None,
    )


def is_live(run: RunState) -> bool:
    """The engine is, as far as is known, at work."""
    return run.state in LIVE and not run.finished


def take_event(run: RunState, event: Mapping[str, Any], now: float, attempt: int | None) -> RunState:
    """The run after one event that is known to be the next one (``reduce`` has looked at its seq)."""
    kind = event.get("type")
    run = replace(run, seen_at=now, at_iso=text(event.get("at"), 40) or run.at_iso)
    if attempt is not None:
        run = replace(run, attempt=max(attempt, run.attempt or 0))
    if kind == "run_started":
        before = run.progress
        run = _new_attempt(run)
        number_of = count(event.get("attempt"))
        if number_of is not None:
            run = replace(run, attempt=number_of)
        # Rows that wait for a shard were lost with the attempt that held them.
        return replace(run, progress=replace(before, buffered=0) if before else None, phase="starting")
    if kind == "phase":
        return replace(
            run,
            phase=text(event.get("phase") or event.get("name"), 60),
            phase_detail=text(event.get("detail"), 120),
        )
    if kind in ("preflight", "canary"):
        return replace(run, phase=str(kind), phase_detail="")
    if kind == "progress":
        return _take_progress(run, event)
    if kind == "paused":
        return replace(run, paused=True, phase="paused", phase_detail=text(event.get("reason"), 200))
    if kind == "resumed":
        # The time of a pause belongs to no rate.
        return replace(run, paused=False, track=Track(), phase="extract", phase_detail="")
    if kind == "run_finished":
        return _finished(run, event)
    return run


def _finished(run: RunState, event: Mapping[str, Any]) -> RunState:
    """The last event repeats the counts but not the rates; of a failed run it tells why."""
    error = mapping(event.get("error"))
    said = ". ".join(s for s in (text(error.get(k)) for k in ("what", "why", "next")) if s)
    progress = run.progress
    if progress is not None or count(event.get("done")) is not None:
        old = progress or Progress()
        progress = replace(
            old,
            buffered=0,
            done=_or(count(event.get("done")), old.done),
            quarantined=_or(count(event.get("quarantined")), old.quarantined),
            pending=_or(count(event.get("pending")), old.pending),
        )
    outcome = text(event.get("outcome"), 20)
    return replace(
        run, finished=True, paused=False, phase=outcome, phase_detail="", progress=progress,
        exit_error=said or run.exit_error,
    )  # fmt: skip


def _take_progress(run: RunState, event: Mapping[str, Any]) -> RunState:
    old = run.progress or Progress()
    new = Progress(
        done=_or(count(event.get("done")), old.done),
        buffered=count(event.get("buffered")) or 0,
        quarantined=_or(count(event.get("quarantined")), old.quarantined),
        pending=_or(count(event.get("pending")), old.pending),
        tokens=count(event.get("tokens")),
        tokens_total=count(event.get("tokens_total")) or old.tokens_total,
        samples_per_s=number(event.get("samples_per_s")),
        tok_per_s=number(event.get("tok_per_s")),
        req_time_s=number(event.get("req_time_s")),
        bytes=number(event.get("bytes")),
        errors=count(event.get("errors")) or 0,
    )
    fraction = run.resumed_at_fraction
    if fraction is None and not run.track.points and new.total:
        fraction = new.finished / new.total
    return replace(run, progress=new, track=_track(run.track, new, event), resumed_at_fraction=fraction)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _track(track: Track, progress: Progress, event: Mapping[str, Any]) -> Track:
    at = epoch(event.get("at"))
    if at is None:
        return track
    left = progress.total - progress.finished
    if progress.tokens is not None and progress.tokens_total and progress.tokens <= progress.tokens_total:
        # When the last row is finished nothing is left, whatever quarantined rows leave of the sum of tokens.
        tokens_left = 0 if left == 0 else progress.tokens_total - progress.tokens
        return observe(track, at, progress.tokens, tokens_left, "tokens")
    return observe(track, at, progress.finished, left, "samples")
