"""Whether a server is dead, found out in seconds: its requests hang, and its HTTP side may go on answering.

After a scheduler was killed, SGLang's HTTP process blocks for five seconds and says 503 to nobody; after an
exception it lingers for a minute. So three signs are looked at while requests are in flight: the capture's
beacon (the process that computes, by pid and start time), the server's log where it is known, and /ready. A
sign that is wrong costs a request that is sent again, no more.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from engine.capture.pythonpath.hsx_capture.beacon import read_beacons

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LOOK_S = 1.0
"""How often a server with requests in flight is looked at."""

_SILENT_LOOKS = 3
"""So many times in a row /ready does not answer before the server counts as dead."""

_MOST_BYTES = 1 << 20
"""Of the log, at one look; what is skipped is old."""

_FATAL = re.compile(
    rb"Scheduler hit an exception|Subprocess \S+ \(pid=\d+\) crashed|crashed with exit code|SIGQUIT received"
)


class Watch:
    """The signs of one server.

    Args:
        folder: its dump folder. log: its log file, or None. ready: GET /ready.
        taps: what the run wants, where it is known.
    """

    def __init__(
        self,
        folder: Path,
        log: Path | None,
        ready: Callable[[], Awaitable[bool]],
        taps: tuple[int, ...] | None = None,
    ) -> None:
        self._folder, self._log, self._ready, self._taps = folder, log, ready, taps
        self._model: str | None = None
        self._capturing: set[tuple[int, int]] = set()
        self._offset: int | None = None
        self._silent = 0

    def begin(self) -> None:
        """Take things as they are now for a server that lives."""
        self._capturing = self._beacons()
        self._offset = self._size()
        self._silent = 0

    async def look(self) -> str:
        """Why the server is dead; "" when there is no sign of it."""
        found = await asyncio.to_thread(self._signs)
        if found:
            return found
        self._silent = 0 if await self._ready() else self._silent + 1
        if self._silent >= _SILENT_LOOKS:
            return f"/ready did not answer {self._silent} times in a row"
        return ""

    async def not_back(self) -> str:
        """Why a server that answers is not to be asked; "" when its capture is what the run wants.

        A server may come back without the plugin, or with other layers: asked all the same, it would have
        every row refused within seconds.
        """
        return await asyncio.to_thread(self._unfit)

    def _unfit(self) -> str:
        alive = [b for b in self._read() if not b.get("failed")]
        if not alive:
            return (
                "the server answers, but the capture is not active in it: was it started without the plugin?"
            )
        for beacon in alive:
            taps, model = beacon.get("taps"), beacon.get("model")
            if self._taps is not None and isinstance(taps, list) and taps and taps != list(self._taps):
                shown = _plain(str(taps)[:80])
                wanted = list(self._taps)
                return f"the server captures the output of layers {shown}, the run wants {wanted}"
            if self._model is not None and isinstance(model, str) and model != self._model:
                return f"it serves {_plain(model[:200])} now, and served {_plain(self._model)[:200]}"
        return ""

    def _signs(self) -> str:
        alive = self._read()
        failed = [str(b["failed"])[:200] for b in alive if b.get("failed")]
        if failed:
            return f"the server's scheduler failed: {_plain(failed[0])}"
        now = {(int(b["pid"]), int(b["start_ticks"])) for b in alive}
        if self._capturing and not self._capturing <= now:
            gone = ", ".join(str(pid) for pid, _ in sorted(self._capturing - now))
            return f"the server's scheduler process is gone (pid {gone})"
        self._capturing |= now
        return self._fatal_line()

    def _beacons(self) -> set[tuple[int, int]]:
        alive = [b for b in self._read() if not b.get("failed")]
        models = {b["model"] for b in alive if isinstance(b.get("model"), str)}
        if self._model is None and len(models) == 1:
            self._model = models.pop()
        return {(int(b["pid"]), int(b["start_ticks"])) for b in alive}

    def _read(self) -> list[dict[str, Any]]:
        """The beacons of live processes; none where the folder cannot be read."""
        try:
            return read_beacons(self._folder)
        except OSError:
            return []

    def _size(self) -> int | None:
        try:
            return self._log.stat().st_size if self._log else None
        except OSError:
            return None

    def _fatal_line(self) -> str:
        size = self._size()
        if self._log is None or size is None or self._offset is None or size == self._offset:
            self._offset = size
            return ""
        start = 0 if size < self._offset else max(self._offset, size - _MOST_BYTES)
        self._offset = size
        try:
            with self._log.open("rb") as file:
                file.seek(start)
                text = file.read(size - start)
        except OSError:
            return ""
        found = _FATAL.search(text)
        if found is None:
            return ""
        line = text[found.start() : found.start() + 200].split(b"\n")[0].decode(errors="replace")
        return f"the server's log says: {_plain(line)}"


def _plain(text: str) -> str:
    """Foreign text on one line, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
