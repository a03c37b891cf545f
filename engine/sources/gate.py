"""Who may be in flight: up to N asks together, or one alone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Admits up to ``limit`` at once; one that wants to be alone waits for the others and holds back new
    ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0
        self._changed = asyncio.Condition()

    def _open(self, alone: bool) -> bool:
        if self._alone:
            return False
        if alone:
            return self._inside == 0
        return self._inside < self._limit and not self._waiting_alone

    @asynccontextmanager
    async def enter(self, alone: bool) -> AsyncIterator[None]:
        """Wait for a place and keep it for the block."""
        async with self._changed:
            self._waiting_alone += alone
            try:
                await self._changed.wait_for(lambda: self._open(alone))
            finally:
                self._waiting_alone -= alone
            self._inside += 1
            self._alone = alone
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._alone = False
                self._changed.notify_all()
