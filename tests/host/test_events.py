"""events.jsonl has no gap over any crash."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.host.events import EventLog
from engine.wire.errors import LockedError, SpecError
from engine.wire.events import MAX_LINE, decode

from .support import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def sequence(path: Path) -> list[int]:
    """The sequence numbers that a reader sees: complete lines that are events."""
    numbers = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            numbers.append(decode(line)["seq"])
        except SpecError:
            continue
    return numbers


def write(path: Path, *texts: str) -> list[int]:
    log = EventLog(path)
    try:
        return [log.emit("warning", text=text) for text in texts]
    finally:
        log.close()


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert write(path, "a", "b") == [1, 2]
    assert write(path, "c") == [3]
    assert sequence(path) == [1, 2, 3]
    assert path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), min_size=1, max_size=3), text=st.text(max_size=40))
def test_any_torn_end_is_closed_and_leaves_no_gap(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], text: str
) -> None:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    write(path, text, text)
    for cut in cuts:
        data = path.read_bytes()
        path.write_bytes(data[: max(0, len(data) - cut)])
        write(path, text, text)
        seen = sequence(path)
        assert seen == list(range(1, len(seen) + 1))


def test_a_last_event_that_lacks_only_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "a")
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert write(path, "b") == [2]
    assert sequence(path) == [1, 2]


def test_the_last_event_is_found_behind_much_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "x" * 300_000)
    with path.open("ab") as file:
        file.write(b"\xff" * 200_000 + b"\n" + b"{" * 100_000)
    assert write(path, "b") == [2]
    assert sequence(path) == [1, 2]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(LockedError, match="another process writes"):
        EventLog(tmp_path / "events.jsonl")
    log.close()


def test_what_is_no_event_is_refused_and_uses_no_number(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(SpecError, match="unknown event type"):
        log.emit("gossip")
    with pytest.raises(SpecError, match="too long"):
        log.emit("warning", text="x" * MAX_LINE)
    assert log.emit("warning", text="") == 1
    log.close()


LIMITED = """
import json, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from engine.host.events import EventLog
log = EventLog(Path(sys.argv[2]))
log.emit("warning", text="first")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
failed = 0
for _ in range(3):
    try: log.emit("warning", text="second")
    except OSError: failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.emit("warning", text="third")
print(failed, log.seq)
"""


@pytest.mark.parametrize("room", [0, 1, 20, 71, 72, 73])
def test_a_full_disk_costs_no_number(tmp_path: Path, room: int) -> None:
    """The limit makes write() return short, as a full disk does."""
    path = tmp_path / "events.jsonl"
    first = len(json.dumps({"seq": 1, "at": "2026-01-01T00:00:00.000Z", "type": "warning", "text": "first"},
                           separators=(",", ":"))) + 1  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(ROOT), str(path), str(first + room)],
        capture_output=True, check=True, timeout=30,
    )  # fmt: skip
    failed, last = map(int, done.stdout.split())
    seen = sequence(path)
    assert failed >= 2
    assert seen == list(range(1, last + 1))
    assert "third" in path.read_text().splitlines()[-1]


def test_a_number_that_json_lacks_is_told_as_a_word(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("mismatch", row=1, evidence={"error": math.inf, "least": [-math.inf, math.nan, 1.5]})
    log.close()
    assert decode(path.read_bytes())["evidence"] == {"error": "inf", "least": ["-inf", "nan", 1.5]}


def test_a_shard_and_the_end_are_durable_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure would leave cannot be seen from here, only that it was asked for in time."""
    path = tmp_path / "events.jsonl"
    synced = []
    fsync = os.fsync

    def watch(fd: int) -> None:
        fsync(fd)
        synced.append(decode(path.read_bytes().splitlines()[-1])["type"])

    monkeypatch.setattr(os, "fsync", watch)
    log = EventLog(path)
    for kind in ("run_started", "progress", "shard_committed", "sample_done", "run_finished"):
        log.emit(kind)
    log.close()
    assert synced == ["shard_committed", "run_finished"]
