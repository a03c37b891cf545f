"""The signs by which a dead server is known: the beacon of a real process, its log, /ready."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from engine.sources.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TAPS = [1, 3, 4]
_PROCESS = """
import json, sys, time
from pathlib import Path
from engine.capture.pythonpath.hsx_capture.beacon import write_beacon
for line in sys.stdin:
    write_beacon(Path(sys.argv[1]), json.loads(line))
    print("written", flush=True)
"""


class Capturing:
    """A process that says that it captures, and can be ended."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-c", _PROCESS, str(folder)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, text: str) -> None:
        """Write the beacon with these facts (JSON)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n"

    def end(self) -> None:
        """SIGKILL: the beacon stays behind."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def capturing(tmp_path: Path) -> Iterator[Callable[[str], Capturing]]:
    started: list[Capturing] = []

    def start(facts: str) -> Capturing:
        one = Capturing(tmp_path / "dumps")
        started.append(one)
        one.says(facts)
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()


def watch(place: Path, answers: list[bool] | None = None, **how: Any) -> Watch:
    """``answers``: what /ready says, one after the other; then always yes."""
    said = list(answers or [])

    async def ready() -> bool:
        return said.pop(0) if said else True

    found = Watch(place / "dumps", place / "server.log", ready, **how)
    found.begin()
    return found


async def test_a_process_that_is_gone_is_dead_and_one_that_failed_says_why(
    tmp_path: Path, capturing: Callable[[str], Capturing]
) -> None:
    first = capturing('{"taps": [1, 3, 4]}')
    signs = watch(tmp_path)
    assert await signs.look() == ""
    first.says('{"taps": [1, 3, 4], "failed": "ValueError: no\\u001b[31m such layer"}')
    assert await signs.look() == "the server's scheduler failed: ValueError: no?[31m such layer"
    first.end()
    assert await signs.look() == f"the server's scheduler process is gone (pid {first.process.pid})"
    capturing('{"taps": [1, 3, 4]}')
    assert "gone" in await signs.look()  # another process is no life of the first
    signs.begin()
    assert await signs.look() == ""


async def test_a_server_is_back_when_a_process_captures_the_runs_layers(
    tmp_path: Path, capturing: Callable[[str], Capturing]
) -> None:
    first = capturing('{"taps": [1, 3, 4], "model": "/models/a"}')
    signs = watch(tmp_path, taps=(1, 3, 4))
    first.end()
    assert "without the plugin" in await signs.not_back()
    other = capturing('{"taps": [1, 2, 4], "model": "/models/a"}')
    assert "captures the output of layers [1, 2, 4], the run wants [1, 3, 4]" in await signs.not_back()
    other.says('{"taps": [1, 3, 4], "model": "/models/b"}')
    assert "it serves /models/b now, and served /models/a" in await signs.not_back()
    other.says('{"taps": [1, 3, 4], "model": "/models/a", "failed": "x"}')
    assert await signs.not_back()
    other.says('{"taps": [1, 3, 4], "model": "/models/a"}')
    assert await signs.not_back() == ""


async def test_a_folder_without_any_beacon_is_no_capture(tmp_path: Path) -> None:
    """Also when there was none at the beginning: it may have died before."""
    (tmp_path / "dumps").mkdir(mode=0o700)
    assert "without the plugin" in await watch(tmp_path).not_back()


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-30 20:30:15] Scheduler hit an exception: Traceback (most recent call last):",
        "Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    ],
)
async def test_the_log_is_read_from_where_it_was(tmp_path: Path, line: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"{line}\n")  # of an earlier life
    signs = watch(tmp_path)
    assert await signs.look() == ""
    with log.open("a") as file:
        file.write("Prefill batch, #new-seq: 1\n" * 10)
    assert await signs.look() == ""
    with log.open("a") as file:
        file.write(f"\x1b[31m{line}{'x' * 5000}\n more\n")
    found = await signs.look()
    assert found.startswith("the server's log says: ")
    assert line[-20:-1].split()[-1] in found or "Scheduler hit" in found
    assert len(found) < 300
    assert found.isprintable()
    assert await signs.look() == ""  # said once


async def test_a_log_that_was_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("x" * 1000)
    signs = watch(tmp_path)
    log.write_text("Scheduler hit an exception: x\n")
    assert "Scheduler hit an exception" in await signs.look()


async def test_silence_counts_when_it_lasts(tmp_path: Path) -> None:
    signs = watch(tmp_path, [False, False, True, False, False, False])
    found = [await signs.look() for _ in range(6)]
    assert found[:5] == [""] * 5
    assert "did not answer 3 times in a row" in found[5]
