"""Reading an SSH channel of a host that is not trusted: lines and counts, with caps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.wire.errors import RemoteError
from hsx_tui.text import clean

if TYPE_CHECKING:
    import asyncssh

_CHUNK = 64 << 10


class ByteReader:
    """Lines and exact counts from an SSH channel, with caps that hold however the peer cuts its data."""

    def __init__(self, reader: asyncssh.SSHReader[bytes]) -> None:
        self._reader = reader
        self._buffer = bytearray()
        self._scanned = 0

    async def _more(self) -> bool:
        data = await self._reader.read(_CHUNK)
        self._buffer += data
        return bool(data)

    async def line(self, cap: int) -> bytes | None:
        """The next line without its newline; None at the end. Raises RemoteError beyond ``cap`` bytes."""
        while (at := self._buffer.find(b"\n", self._scanned)) < 0:
            self._scanned = len(self._buffer)
            if self._scanned > cap:
                raise RemoteError("the host sent an endless line", f"more than {cap} bytes without a newline")
            if not await self._more():
                return None
        found = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        self._scanned = 0
        if len(found) > cap:
            raise RemoteError("the host sent an overlong line", f"{len(found)} bytes")
        return found

    async def exactly(self, count: int) -> bytes | None:
        """The next ``count`` bytes; None if the stream ends before."""
        while len(self._buffer) < count:
            if not await self._more():
                return None
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._scanned = 0
        return found

    async def skip_to(self, mark: bytes, cap: int) -> bool:
        """Drop everything up to and including the line ``mark``; False if the stream ends before."""
        seen = 0
        while (found := await self.line(cap)) is not None:
            if found == mark:
                return True
            seen += len(found) + 1
            if seen > cap:
                raise RemoteError(
                    "the host's shell prints too much",
                    f"more than {cap} bytes before the answer",
                    "look at its start-up files",
                )
        return False


def decode_object(line: bytes) -> dict[str, Any]:
    """A JSON object from the host; RemoteError if it is anything else."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RemoteError("the host's answer is not JSON", clean(str(error))) from error
    if not isinstance(data, dict):
        raise RemoteError("the host's answer is not an object", clean(repr(data)[:80]))
    return data
