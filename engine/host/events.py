"""The writer of events.jsonl: one process, appended lines, sequence numbers without a gap over any crash."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING, Any

from engine.wire.durable import write_all
from engine.wire.errors import LockedError, SpecError
from engine.wire.events import MAX_LINE, decode, encode

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 64 << 10
_DURABLE = frozenset({"run_finished", "shard_committed"})
"""What must not be lost in a power failure: what the store has, and how the run ended."""


def _last_event(fd: int) -> tuple[int, bool]:
    """(the last valid sequence number or 0, whether the file ends in the middle of a line)."""
    size = os.fstat(fd).st_size
    tail, start, torn = b"", size, size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    while start > 0:
        step = min(_BLOCK, start)
        start -= step
        tail = os.pread(fd, step, start) + tail
        lines = tail.split(b"\n")
        # The first piece may be the end of a longer line: it is kept for the next block.
        for line in reversed(lines[1:] if start else lines):
            try:
                return decode(line)["seq"], torn
            except SpecError:
                continue
        tail = lines[0] if start else b""
        if len(tail) > MAX_LINE:
            tail = b""  # longer than any event: it cannot become one
    return 0, torn


class EventLog:
    """Appends events to a file. Safe to use from several threads of one process.

    Opening continues after the last valid line; a line that a crash left torn is closed with a newline first,
    and readers skip it as it is no JSON.

    Raises:
        LockedError: another process writes this file.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path = path
        self._fd = os.open(path, flags, 0o600)
        self._lock = threading.Lock()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._seq, self._torn = _last_event(self._fd)
        except BlockingIOError as error:
            os.close(self._fd)
            raise LockedError(f"another process writes {path}", "", "end it first") from error
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def seq(self) -> int:
        """The sequence number of the last event in the file; 0 if there is none."""
        return self._seq

    def emit(self, kind: str, **fields: Any) -> int:
        """Append one event; returns its number. A shard and the end of a run survive a power failure.

        Raises SpecError (unknown type, overlong) and OSError (disk full: the event was not written, its
        number is not used up, and the next emit mends the line).
        """
        with self._lock:
            line = encode(self._seq + 1, kind, fields)
            if len(line) > MAX_LINE:
                raise SpecError(f"the event {kind} is too long", f"{len(line)} bytes")
            try:
                write_all(self._fd, b"\n" + line if self._torn else line)
                if kind in _DURABLE:
                    os.fsync(self._fd)
            except OSError:
                # What is there now decides: all but the newline of a line is a valid event.
                self._seq, self._torn = _last_event(self._fd)
                raise
            self._torn = False
            self._seq += 1
            return self._seq

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)
