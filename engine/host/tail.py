"""The verb ``tail``: complete lines of a run's file from a byte offset on, as frames, until the run is
over."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from engine.host import args as arg
from engine.host.rundir import STREAMS, RunDir, run_status
from engine.wire.errors import Refused, SpecError
from engine.wire.events import MAX_LINE
from engine.wire.verbs import LIVE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIGN_OF_LIFE_S = 5.0
POLL_S = 0.1
STATE_S = 0.5


@dataclass
class _Reader:
    """A position in a file. ``inode`` 0: any file will do (the first one is taken)."""

    path: Path
    offset: int
    inode: int
    max_bytes: int

    def frame(self, last: bool) -> bytes | None:
        """The next frame; None if there is nothing complete. ``last``: an unfinished line counts as a
        line."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if self.inode not in (0, status.st_ino) or status.st_size < self.offset:
                self.offset, self.inode = 0, status.st_ino
                return b"0 RESET %d\n" % self.inode
            self.inode = status.st_ino
            if 0 < self.max_bytes < status.st_size - self.offset:
                self._skip(fd, status.st_size - self.max_bytes)
            data = os.pread(fd, MAX_LINE, self.offset)
        finally:
            os.close(fd)
        # A line longer than MAX_LINE is sent in pieces: the console shows its beginning and drops the rest.
        end = data.rfind(b"\n") + 1 or (len(data) if last or len(data) == MAX_LINE else 0)
        if not end:
            return None
        frame = b"%d %d %d\n%b" % (self.offset, end, self.inode, data[:end])
        self.offset += end
        return frame

    def _skip(self, fd: int, to: int) -> None:
        """Go on at the first line that begins at or after ``to``."""
        at = os.pread(fd, MAX_LINE, to - 1).find(b"\n")
        self.offset = to + at if at >= 0 else to

    def sign(self, what: bytes) -> bytes:
        """A frame without bytes: ``0`` or ``EOF``."""
        return b"%d %b %d\n" % (self.offset, what, self.inode)


def left(stdin: int, wait_s: float) -> bool:
    """Wait ``wait_s`` seconds; True as soon as the console is gone (its end of our stdin is closed)."""
    end = time.monotonic() + wait_s
    while (rest := end - time.monotonic()) > 0:
        if select.select([stdin], [], [], rest)[0] and not os.read(stdin, 4096):
            return True
    return False


def serve_tail(args: Mapping[str, Any], stdin: int, out: BinaryIO) -> None:
    """Stream frames (engine.wire.verbs) until EOF or until the console has left.

    Raises SpecError, Refused (never started), BrokenPipeError (the console has left in the middle of a
    frame).
    """
    rundir, name = RunDir.of(args.get("run")), arg.text(args, "file")
    if name not in STREAMS:
        raise SpecError(f"bad file {name!r}", f"it is one of {', '.join(STREAMS)}")
    if run_status(rundir)["state"] == "never-started":
        raise Refused(f"run {rundir.run} was never started on this host", "", "start it")
    offset, inode, most = (arg.integer(args, n, 0, 0) for n in ("offset", "inode", "max_bytes"))
    reader = _Reader(rundir.path / name, offset, inode, most)
    spoken = asked = float("-inf")
    over = False
    while True:
        # The state is read before the file: what was written before the end is then certainly seen.
        if time.monotonic() - asked >= STATE_S:
            asked, over = time.monotonic(), run_status(rundir)["state"] not in LIVE
        frame = reader.frame(last=False)
        if frame is None and over and name != "events.jsonl":  # a torn event is none
            frame = reader.frame(last=True)
        if frame is None and over:
            frame = reader.sign(b"EOF")
        elif frame is None and time.monotonic() - spoken >= SIGN_OF_LIFE_S:
            frame = reader.sign(b"0")
        if frame is not None:
            spoken = time.monotonic()
            out.write(frame)
            out.flush()
            if frame.endswith(b" EOF %d\n" % reader.inode) and over:
                return
        elif left(stdin, POLL_S):
            return
