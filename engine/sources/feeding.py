"""From a stream of asks to a stream of answers: so many at once, in any order, none forgotten.

Who must be alone waits in ``answer`` (gate.py)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from engine.sources.protocol import Ask, Taken


async def answer_all(
    asks: AsyncIterator[Ask], answer: Callable[[Ask], Awaitable[Taken]], limit: int
) -> AsyncGenerator[Taken, None]:
    """Answer every ask, up to ``limit`` at once, those not yet looked at included.

    An exception of ``asks`` or of ``answer`` is raised here; what is in flight then is cancelled.
    """
    slots = asyncio.Semaphore(limit)
    answers: asyncio.Queue[Taken | Exception | None] = asyncio.Queue()
    feeder = asyncio.create_task(_feed(asks, answer, answers, slots))
    try:
        while (one := await answers.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one
            slots.release()  # only now: what is not looked at yet takes memory, too
    finally:
        feeder.cancel()
        await asyncio.gather(feeder, return_exceptions=True)


async def _feed(
    asks: AsyncIterator[Ask],
    answer: Callable[[Ask], Awaitable[Taken]],
    answers: asyncio.Queue[Taken | Exception | None],
    slots: asyncio.Semaphore,
) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def one(ask: Ask) -> None:
        try:
            answers.put_nowait(await answer(ask))
        except Exception as error:  # whatever it is: an ask without an answer would be waited for for ever
            answers.put_nowait(error)

    try:
        await slots.acquire()
        async for ask in asks:
            task = asyncio.create_task(one(ask))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await slots.acquire()
        await asyncio.gather(*tasks)
    except Exception as error:  # reading a row failed: the same
        answers.put_nowait(error)
    finally:
        for task in tasks:
            task.cancel()
        answers.put_nowait(None)
