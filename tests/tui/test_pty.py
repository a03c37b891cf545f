"""The console in a real terminal: what tmux shows, and that signals give the terminal back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx_tui.model.messages import ServerLog
from hsx_tui.model.replay import to_json
from tests.tui import scenes
from tests.tui.driving import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.pty

ROOT = Path(__file__).parent.parent.parent
EVIL = "AAA\x1b[2JBBB\x1b]0;EVILTITLE\x07\x1b]52;c;RVZJTA==\x07CCC"


class Terminal:
    """One tmux server of our own with one shell in it."""

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        width, height = size
        environment = {k: v for k, v in os.environ.items() if k not in ("TMUX", "SSH_CONNECTION", "NO_COLOR")}
        environment |= {"PS1": "ready$ ", "LC_ALL": "C.UTF-8", "HSX_PY": sys.executable}
        new = ["new-session", "-d", "-x", str(width), "-y", str(height), "-c", str(ROOT)]
        # Two words, which tmux runs as they are: one string would go through a shell, and that drops PS1.
        shell = ["bash", "--norc"]
        subprocess.run([*self._tmux, *new, *shell], check=True, env=environment, timeout=10)

    def _call(self, *args: str) -> str:
        done = subprocess.run([*self._tmux, *args], check=True, capture_output=True, text=True, timeout=10)
        return done.stdout

    def keys(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def text(self) -> str:
        return self._call("capture-pane", "-p")

    def ask(self, format_: str) -> str:
        return self._call("display-message", "-p", format_).strip()

    def until(self, holds: Callable[[str], bool], seconds: float = 30.0) -> str:
        end = time.monotonic() + seconds
        while not holds(text := self.text()):
            assert time.monotonic() < end, text
            time.sleep(0.1)
        return text

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=10)


@pytest.fixture(params=SIZES, ids=str)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, request.param)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    messages = [*scenes.running(30), (30.0, ServerLog([EVIL], "engine"))]
    path.write_text("".join(json.dumps(to_json(m, t)) + "\n" for t, m in messages))
    return path


def start(terminal: Terminal, recording: Path) -> str:
    terminal.until(lambda text: "ready$" in text)
    terminal.keys(
        f'echo $$ > {recording.parent}/shell; "$HSX_PY" -m tests.tui.replay_app {recording}; echo code=$?',
        "Enter",
    )
    return terminal.until(lambda text: "done 24 / 80" in text and "AAA" in text)


def console_pid(recording: Path) -> int:
    shell = (recording.parent / "shell").read_text().strip()
    (pid,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return int(pid)


def restored(terminal: Terminal, code: int) -> None:
    terminal.until(lambda text: f"code={code}" in text)
    assert terminal.ask("#{alternate_on}") == "0"
    assert terminal.ask("#{mouse_any_flag}") == "0"
    assert terminal.ask("#{cursor_flag}") == "1"
    terminal.keys("echo still-$((40+2))", "Enter")
    terminal.until(lambda text: "still-42" in text)


def test_the_screen_in_a_real_terminal_and_quit(terminal: Terminal, recording: Path) -> None:
    text = start(terminal, recording)
    assert terminal.ask("#{alternate_on}") == "1"
    for part in ("● CONNECTED", "▲ MISMATCH", "1.32 samples/s", "FOLLOWING", "q Quit", "┌─ Run", "36.2 %"):
        assert part in text, part
    assert "AAABBBCCC" in text, "the escapes are gone, the text is there"
    assert "EVILTITLE" not in terminal.ask("#{pane_title}")
    terminal.keys("x")
    terminal.until(lambda text: "not now: it is running" in text)
    terminal.keys("a")
    terminal.until(lambda text: "nothing: this is a recording" in text)
    terminal.keys("Enter")
    terminal.until(lambda text: "nothing: this is a recording" not in text)
    terminal.keys("q")
    terminal.until(lambda text: "demo goes on" in text)
    terminal.keys("y")
    restored(terminal, 0)


def test_no_byte_of_a_host_s_escapes_reaches_the_terminal(
    terminal: Terminal, recording: Path, tmp_path: Path
) -> None:
    raw = tmp_path / "raw"
    terminal.keys(f"tmux -S {tmp_path}/tmux.sock pipe-pane 'cat > {raw}'", "Enter")
    start(terminal, recording)
    terminal.keys("q")
    terminal.until(lambda text: "demo goes on" in text)
    terminal.keys("y")
    restored(terminal, 0)
    written = raw.read_bytes()
    assert b"AAABBBCCC" in written, "the line was drawn while the bytes were kept"
    assert b"EVILTITLE" not in written
    assert b"RVZJTA" not in written
    assert b"]52;c;" not in written


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back(terminal: Terminal, recording: Path, sig: signal.Signals) -> None:
    start(terminal, recording)
    os.kill(console_pid(recording), sig)
    restored(terminal, 128 + sig)
