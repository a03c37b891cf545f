"""Between HTTP and the scheduler: a request goes in, its answer is awaited, a client that leaves aborts
it."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import TYPE_CHECKING, Any

from engine.capture.pythonpath.hsx_capture.traffic import HEALTH_PREFIX
from engine.demo.requests import Request, Sampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.demo.inputs import Generate
    from engine.demo.scheduler import Scheduler

HEALTH_TIMEOUT_S = 20.0
"""SGLang's own (SGLANG_HEALTH_CHECK_TIMEOUT)."""


class Disconnected(Exception):
    """The client is gone; its request was aborted."""


class Service:
    """Used on the event loop only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._serials = itertools.count(1)
        self.ready = False
        self.warm_up_rid = uuid.uuid4().hex

    async def generate(self, asked: Generate, disconnected: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """The reply of /generate. Raises DuplicateRid, NotAccepting, Disconnected."""
        answer = self._submit(asked.rid, asked.input_ids, asked.sampling, asked.extra_key)
        gone: asyncio.Future[Any] = asyncio.ensure_future(disconnected())
        waited: set[asyncio.Future[Any]] = {answer, gone}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                self._scheduler.abort(asked.rid)
        if not answer.done():
            raise Disconnected(asked.rid)
        request = answer.result()
        return {"output_ids": request.output, "meta_info": request.meta_info()}

    async def health(self) -> bool:
        """Generate one token for real, as SGLang's /health does. Raises NotAccepting."""
        rid = f"{HEALTH_PREFIX}{uuid.uuid4().hex}"
        answer = self._submit(rid, [0], Sampling(max_new_tokens=1, temperature=0.0), None)
        done, _ = await asyncio.wait({answer}, timeout=HEALTH_TIMEOUT_S)
        if not done:
            self._scheduler.abort(rid)
            return False
        finish = answer.result().finish
        return finish is not None and finish["type"] != "abort"

    def _submit(
        self, rid: str, ids: list[int], sampling: Sampling, extra_key: str | None
    ) -> asyncio.Future[Request]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Request] = loop.create_future()

        def settle(request: Request) -> None:
            if not answer.done():
                answer.set_result(request)

        def done(request: Request) -> None:  # on the scheduler thread
            try:
                loop.call_soon_threadsafe(settle, request)
            except RuntimeError:
                return  # the loop has ended: nobody waits any more

        self._scheduler.submit(
            Request(rid, next(self._serials), ids, sampling, done, extra_key, warm_up=rid == self.warm_up_rid)
        )
        return answer
