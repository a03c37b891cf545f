"""One remote call: one exec of one constant command, and an answer framed by a nonce.

No argument ever enters a shell line: code, request and payload go over stdin, so that it works under any
login shell. What the shell's start-up files print comes before the nonce and is skipped. All sizes are
capped: the host is not trusted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import asyncssh

from engine.wire.errors import ConnectionFailed, HsxError, LinkLost, RemoteError
from hsx_tui.deploy.reader import ByteReader, decode_object
from hsx_tui.text import clean, host_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

T = TypeVar("T")

COMMAND = (
    'exec /bin/sh -c \'PATH="$PATH:/usr/local/bin:/usr/bin:/bin"; export PATH; '
    "LC_ALL=C.UTF-8 exec python3 -I -B -c "
    '"import sys,json;exec(json.loads(sys.stdin.buffer.readline()))"\''
)
"""The only thing that a remote shell is ever asked to run (but for ``exec /bin/cat``, the ping)."""

MAX_NOISE = 64 << 10
"""Most bytes that a shell may print before the answer."""
MAX_ANSWER = 8 << 20
"""Longest line of an answer (bytes)."""
MAX_STDERR = 64 << 10
_CHUNK = 64 << 10


@cache
def bootstrap_line() -> bytes:
    """The bootstrap code as a JSON string line."""
    return json.dumps(Path(__file__).with_name("bootstrap.py").read_text()).encode() + b"\n"


def request_bytes(nonce: str, engine: str, verb: str, args: Mapping[str, Any]) -> bytes:
    """What is sent before any payload."""
    request = {"nonce": nonce, "engine": engine, "verb": verb, "args": args}
    return bootstrap_line() + json.dumps(request).encode() + b"\n"


class Call:
    """A remote call in flight. Made by ``Session.open``; a lost link is always LinkLost, never an end of
    data."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], verb: str, nonce: str) -> None:
        self._process = process
        self._verb = verb
        self._nonce = nonce
        self._reader = ByteReader(process.stdout)
        self._stderr = bytearray()
        self._drain = asyncio.create_task(self._read_stderr(), name=f"stderr of {verb}")

    async def _read_stderr(self) -> None:
        """Keep the beginning, drop the rest: an unread stderr would stop the whole channel."""
        try:
            while data := await self._process.stderr.read(_CHUNK):
                self._stderr += data[: MAX_STDERR - len(self._stderr)]
        except (asyncssh.Error, OSError):
            return  # the same loss is seen, and reported, on stdout

    def send(self, data: bytes) -> None:
        """Send bytes to the far side. A refusal to take them shows in the answer, so it is no error here."""
        try:
            self._process.stdin.write(data)
        except (OSError, asyncssh.Error):
            return

    def send_eof(self) -> None:
        """Tell the far side that nothing more comes."""
        try:
            self._process.stdin.write_eof()
        except (OSError, asyncssh.Error):
            return

    async def begin(self) -> None:
        """Wait for the nonce."""
        if not await self._lost_is_error(self._reader.skip_to(f"<<{self._nonce}".encode(), MAX_NOISE)):
            raise await self._failure()

    async def line(self) -> bytes:
        """One line of the far side that is not JSON; its error raised if it sends one instead."""
        found = await self._raw_line()
        if found.startswith(b"{"):
            self._checked(found)
        return found

    async def exactly(self, count: int) -> bytes:
        """``count`` raw bytes of the far side."""
        found = await self._lost_is_error(self._reader.exactly(count))
        if found is None:
            raise await self._failure()
        return found

    async def answer(self) -> dict[str, Any]:
        """One JSON object of the far side. Raises the error that it carries."""
        return self._checked(await self._raw_line())

    async def finish(self) -> None:
        """Success needs the closing nonce *and* exit status 0: a dead link gives neither and raises
        nothing."""
        self.send_eof()
        end = await self._lost_is_error(self._reader.line(MAX_NOISE))
        if end != f">>{self._nonce}".encode():
            raise await self._failure()
        await self._lost_is_error(self._process.wait_closed())
        if self._process.exit_status != 0:
            raise await self._failure()

    async def close(self) -> None:
        """Give the channel back. The far side sees the end of its stdin and leaves by itself."""
        self._process.close()
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)

    async def _raw_line(self) -> bytes:
        found = await self._lost_is_error(self._reader.line(MAX_ANSWER))
        if found is None:
            raise await self._failure()
        return found

    def _checked(self, line: bytes) -> dict[str, Any]:
        data = decode_object(line)
        if data.get("ok") is False:
            raise host_error(data.get("error"))
        return data

    async def _lost_is_error(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except (asyncssh.Error, OSError) as error:
            raise self._link_lost(str(error)) from error

    def _link_lost(self, why: str) -> LinkLost:
        return LinkLost(f"the link died during {self._verb}", clean(why), "the call can be made again")

    async def _failure(self) -> HsxError:
        """The far side ended without an answer: say whether the link died or it failed."""
        await self._lost_is_error(self._process.wait_closed())
        status = self._process.exit_status
        if status is None:
            return self._link_lost("no exit status came back")
        await asyncio.gather(self._drain, return_exceptions=True)
        lines = self._stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        why = clean(lines[-1]) if lines else "it printed no error"
        if status == 127:
            return RemoteError(f"{self._verb} cannot run on the host", why, "install python3 >= 3.10 there")
        return RemoteError(f"{self._verb} failed on the host with status {status}", why)


async def start_call(
    conn: asyncssh.SSHClientConnection, engine: str, verb: str, args: Mapping[str, Any], payload: bytes
) -> Call:
    """Open a channel, send the request, wait for the nonce."""
    nonce = secrets.token_hex(16)
    try:
        process: asyncssh.SSHClientProcess[bytes] = await conn.create_process(
            COMMAND, encoding=None, term_type=None, stderr=asyncssh.PIPE
        )
    except asyncssh.ChannelOpenError as error:
        raise channel_error(conn, verb, error) from error
    except (asyncssh.Error, OSError) as error:
        raise LinkLost(f"the link died before {verb}", clean(str(error)), "connect again") from error
    call = Call(process, verb, nonce)
    try:
        call.send(request_bytes(nonce, engine, verb, args) + payload)
        await call.begin()
    except BaseException:
        await call.close()
        raise
    return call


def channel_error(
    conn: asyncssh.SSHClientConnection, verb: str, error: asyncssh.ChannelOpenError
) -> HsxError:
    """Why a channel could not be opened."""
    if conn.is_closed():
        return LinkLost(f"the link died before {verb}", clean(error.reason), "connect again")
    return ConnectionFailed(
        f"the host refused a channel for {verb}",
        clean(error.reason),
        "raise MaxSessions in its sshd_config",
    )
