"""A host's current session: made on demand, made anew after it was lost, shared by all who ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from engine.wire.errors import ConnectionFailed, DeadlineExceeded, HostKeyError, LinkLost
from hsx_tui.deploy.bundle import install_engine
from hsx_tui.deploy.session import Session, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx_tui.deploy.address import HostAddress


Answer = dict[str, Any]

PATIENCE_S = 60.0
"""How long one call outlives a lost link; no try begins later."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class Link:
    """Owns at most one session at a time.

    Args:
        address: where the host is; a function is asked at each connect (the embedded host may move).
    """

    def __init__(self, address: HostAddress | Callable[[], HostAddress]) -> None:
        self._address = address if callable(address) else lambda: address
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        self._reached = False

    async def session(self) -> Session:
        """The live session with the engine installed. Raises what ``connect`` and ``install_engine``
        raise."""
        async with self._lock:
            if self._session is not None and not self._session.lost:
                return self._session
            await self._drop()
            session = await connect(self._address())
            try:
                await install_engine(session)
            except BaseException:
                await session.close()
                raise
            self._session, self._reached = session, True
            return session

    async def call(self, verb: str, *, payload: bytes = b"", deadline_s: float = 30, **args: Any) -> Answer:
        """``Session.call`` on the live session; again, over a new one, when the link dies during it.

        Every verb is idempotent, so a call whose fate is unknown is simply repeated, for PATIENCE_S and with
        growing pauses. A host that was never reached fails at once, and so does one with another key.
        Raises what ``session`` and ``Session.call`` raise.
        """
        clock = asyncio.get_running_loop().time
        end, pause = clock() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            try:
                session = await self.session()
                left = max(1.0, end - clock())
                return await self._one_call(session, verb, payload, min(deadline_s, left), args)
            except HostKeyError:
                raise
            except (ConnectionFailed, DeadlineExceeded):
                if not self._reached or clock() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _one_call(
        self, session: Session, verb: str, payload: bytes, deadline_s: float, args: dict[str, Any]
    ) -> Answer:
        try:
            return await session.call(verb, payload=payload, deadline_s=deadline_s, **args)
        except LinkLost as error:
            session.abort(str(error))
            raise

    async def close(self) -> None:
        """End the session; what runs on the host goes on."""
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
