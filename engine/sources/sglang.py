"""Hidden states from SGLang: one request a sample, the dump found by the reply, never by looking.

A run may have several servers of the same model (replicas), each with a dump folder of its own. The run's
concurrency is divided among them evenly, rounded up; an ask goes to the least busy one that lives, and what
was in flight on a server that dies is asked for again elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from engine.capture.states import States
from engine.sources.endpoint import ServerEndpoint
from engine.sources.feeding import answer_all
from engine.sources.protocol import Ask, SourceFacts, Taken

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from engine.wire.spec import Endpoint, SourceSpec

_SAME = ("model", "dtype", "version", "layers", "context_length")
"""What all servers of a run must have in common."""


class SGLangSource:
    """A Source over HTTP. Attribution is by request id.

    Args:
        taps: what the run wants; a server that captures other layers is told so by its first reply.
    """

    attribution = "rid"

    def __init__(self, spec: SourceSpec, concurrency: int, taps: tuple[int, ...] | None = None) -> None:
        self.spec = spec
        servers: tuple[SourceSpec | Endpoint, ...] = (spec, *spec.replicas)
        limit = -(-concurrency // len(servers))
        self.endpoints = [ServerEndpoint(where, spec, limit, taps) for where in servers]
        self._answered: dict[int, ServerEndpoint] = {}

    async def describe(self) -> SourceFacts:
        """Settings as /server_info gives them, with what speaks against a capture; all servers must agree."""
        infos = await asyncio.gather(*(e.api.get("/server_info") for e in self.endpoints))
        first, *others = [read_facts(info) for info in infos]
        problems = list(first.problems)
        for endpoint, facts in zip(self.endpoints[1:], others, strict=True):
            problems += [f"{endpoint.url}: {problem}" for problem in facts.problems]
            for name in _SAME:
                one, other = getattr(first, name), getattr(facts, name)
                if one != other:
                    problems.append(f"{name} is {one} at {self.endpoints[0].url}, {other} at {endpoint.url}")
        flags = dict(first.flags)
        if others:
            flags["replicas"] = [
                {"url": e.url, **f.flags} for e, f in zip(self.endpoints[1:], others, strict=True)
            ]
        return dataclasses.replace(first, flags=flags, problems=tuple(problems))

    @property
    def trouble(self) -> str:
        """Why no server is to be asked; "" while one lives."""
        if any(not e.trouble for e in self.endpoints):
            return ""
        if len(self.endpoints) == 1:
            return self.endpoints[0].trouble
        return "; ".join(f"{e.url}: {e.trouble}" for e in self.endpoints)

    async def ready(self) -> bool:
        """Whether a server would take a request now (GET /ready: nothing is generated)."""
        return any(await asyncio.gather(*(e.ready() for e in self.endpoints)))

    async def clear(self, run: str) -> int:
        """Remove the dumps of ``run`` by exact name, in every server's folder."""
        return sum(await asyncio.gather(*(asyncio.to_thread(e.clear, run) for e in self.endpoints)))

    async def take(self, asks: AsyncIterator[Ask]) -> AsyncGenerator[Taken, None]:
        """Answer every ask, up to the concurrency at once, those not yet looked at included."""
        watches = [asyncio.create_task(e.watch()) for e in self.endpoints]
        limit = sum(e.limit for e in self.endpoints)
        try:
            async with aclosing(answer_all(asks, self._ask, limit)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _ask(self, ask: Ask) -> Taken:
        endpoint = self._choose(ask)
        taken = await endpoint.ask(ask)
        if isinstance(taken.states, States):
            self._answered[ask.sample.row] = endpoint
        return taken

    def _choose(self, ask: Ask) -> ServerEndpoint:
        """The least busy server that lives; for a second take, another one than gave the first."""
        usable = [e for e in self.endpoints if not e.trouble] or self.endpoints
        first = self._answered.get(ask.sample.row)
        if ask.alone and len(usable) > 1:
            usable = [e for e in usable if e is not first]
        return min(usable, key=lambda e: e.load)

    async def aclose(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(e.api.aclose() for e in self.endpoints))


def read_facts(info: Mapping[str, Any]) -> SourceFacts:
    """/server_info -> SourceFacts. ``problems`` are settings under which a capture would be wrong or
    empty."""
    problems = []
    if not info.get("enable_return_aux_hidden_states"):
        problems.append("the server was not started with --enable-return-aux-hidden-states")
    if info.get("speculative_algorithm"):
        problems.append(
            f"speculative decoding ({info['speculative_algorithm']}) is on: rows would be a draft's"
        )
    if int(info.get("pp_size") or 1) != 1:
        problems.append(f"pp_size is {info['pp_size']}: capture needs 1")
    layers = info.get("return_aux_hidden_state_layer_ids")
    flags = (
        "chunked_prefill_size",
        "disable_radix_cache",
        "enable_mixed_chunk",
        "max_running_requests",
        "tp_size",
        "dp_size",
        "pp_size",
        "attention_backend",
        "context_length",
        "dtype",
    )
    return SourceFacts(
        model=str(info.get("model_path", "")),
        dtype=str(info.get("dtype", "")).removeprefix("torch."),
        version=str(info.get("version", "")),
        layers=tuple(int(x) for x in layers) if isinstance(layers, list) else None,
        context_length=int(info.get("context_length") or 0),
        flags={k: info.get(k) for k in flags}
        | {"launch_command": str(info.get("launch_command", ""))[:2000]},
        problems=tuple(problems),
    )
