"""A host's current session: made on demand, made anew after it was lost, shared by all who ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from engine.wire.errors import LinkLost
from hsx_tui.deploy.bundle import install_engine
from hsx_tui.deploy.session import Session, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx_tui.deploy.address import HostAddress


Answer = dict[str, Any]

TRIES = 3


class Link:
    """Owns at most one session at a time.

    Args:
        address: where the host is; a function is asked at each connect (the embedded host may move).
    """

    def __init__(self, address: HostAddress | Callable[[], HostAddress]) -> None:
        self._address = address if callable(address) else lambda: address
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        self._closed = False

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
            self._session = session
            return session

    async def call(self, verb: str, *, payload: bytes = b"", deadline_s: float = 30, **args: Any) -> Answer:
        """``Session.call`` on the live session; made again, over a new one, when the link dies during it.

        Every verb is idempotent, so a call whose fate is unknown is simply repeated. Raises what ``session``
        and ``Session.call`` raise; LinkLost after the third loss.
        """
        for tries in range(TRIES):
            session = await self.session()
            try:
                return await session.call(verb, payload=payload, deadline_s=deadline_s, **args)
            except LinkLost as error:
                session.abort(str(error))
                if tries == TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the session; what runs on the host goes on."""
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
