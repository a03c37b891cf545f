"""Frames of the verb tail: complete lines, resets, skips, and a helper that leaves when the console does."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from typing import IO, TYPE_CHECKING

import pytest

import engine.host.tail
from engine.host.tail import _Reader, serve_tail
from engine.wire.errors import Refused, SpecError
from engine.wire.events import MAX_LINE

from .support import Home, wait_for

if TYPE_CHECKING:
    from pathlib import Path

HEADER = re.compile(rb"(\d+) (\d+|RESET|EOF) (\d+)\n")


def frames(stream: IO[bytes]) -> list[tuple[int, bytes, bytes]]:
    """(offset, kind or length, bytes) of each frame until the stream ends."""
    found = []
    while header := stream.readline():
        match = HEADER.fullmatch(header)
        assert match, header
        size = int(match[2]) if match[2].isdigit() else 0
        found.append((int(match[1]), match[2], stream.read(size)))
    return found


def tail(home: Home, run: str, file: str, **more: int) -> list[tuple[int, bytes, bytes]]:
    """All frames of an ended run's file."""
    process = home.spawn("tail", run=run, file=file, **more)
    assert process.stdout is not None
    found = frames(process.stdout)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    return found


def ended_run(home: Home, program: str) -> None:
    home.start("r1", program)
    home.wait_state("r1", "exited")


def test_an_ended_file_is_drained_and_closed_with_eof(home: Home) -> None:
    ended_run(home, "print('one'); print('two')")
    found = tail(home, "r1", "stdio.log")
    assert found == [(0, b"8", b"one\ntwo\n"), (8, b"EOF", b"")]
    assert tail(home, "r1", "stdio.log", offset=4) == [(4, b"4", b"two\n"), (8, b"EOF", b"")]
    assert tail(home, "r1", "events.jsonl") == [(0, b"EOF", b"")]


def test_a_last_line_without_newline_is_sent_of_a_log_and_not_of_events(home: Home) -> None:
    program = (
        "import os\n"
        "open(os.environ['HSX_RUN'] + '/events.jsonl', 'w').write('{}\\n{torn')\n"
        "print('end', end='')"
    )
    ended_run(home, program)
    assert tail(home, "r1", "stdio.log") == [(0, b"3", b"end"), (3, b"EOF", b"")]
    assert tail(home, "r1", "events.jsonl") == [(0, b"3", b"{}\n"), (3, b"EOF", b"")]


def test_the_helper_leaves_when_the_console_does_and_the_run_goes_on(home: Home) -> None:
    home.start("r1", "print('one'); import time; time.sleep(60)")
    process = home.spawn("tail", run="r1", file="stdio.log")
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline().startswith(b"0 4 ")
    began = time.monotonic()
    process.stdin.close()
    assert process.wait(5) == 0
    assert time.monotonic() - began < 2
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()
    assert home.status("r1")["state"] == "running"


def test_a_closed_stdout_ends_the_helper_too(home: Home) -> None:
    home.start("r1", "import time\nwhile True: print('x' * 100); time.sleep(0.01)")
    process = home.spawn("tail", run="r1", file="stdio.log")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    wait_for(lambda: process.poll() is not None, 5)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.close()
    process.stderr.close()


def test_an_idle_tail_gives_a_sign_of_life(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.start("r1", "import time; time.sleep(60)")
    monkeypatch.setenv("HOME", str(home.path))
    monkeypatch.setattr(engine.host.tail, "SIGN_OF_LIFE_S", 0.3)
    stdin, console = os.pipe()
    out = io.BytesIO()
    helper = threading.Thread(target=serve_tail, args=({"run": "r1", "file": "stdio.log"}, stdin, out))
    helper.start()
    time.sleep(1)
    os.close(console)
    helper.join(5)
    os.close(stdin)
    assert not helper.is_alive()
    signs = out.getvalue().splitlines()
    assert 2 <= len(signs) <= 4
    assert {sign.rsplit(b" ", 1)[0] for sign in signs} == {b"0 0"}


def test_what_cannot_be_tailed_is_refused(home: Home) -> None:
    with pytest.raises(Refused, match="never started"):
        home.call("tail", run="nobody", file="stdio.log")
    ended_run(home, "pass")
    for name in ("../spec.json", "spec.json", "/etc/passwd"):
        with pytest.raises(SpecError, match="bad file"):
            home.call("tail", run="r1", file=name)
    with pytest.raises(SpecError, match="bad offset"):
        home.call("tail", run="r1", file="stdio.log", offset=-1)


def test_a_file_that_shrank_or_was_replaced_gives_a_reset(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\ntwo\n")
    reader = _Reader(path, 0, 0, 0)
    inode = path.stat().st_ino
    assert reader.frame(last=False) == b"0 8 %d\none\ntwo\n" % inode
    path.write_bytes(b"new\n")
    assert reader.frame(last=False) == b"0 RESET %d\n" % inode
    assert reader.frame(last=False) == b"0 4 %d\nnew\n" % inode
    other = tmp_path / "g"
    other.write_bytes(b"other\n")
    other.replace(path)
    assert reader.frame(last=False) == b"0 RESET %d\n" % path.stat().st_ino
    assert reader.frame(last=False) == b"0 6 %d\nother\n" % path.stat().st_ino


def test_an_unfinished_line_waits_and_an_endless_one_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * (MAX_LINE - 1))
    reader = _Reader(path, 0, 0, 0)
    assert reader.frame(last=False) is None
    with path.open("ab") as file:
        file.write(b"a" * 10)
    frame = reader.frame(last=False)
    assert frame is not None and frame.endswith(b"a" * MAX_LINE)
    assert reader.offset == MAX_LINE
    assert reader.frame(last=False) is None


def test_more_than_max_bytes_are_skipped_to_a_line_start(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"".join(b"line %03d\n" % i for i in range(100)))
    reader = _Reader(path, 0, 0, 30)
    frame = reader.frame(last=False)
    assert frame is not None
    assert frame.split(b"\n", 1)[1] == b"line 097\nline 098\nline 099\n"
    assert frame.startswith(b"873 27 ")


def test_a_symlink_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "f").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        _Reader(tmp_path / "f", 0, 0, 0).frame(last=False)
