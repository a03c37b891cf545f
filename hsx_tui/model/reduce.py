"""The reducer: state and message in, state out. Pure; never raises on what a host sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hsx_tui.model import facts as facts_of
from hsx_tui.model import runs, warn
from hsx_tui.model.fields import count, epoch, items, text
from hsx_tui.model.loading import read_line
from hsx_tui.model.messages import (
    Connection,
    EngineEvent,
    EventsGap,
    HostFactsSeen,
    Link,
    LogGap,
    Message,
    Notice,
    RunStatusSeen,
    ServerLog,
    Step,
)
from hsx_tui.model.state import Clock, ConnectionState, ConsoleState, DemoStep, Problem, Warn
from hsx_tui.text import clean

if TYPE_CHECKING:
    from engine.wire.errors import HsxError

MAX_RUNS = 200
MAX_STEPS = 32


def reduce(state: ConsoleState, message: Message, now: float) -> ConsoleState:
    """The state after ``message``, which came at ``now`` (the console's monotonic seconds)."""
    return _REDUCERS[type(message)](state, message, now)


def dismiss(state: ConsoleState) -> ConsoleState:
    """The state after the problem on screen was read."""
    return replace(state, problem=None)


def with_problem(state: ConsoleState, error: HsxError) -> ConsoleState:
    """The state in which ``error`` is on screen until it is dismissed."""
    return replace(state, problem=Problem(clean(error.what), clean(error.why), clean(error.next_step)))


def _connection(state: ConsoleState, message: Connection, now: float) -> ConsoleState:
    old = state.connection
    new = ConnectionState(
        link=message.state,
        host=clean(message.host, 80) or old.host,
        cause=clean(message.cause, 300),
        since=old.since if old.link is message.state and old.since is not None else now,
        retry_at=None if message.retry_in_s is None else now + message.retry_in_s,
        rtt_ms=message.rtt_ms
        if message.rtt_ms is not None or message.state is not Link.CONNECTED
        else old.rtt_ms,
        attempt=message.attempt,
    )
    return replace(state, connection=new)


def _facts(state: ConsoleState, message: HostFactsSeen, now: float) -> ConsoleState:
    facts = message.facts
    at = text(facts.get("at"), 40)
    host_epoch = epoch(at)
    run = state.run
    for status in items(facts.get("runs"), MAX_RUNS):
        # Which run is followed is for the services to say (RunStatusSeen, EngineEvent), not for a list of
        # all.
        if isinstance(status, Mapping) and run.run and text(status.get("run"), 40) == run.run:
            run = runs.take_status(run, status, now, at)
    return replace(
        state,
        host=facts_of.host_state(facts, now),
        server=facts_of.server_state(state.server, facts, now),
        run=run,
        # Facts are fresh by nature: they set the clock, also when the host's clock was put back.
        clock=state.clock if host_epoch is None else Clock(host_epoch - now),
    )


def _status(state: ConsoleState, message: RunStatusSeen, now: float) -> ConsoleState:
    host_epoch = epoch(message.status.get("now"))
    return replace(
        state,
        run=runs.take_status(state.run, message.status, now),
        clock=state.clock if host_epoch is None else Clock(host_epoch - now),
    )


def _event(state: ConsoleState, message: EngineEvent, now: float) -> ConsoleState:
    run, event = state.run, message.event
    name, seq = clean(message.run, 40), count(event.get("seq"))
    if seq is None or (run.run and name != run.run):
        return state
    if seq <= run.last_seq:
        return state  # read twice, after a link was made anew
    state = replace(state, run=replace(run, run=name, last_seq=seq), clock=_seen(state.clock, event, now))
    if seq > run.last_seq + 1:
        state = _missing(state, run.last_seq + 1, seq - 1, now)
    return replace(
        state,
        run=runs.take_event(state.run, event, now, message.attempt),
        warnings=warn.take_event(state.warnings, event, now),
    )


def _seen(clock: Clock, event: Mapping[str, Any], now: float) -> Clock:
    """An event is at least as old as its time says, so it can only show that the host's clock is further
    on.
    """
    at = epoch(event.get("at"))
    if at is None or (clock.offset is not None and clock.offset >= at - now):
        return clock
    return Clock(at - now)


def _missing(state: ConsoleState, first: int, last: int, now: float) -> ConsoleState:
    gaps = (*state.run.gaps, (first, last))[-runs.MAX_GAPS :]
    what = f"event {first} is" if first == last else f"events {first} to {last} are"
    said = Warn("GAP", f"{what} missing: counts come right with the next progress, single warnings do not")
    return replace(state, run=replace(state.run, gaps=gaps), warnings=warn.add(state.warnings, said, now))


def _gap(state: ConsoleState, message: EventsGap, now: float) -> ConsoleState:
    run, first, last = state.run, message.first_missing, message.last_missing
    if (run.run and clean(message.run, 40) != run.run) or last <= run.last_seq or first > last:
        return state
    first = max(first, run.last_seq + 1)
    return _missing(replace(state, run=replace(run, last_seq=last)), first, last, now)


def _server_log(state: ConsoleState, message: ServerLog, now: float) -> ConsoleState:
    server = state.server
    if message.source == "server":
        loading = server.loading
        for line in message.lines:
            loading = read_line(loading, clean(line), now)
        server = replace(server, loading=loading)
    log = replace(state.log, lines=state.log.lines + len(message.lines), seen_at=now)
    return replace(state, server=server, log=log)


def _log_gap(state: ConsoleState, message: LogGap, now: float) -> ConsoleState:
    return replace(state, log=replace(state.log, lines=state.log.lines + 1, seen_at=now))


def _step(state: ConsoleState, message: Step, now: float) -> ConsoleState:
    name = clean(message.name, 40)
    old = next((s for s in state.demo_phase if s.name == name), None)
    since = old.since if old is not None and old.state is message.state else now
    step = DemoStep(name, message.state, clean(message.detail, 200), since)
    if old is None:
        return replace(state, demo_phase=(*state.demo_phase, step)[:MAX_STEPS])
    return replace(state, demo_phase=tuple(step if s.name == name else s for s in state.demo_phase))


def _notice(state: ConsoleState, message: Notice, now: float) -> ConsoleState:
    said = clean(message.text, 300)
    log = replace(state.log, lines=state.log.lines + 1, seen_at=now)
    if message.level == "error":
        return replace(state, problem=Problem(said), log=log)
    if message.level == "warning":
        return replace(state, warnings=warn.add(state.warnings, Warn("WARNING", said), now), log=log)
    return replace(state, notice=said, log=log)


_REDUCERS: dict[type, Callable[[ConsoleState, Any, float], ConsoleState]] = {
    Connection: _connection,
    HostFactsSeen: _facts,
    RunStatusSeen: _status,
    EngineEvent: _event,
    EventsGap: _gap,
    ServerLog: _server_log,
    LogGap: _log_gap,
    Step: _step,
    Notice: _notice,
}

__all__ = ["dismiss", "reduce", "with_problem"]
