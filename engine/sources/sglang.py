"""Hidden states from SGLang: one request a sample, the dump found by the reply, never by looking.

A run may have several servers of the same model (replicas), each with a dump folder of its own. The run's
concurrency is divided among them evenly, rounded up; an ask goes to the least busy one that lives, and what
was in flight on a server that dies is asked for again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx

from engine.capture.states import States
from engine.sources.endpoint import ServerEndpoint
from engine.sources.feeding import answer_all
from engine.sources.protocol import Ask, SourceFacts, Taken
from engine.sources.sglang_api import Api

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from engine.wire.spec import Endpoint, SourceSpec

_SAME = (
    "model_path",
    "dtype",
    "version",
    "weight_version",
    "quantization",
    "kv_cache_dtype",
    "return_aux_hidden_state_layer_ids",
    "aux_hidden_state_capture",
    "context_length",
)
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
        """Settings as /server_info gives them; the servers of a run must agree, and where not, it is a
        problem."""
        infos = await asyncio.gather(*(e.api.get("/server_info") for e in self.endpoints))
        first, *others = [read_facts(info) for info in infos]
        problems = []
        for endpoint, info in zip(self.endpoints[1:], infos[1:], strict=True):
            for name, one, other in differing(infos[0], info):
                problems.append(f"{name} is {one} at {self.endpoints[0].url}, {other} at {endpoint.url}")
        flags = dict(first.flags)
        if others:
            flags["replicas"] = [
                {"url": e.url, "version": f.version, **f.flags}
                for e, f in zip(self.endpoints[1:], others, strict=True)
            ]
        told = {e.url: info for e, info in zip(self.endpoints, infos, strict=True)}
        return dataclasses.replace(first, flags=flags, problems=tuple(problems), infos=told)

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

    async def foreign(self, prompts: Sequence[Sequence[int]]) -> int:
        """Send requests that are not ours, two at once to each server, and count the answers. Never raises
        for the link: the canary's own asks say what is wrong."""
        queue, answered = list(prompts), 0

        async def stranger(endpoint: ServerEndpoint) -> None:
            nonlocal answered
            async with aclosing(Api(endpoint.url, self.spec.api_key_env, self.spec.timeout_s, 1)) as api:
                while queue:
                    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
                    body = {"input_ids": list(queue.pop()), "sampling_params": sampling, "stream": False}
                    with contextlib.suppress(httpx.HTTPError):
                        response = await api.generate(body)
                        answered += response.status_code == 200

        await asyncio.gather(*(stranger(e) for e in self.endpoints for _ in range(2)))
        return answered

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


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings (of /server_info) that all servers of a run must have in common, and two have not."""
    return [(name, one.get(name), other.get(name)) for name in _SAME if one.get(name) != other.get(name)]


def read_facts(info: Mapping[str, Any]) -> SourceFacts:
    """/server_info -> SourceFacts. What the settings mean for a capture is the preflight's to say."""
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
        "weight_version",
    )
    return SourceFacts(
        model=str(info.get("model_path", "")),
        dtype=str(info.get("dtype", "")).removeprefix("torch."),
        version=str(info.get("version", "")),
        layers=tuple(int(x) for x in layers) if isinstance(layers, list) else None,
        context_length=int(info.get("context_length") or 0),
        flags={k: info.get(k) for k in flags}
        | {"launch_command": str(info.get("launch_command", ""))[:2000]},
    )
