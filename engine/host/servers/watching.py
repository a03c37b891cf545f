"""A server's log, followed on its own host while it loads: phases, and the line that tells of its death."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.wire.loading import Loading, fatal, read_line, split_stamp

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 4 << 20
"""Of the log, at one look; what is skipped is old."""
MAX_LINE = 4096


@dataclass
class LogWatch:
    """Reads complete lines of ``path`` from ``offset`` on. A file that is not there yet is empty.

    Attributes:
        loading: the phases that the log has told of.
        death: the line that said that the server is dying; "" without one.
    """

    path: Path | None
    offset: int = 0
    loading: Loading = field(default_factory=Loading)
    death: str = ""
    _rest: bytes = b""

    def look(self) -> Loading:
        """Take in what came since the last look."""
        for raw in self._lines():
            line = raw[:MAX_LINE].decode("utf-8", "backslashreplace")
            line = line.rstrip("\r").rsplit("\r", 1)[-1]
            line = "".join(c if c.isprintable() else "\ufffd" for c in line)
            self.loading = read_line(self.loading, line, time.monotonic())
            if split_stamp(line)[1].startswith("server_args="):
                self.death = ""  # another server began in the same log
            if not self.death and (fatal(line) or self.loading.failed):
                self.death = (self.loading.failed or line)[:500]
        return self.loading

    def _lines(self) -> list[bytes]:
        if self.path is None:
            return []
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:
                    self.offset, self._rest = 0, b""
                if size - self.offset > MOST_BYTES:
                    self.offset, self._rest = size - MOST_BYTES, b""
                file.seek(self.offset)
                data = file.read(size - self.offset)
        except OSError:
            return []
        self.offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE:]
        return lines
