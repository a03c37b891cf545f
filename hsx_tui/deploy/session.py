"""One SSH connection to a host: strict about its key, bounded in time, and probed by a ping that needs an
answer.

Reconnecting is the caller's (``link.Link``): a session that is lost stays lost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncssh

from engine.wire.errors import DeadlineExceeded, LinkLost, Refused
from hsx_tui.deploy.connecting import open_connection
from hsx_tui.deploy.remote import Call, start_call
from hsx_tui.text import clean

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from hsx_tui.deploy.address import EngineInstall, HostAddress

MAX_CALLS = 3
MAX_STREAMS = 4
"""With the ping these stay under sshd's MaxSessions (10 by default)."""

PING_INTERVAL_S = 5.0
PING_DEADLINE_S = 12.0
WAKE_DEADLINE_S = 3.0
"""After a sleep of this laptop the link is probably dead: it gets less time to prove that it is not."""
WAKE_JUMP_S = 5.0


class Session:
    """A live connection. ``engine`` is set by ``bundle.install_engine`` and may be carried over a
    reconnect."""

    def __init__(self, address: HostAddress, conn: asyncssh.SSHClientConnection) -> None:
        self.address = address
        self.engine: EngineInstall | None = None
        self._conn = conn
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._streams = 0
        self._why_lost = ""
        self._ping = asyncio.create_task(self._keep_pinging(), name=f"ping {address}")

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._conn.is_closed()

    async def close(self) -> None:
        """End the connection. Nothing that runs on the host is touched."""
        self._ping.cancel()
        await asyncio.gather(self._ping, return_exceptions=True)
        self._conn.close()
        try:
            async with asyncio.timeout(2):
                await self._conn.wait_closed()
        except TimeoutError:
            self._conn.abort()
            await self._conn.wait_closed()

    def abort(self, why: str = "aborted") -> None:
        """Drop the connection at once: what is in flight on it raises LinkLost."""
        self._why_lost = self._why_lost or why
        self._conn.abort()

    async def call(
        self, verb: str, *, payload: bytes = b"", deadline_s: float = 30, **args: Any
    ) -> dict[str, Any]:
        """Ask the installed engine's host side one thing; the answer as engine.wire.verbs describes it.

        Raises the error that the host answered with, LinkLost (whether it acted is unknown: ask again),
        DeadlineExceeded, RemoteError (malformed answer), Refused (no engine installed).
        """
        async with self.open(verb, payload=payload, deadline_s=deadline_s, **args) as call:
            answer = await call.answer()
            await call.finish()
        return answer

    @asynccontextmanager
    async def open(
        self, verb: str, *, payload: bytes = b"", deadline_s: float = 30, **args: Any
    ) -> AsyncIterator[Call]:
        """A call whose answers are read by the caller, all of it within ``deadline_s``."""
        try:
            async with asyncio.timeout(deadline_s), self._calls:
                call = await start_call(self._conn, self._engine_dir(verb), verb, args, payload)
                try:
                    yield call
                finally:
                    await call.close()
        except LinkLost as error:
            raise self._explained(error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.address} did not answer {verb} within {deadline_s:g} s",
                "",
                "the call can be made again",
            ) from error

    @asynccontextmanager
    async def stream(self, verb: str, *, deadline_s: float = 30, **args: Any) -> AsyncIterator[Call]:
        """A long-lived call; ``deadline_s`` is for its beginning only. Leaving the block ends the far
        side."""
        if self._streams >= MAX_STREAMS:
            raise Refused(f"too many streams on one connection ({MAX_STREAMS})", "", "close one first")
        self._streams += 1
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    call = await start_call(self._conn, self._engine_dir(verb), verb, args, b"")
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{self.address} did not begin {verb} within {deadline_s:g} s"
                ) from error
            try:
                yield call
            except LinkLost as error:
                raise self._explained(error) from error
            finally:
                await call.close()
        finally:
            self._streams -= 1

    def _explained(self, lost: LinkLost) -> LinkLost:
        """The loss with its cause, where it was ours to drop the connection."""
        return LinkLost(lost.what, self._why_lost, lost.next_step) if self._why_lost else lost

    async def observe(
        self,
        interval_s: float = 2.0,
        *,
        url: str | None = None,
        paths: Sequence[str] = (),
        runs: Sequence[str] = (),
    ) -> AsyncIterator[dict[str, Any]]:
        """HostFacts each ``interval_s`` seconds, from one long-lived helper on the host.

        Raises LinkLost when none came for interval_s + 15 s, and what ``call`` raises. Close the iterator
        (``contextlib.aclosing``) to end the helper.
        """
        asked: dict[str, Any] = {"interval_s": interval_s, "url": url, "paths": [*paths], "runs": [*runs]}
        async with self.stream("observe", **asked) as call:
            while True:
                try:
                    async with asyncio.timeout(interval_s + 15):
                        facts = await call.answer()
                except TimeoutError as error:
                    raise LinkLost("the host's observer fell silent", "", "connect again") from error
                yield facts

    def _engine_dir(self, verb: str) -> str:
        if self.engine is not None:
            return self.engine.dir
        if verb != "install":
            raise Refused(
                f"{verb} needs the engine on {self.address}", "it was not installed", "install it first"
            )
        return ""

    async def _keep_pinging(self) -> None:
        """Abort the connection when a ping stays unanswered: TCP and SSH keepalives miss a half-dead link."""
        try:
            process = await self._conn.create_process("exec /bin/cat", encoding=None, term_type=None)
        except (asyncssh.Error, OSError) as error:
            self.abort(f"no ping channel: {clean(str(error))}")
            return
        woke = False
        while not self._conn.is_closed():
            limit = WAKE_DEADLINE_S if woke else PING_DEADLINE_S
            try:
                async with asyncio.timeout(limit):
                    await self._one_ping(process)
            except (TimeoutError, asyncssh.Error, OSError) as error:
                self.abort(clean(str(error)) or f"no answer to a ping within {limit:g} s")
                return
            wall, mono = time.time(), time.monotonic()
            await asyncio.sleep(PING_INTERVAL_S)
            woke = abs((time.time() - wall) - (time.monotonic() - mono)) > WAKE_JUMP_S

    async def _one_ping(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        mark = secrets.token_hex(8).encode()
        process.stdin.write(mark + b"\n")
        tail = b""
        while mark not in tail:
            data = await process.stdout.read(4096)
            if not data:
                raise ConnectionResetError("the ping channel was closed")
            tail = tail[-len(mark) :] + data


async def connect(
    address: HostAddress, *, deadline_s: float = 20, engine: EngineInstall | None = None
) -> Session:
    """Connect to a host whose key is known.

    Raises HostKeyError (unknown or changed key), ConnectionFailed (unreachable, login refused),
    DeadlineExceeded, UsageError (our own key file cannot be used).
    """
    session = Session(address, await open_connection(address, deadline_s))
    session.engine = engine
    return session
