"""Recordings and log lines."""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING

import pytest

from engine.wire.errors import Refused, UsageError
from hsx_tui.model.loglines import LogLine, foreign, log_lines
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
from hsx_tui.model.reduce import reduce
from hsx_tui.model.replay import KINDS, Recorder, ReplayDriver, from_json, load, to_json
from hsx_tui.model.state import ConsoleState
from hsx_tui.model.status import Tone
from tests.tui import scenes

if TYPE_CHECKING:
    from pathlib import Path

EVERY: list[Message] = [
    Connection(Link.LOST, "cause", 8.0, "h", 3.5, 2),
    HostFactsSeen({"at": "x", "cpus": 4}),
    RunStatusSeen({"run": "demo"}),
    EngineEvent("demo", {"seq": 1, "at": "x", "type": "phase"}, 2),
    EventsGap("demo", 2, 5),
    ServerLog(["a", "b\x1b"], "engine"),
    LogGap("server", 5, 41.0),
    Step("dataset", StepState.ACTIVE, "d"),
    Notice("error", "no"),
]


def test_every_message_goes_through_a_file_unchanged() -> None:
    assert {type(m).__name__ for m in EVERY} == set(KINDS)
    for message in EVERY:
        assert from_json(json.loads(json.dumps(to_json(message, 1.5)))) == (1.5, message)


def test_a_recorder_writes_what_load_reads(tmp_path: Path) -> None:
    times = iter([10.0, 10.0, 11.25])
    seen: list[Message] = []
    out = io.StringIO()
    record = Recorder(out, seen.append, lambda: next(times))
    for message in EVERY[:2]:
        record(message)
    path = tmp_path / "run.jsonl"
    path.write_text(out.getvalue())
    assert load(path) == [(0.0, EVERY[0]), (1.25, EVERY[1])]
    assert seen == EVERY[:2]


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", '{"t": 1, "message": "Nonsense"}', '{"message": "Notice"}',
     '{"t": 0, "message": "Notice"}', '{"t": 0, "message": "Step", "name": "a", "state": "odd"}'],
)  # fmt: skip
def test_a_bad_recording_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"t": 0, "message": "Notice", "level": "info", "text": "ok"}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        load(path)


def test_a_missing_recording_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "none.jsonl")


async def test_a_replay_refuses_to_act() -> None:
    driver = ReplayDriver(scenes.running(3), speed=math.inf)
    for call in (driver.start, driver.abort, driver.resume):
        with pytest.raises(Refused, match="recording"):
            await call()


def test_log_lines_find_the_time_and_the_level() -> None:
    assert foreign("[2026-11-30 20:28:52 TP0] Load weight begin.", "sglang") == LogLine(
        "sglang", "TP0 Load weight begin.", "20:28:52"
    )
    assert foreign(
        "2026-11-30T12:00:07Z WARNING sample 81: got 1283 tokens, expected 4710", "extract"
    ) == LogLine("extract", "WARNING sample 81: got 1283 tokens, expected 4710", "12:00:07", Tone.WARN)
    assert foreign("[12] 13 extracted", "extract") == LogLine("extract", "[12] 13 extracted")
    assert foreign("Traceback (most recent call last):", "sglang").tone is Tone.BAD


def test_the_link_is_logged_when_it_changes_and_not_at_every_retry() -> None:
    state = ConsoleState()
    lost = Connection(Link.LOST, "timeout", 2.0)
    assert [line.text for line in log_lines(state, lost, "12:00:00")] == ["link lost: timeout"]
    state = reduce(state, lost, 0.0)
    assert log_lines(state, Connection(Link.LOST, "timeout", 4.0), "12:00:02") == []


def test_a_gap_in_a_log_is_a_line() -> None:
    (line,) = log_lines(ConsoleState(), LogGap("server", 120, 41.0), "12:00:00")
    assert line.text == "-- 41 s gap, 120 lines skipped --"


@pytest.mark.parametrize("message", EVERY)
def test_no_line_carries_an_escape(message: Message) -> None:
    assert all("\x1b" not in line.text for line in log_lines(ConsoleState(), message, "12:00:00"))
