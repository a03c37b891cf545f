"""The reducer: events in order, gaps, repeats, resumes, ages; and it never raises on what a host may send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.errors import Refused
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
    StepState,
)
from hsx_tui.model.reduce import dismiss, reduce, with_problem
from hsx_tui.model.state import MAX_WARNINGS, ConsoleState
from hsx_tui.model.status import (
    Tone,
    can_abort,
    can_resume,
    can_start,
    freshness,
    run_eta,
    run_status,
    server_status,
)
from tests.tui import scenes
from tests.tui.scenes import event, facts, mismatch, progress, status


def play(
    recording: scenes.Recording, state: ConsoleState | None = None, begin: float = 1000.0
) -> ConsoleState:
    state = state or ConsoleState()
    for t, message in recording:
        state = reduce(state, message, begin + t)
    return state


def at_once(messages: list[Message], now: float = 1000.0) -> ConsoleState:
    return play([(0.0, m) for m in messages], begin=now)


def test_a_run_is_followed() -> None:
    state = play(scenes.running(30))
    run = state.run
    assert run.progress is not None
    assert (run.progress.done, run.progress.buffered, run.progress.pending) == (24, 5, 56)
    assert run.progress.finished == 29
    assert run.progress.total == scenes.ROWS
    assert run.attempt == 1
    assert run_status(state, 1029.0, 2.0).word == "RUNNING"
    eta = run_eta(state, 1029.0)
    assert eta.seconds == pytest.approx(scenes.ROWS - 29, rel=0.1)
    assert state.warnings.mismatches == 2
    assert [w.cause for w in state.warnings.recent] == ["swapped", "stale"]


def test_a_repeated_event_is_ignored() -> None:
    once = at_once([event(1, 0, "run_started"), mismatch(2, 0, 5, "stale")])
    again = reduce(once, mismatch(2, 0, 5, "stale"), 1001.0)
    assert again.warnings.mismatches == 1
    assert reduce(again, event(1, 0, "run_started"), 1001.0).run == again.run


def test_a_gap_in_the_sequence_is_shown() -> None:
    state = at_once([event(1, 0, "run_started"), progress(5, 1, 3)])
    assert state.run.gaps == ((2, 4),)
    assert state.warnings.recent[-1].word == "GAP"
    assert "events 2 to 4" in state.warnings.recent[-1].text
    assert state.run.progress is not None and state.run.progress.done == 3


def test_a_gap_that_the_services_know_is_shown_once() -> None:
    state = at_once([event(1, 0, "run_started"), EventsGap("demo", 2, 4), progress(5, 1, 3)])
    assert state.run.gaps == ((2, 4),)
    assert state.warnings.total == 1
    assert reduce(state, EventsGap("demo", 2, 4), 1001.0).run.gaps == ((2, 4),)


def test_events_and_status_of_another_run_change_nothing() -> None:
    state = play(scenes.running(5))
    other = EngineEvent("other", {"seq": 99, "at": scenes.iso(9), "type": "progress", "done": 1})
    assert reduce(state, other, 1010.0).run == state.run
    assert reduce(state, RunStatusSeen({"run": "other", "state": "exited"}), 1010.0).run == state.run


def test_after_a_resume_the_rate_counts_only_the_new_attempt() -> None:
    first = scenes.running(40)
    ended = {"rc": 75, "signal": None, "stage": "TERM", "reaped": True, "error": None, "at": scenes.iso(41)}
    resumed: scenes.Recording = [(41.0, status(41, "exited", ended=ended))]
    # An hour later: 32 rows were durable, 7 buffered ones were lost; it now makes half a row a second.
    begin = 3600.0
    resumed += [(begin, status(begin, attempt=2)), (begin, event(100, begin, "run_started", attempt=2))]
    for i in range(21):
        resumed.append((begin + i, progress(101 + i, begin + i, done=32, buffered=i // 2)))
    state = play(first + resumed)
    assert state.run.resumed_at_fraction == pytest.approx(32 / 80)
    eta = run_eta(state, 1000.0 + begin + 20)
    assert eta.kind == "running"
    assert eta.seconds == pytest.approx((80 - 42) / 0.5, rel=0.15)


def test_between_the_attempts_the_run_says_aborted_and_can_be_resumed() -> None:
    ended = {"rc": 75, "signal": None, "stage": "TERM", "reaped": True, "error": None, "at": scenes.iso(41)}
    state = play([*scenes.running(40), (41.0, status(41, "exited", ended=ended))])
    assert run_status(state, 1041.0, 2.0).word == "ABORTED"
    assert can_resume(state) == ""
    assert can_abort(state) != ""
    assert can_start(state) != ""


def test_a_finished_run_is_done_and_keeps_its_numbers() -> None:
    last = event(200, 80, "run_finished", outcome="complete", dataset=80, done=80, quarantined=0, pending=0)
    state = play([*scenes.running(40), (80.0, last), (80.0, status(80, "exited", ended={"rc": 0}))])
    assert run_status(state, 1080.0, 2.0).word == "DONE"
    assert run_eta(state, 1080.0).kind == "done"
    assert state.run.progress is not None
    assert state.run.progress.bytes == 39 * 3_400_000
    assert can_resume(state) == "every row is done"


def test_quarantined_rows_count_as_finished_and_are_said() -> None:
    last = event(200, 80, "run_finished", outcome="complete", done=78, quarantined=2, pending=0)
    state = play([*scenes.running(40), (80.0, last)])
    status_ = run_status(state, 1080.0, 2.0)
    assert (status_.tone, status_.word) == (Tone.WARN, "DONE, 2 QUARANTINED")
    assert state.run.progress is not None and state.run.progress.finished == 80


def test_a_failed_run_says_why() -> None:
    error = {
        "kind": "PreflightError",
        "what": "too little room",
        "why": "9 GB are needed",
        "next": "free some",
    }
    state = at_once(
        [
            event(1, 0, "run_started", attempt=1),
            event(
                2,
                0,
                "preflight",
                checks=[{"name": "disk", "ok": False, "detail": "1 GB", "next": "free some"}],
            ),
            event(3, 0, "run_finished", outcome="failed", error=error),
            status(1, "exited", ended={"rc": 5}),
        ]
    )
    assert run_status(state, 1001.0, 2.0).word == "FAILED 5"
    assert state.run.exit_error == "too little room. 9 GB are needed. free some"
    assert state.warnings.recent[-1].word == "PREFLIGHT FAILED"


@pytest.mark.parametrize(
    ("state_word", "ended", "want"),
    [
        ("lost-killed", None, "KILLED"),
        ("lost-reboot", None, "LOST BY REBOOT"),
        ("exited", {"rc": None, "signal": 9}, "ENDED BY SIGNAL 9"),
        ("exited", {"rc": 3}, "FAILED 3"),
        ("orphaned", None, "ORPHANED"),
        ("starting", None, "STARTING"),
        ("never-started", None, "NOT STARTED"),
    ],
)
def test_each_state_of_a_run_has_its_word(state_word: str, ended: Any, want: str) -> None:
    state = play([*scenes.running(10), (10.0, status(10, state_word, ended=ended))])
    assert run_status(state, 1010.0, 2.0).word == want


def test_a_stall_is_said_and_ends() -> None:
    state = play(scenes.running(30))
    for second in range(30, 90, 2):  # facts and statuses go on; nothing is finished
        state = reduce(state, facts(float(second)), 1000.0 + second)
        state = reduce(state, status(float(second)), 1000.0 + second)
    assert run_status(state, 1088.0, 2.0).word == "STALLED"
    state = reduce(state, progress(100, 90, 24, 6), 1090.0)
    assert run_status(state, 1090.0, 2.0).word == "RUNNING"


def test_a_run_that_had_stalled_before_the_console_came_is_stalled() -> None:
    backlog = [m for _, m in scenes.running(30)]
    state = at_once([*backlog, facts(600.0), status(600.0)], now=5.0)
    assert run_status(state, 5.0, 2.0).word == "STALLED"


def test_a_paused_run_is_paused_and_not_stalled() -> None:
    state = play([*scenes.running(30), (30.0, event(100, 30, "paused", reason="the server is gone"))])
    state = play([(300.0, facts(300.0)), (300.0, status(300.0))], state)
    assert run_status(state, 1300.0, 2.0).word == "PAUSED"
    assert state.run.phase_detail == "the server is gone"
    state = play([(310.0, event(101, 310, "resumed", after_s=280))], state)
    assert run_status(state, 1310.0, 2.0).word == "RUNNING"


def test_old_values_stay_and_are_stale() -> None:
    state = play(scenes.running(30))
    state = reduce(state, Connection(Link.LOST, "keepalive timeout", 8.0, attempt=3), 1031.0)
    assert state.connection.retry_at == 1039.0
    assert state.connection.host == "gpu-h200-01"
    assert state.host.cpus == 16
    assert not freshness(state.host.seen_at, 1034.0, 2.0).stale
    assert freshness(state.host.seen_at, 1034.1, 2.0).stale
    assert server_status(state, 1040.0, 2.0).tone is Tone.UNKNOWN
    assert run_status(state, 1040.0, 2.0).tone is Tone.UNKNOWN


def test_an_overtaken_status_does_not_bring_the_old_attempt_back() -> None:
    state = at_once([status(0, attempt=2)])
    assert reduce(state, status(1, "exited", attempt=1), 1001.0).run == state.run


def test_steps_keep_their_order_and_their_time() -> None:
    state = play(
        [
            (0, Step("a", StepState.ACTIVE)),
            (1, Step("b", StepState.PENDING)),
            (5, Step("a", StepState.ACTIVE, "x")),
        ]
    )
    assert [s.name for s in state.demo_phase] == ["a", "b"]
    assert (state.demo_phase[0].since, state.demo_phase[0].detail) == (1000.0, "x")
    state = play([(6, Step("a", StepState.DONE))], state)
    assert state.demo_phase[0].since == 1006.0


def test_a_problem_stays_until_it_is_dismissed() -> None:
    state = with_problem(ConsoleState(), Refused("cannot start", "it\x1b[2J runs", "abort it"))
    assert state.problem is not None
    assert state.problem.why == "it runs"
    state = play(scenes.running(3), state)
    assert state.problem is not None
    assert dismiss(state).problem is None


def test_warnings_are_bounded_but_counted() -> None:
    messages: list[Message] = [mismatch(i + 1, i, i, "stale") for i in range(MAX_WARNINGS + 50)]
    state = at_once(messages)
    assert len(state.warnings.recent) == MAX_WARNINGS
    assert state.warnings.total == MAX_WARNINGS + 50


def test_a_row_quarantined_after_its_mismatch_is_one_line() -> None:
    state = at_once(
        [mismatch(1, 0, 5, "stale", "quarantined"), event(2, 0, "quarantined", row=5, cause="stale")]
    )
    assert (state.warnings.total, state.warnings.quarantined) == (1, 1)
    alone = at_once([event(1, 0, "quarantined", row=6, cause="truncated_input")])
    assert alone.warnings.recent[0].word == "QUARANTINED"


def test_everything_from_a_host_is_cleaned() -> None:
    evil = "x\x1b]52;c;AAAA\x07\x1b[2J\u202ey"
    state = at_once(
        [
            Connection(Link.LOST, evil, host=evil),
            HostFactsSeen({"hostname": evil, "at": evil, "disks": [{"path": evil, "error": evil}],
                           "gpus": [{"name": evil}], "server": {"url": evil, "error": evil,
                           "info": {"model_path": evil, "version": evil}}}),
            RunStatusSeen({"run": evil, "state": evil, "exit": {"error": evil}, "output": evil}),
            EngineEvent(evil, {"seq": 1, "at": evil, "type": "phase", "name": evil, "detail": evil}),
            EngineEvent(evil, {"seq": 2, "at": evil, "type": "mismatch", "cause": evil, "got": [evil],
                               "expected": {evil: evil}, "outcome": evil}),
            EngineEvent(evil, {"seq": 3, "at": evil, "type": "warning", "text": evil}),
            ServerLog([evil, f"Scheduler hit an exception {evil}"]),
            Step(evil, StepState.FAILED, evil),
            Notice("warning", evil),
            Notice("error", evil),
        ]
    )  # fmt: skip
    shown = repr(state)
    assert "\\x1b" not in shown
    assert "\\u202e" not in shown
    assert state.warnings.total == 3


json_value = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
        st.sampled_from(["2026-11-30T12:00:00Z", "demo", "running", "exited", "-1", "1e400"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
FACTS = ("at", "hostname", "uptime_s", "load", "cpus", "memory", "disks", "shm", "gpus", "server", "runs")
STATUS = ("run", "attempt", "state", "pid", "started_at", "heartbeat_age_s", "exit", "output", "now")
EVENT = (
    "seq", "at", "done", "buffered", "quarantined", "pending", "tokens", "tokens_total", "samples_per_s",
    "bytes", "row", "cause", "got", "expected", "outcome", "text", "name", "detail", "checks", "error",
    "attempt", "reason",
)  # fmt: skip
KINDS = (
    "run_started", "phase", "preflight", "canary", "progress", "mismatch", "quarantined", "warning", "paused",
    "resumed", "run_finished", "sample_done", "shard_committed", "newer_type",
)  # fmt: skip


def partly(real: dict[str, Any], keys: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """A real object in which some values were replaced by anything."""
    return st.dictionaries(st.sampled_from(keys), json_value, max_size=6).map(lambda odd: {**real, **odd})


def odd_event(fields: dict[str, Any], kind: str, seq: int) -> EngineEvent:
    return EngineEvent("demo", {"seq": seq, "at": "2026-11-30T12:00:00Z", **fields, "type": kind})


short = st.text(max_size=40)
odd_messages = st.one_of(
    partly(dict(facts(0.0, gpus=2).facts), FACTS).map(HostFactsSeen),
    partly(dict(status(0.0).status), STATUS).map(RunStatusSeen),
    st.builds(odd_event, partly({}, EVENT), st.sampled_from(KINDS), st.integers(0, 60)),
    st.builds(ServerLog, st.lists(short, max_size=3), st.sampled_from(["server", "engine", "console"])),
    st.builds(Connection, st.sampled_from(Link), short, st.one_of(st.none(), st.floats(0, 99))),
    st.builds(EventsGap, st.just("demo"), st.integers(-5, 60), st.integers(-5, 60)),
    st.builds(Step, short, st.sampled_from(StepState), short),
    st.builds(Notice, st.sampled_from(["info", "warning", "error"]), short),
    st.builds(LogGap, st.just("server"), st.one_of(st.none(), st.integers(0, 99)), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(odd_messages, max_size=12))
def test_no_message_breaks_the_reducer(messages: list[Message]) -> None:
    state = at_once([m for _, m in scenes.running(4)])
    for i, message in enumerate(messages):
        state = reduce(state, message, 2000.0 + i)
        run_status(state, 2000.0 + i, 2.0)
        server_status(state, 2000.0 + i, 2.0)
        run_eta(state, 2000.0 + i)
