"""One server of a run: its address, its dump folder, what is in flight on it, and whether it lives.

The reply's handshake (``meta_info["hsx"]``) names the dump and its id; the file carries the same id, the
request id and the token ids that the forward pass saw. A dump is only looked for in the folder of the server
that answered.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from engine.capture.classify import judge_dump
from engine.capture.pythonpath.hsx_capture.dumpfile import (
    DumpMissing,
    DumpUnreadable,
    WriterFailed,
    read_dump,
    remove_dump,
)
from engine.capture.states import Finding, States
from engine.sources.gate import Gate
from engine.sources.protocol import Ask, Taken
from engine.sources.replies import Busy, read_reply, refusal
from engine.sources.sglang_api import Api
from engine.sources.watch import LOOK_S, Watch
from engine.wire.causes import Cause
from engine.wire.ids import parse_rid, run_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.dataset.tokens import Sample
    from engine.wire.spec import Endpoint, SourceSpec

_FILE_WAIT_S = 20.0
"""How long a promised dump may take to appear: the reply is sent before the writer is done."""

_BUSY_S = 120.0
"""How long a request waits for room in the capture before it is given back as lost."""

_FINAL = frozenset({Cause.WRONG_LAYERS})
"""What a server says once, it says always."""

_ANOTHERS = frozenset({Cause.NO_HANDSHAKE, Cause.WRONG_LAYERS, Cause.MISSING})
"""What a server says for every row when it was started anew without the plugin, or with other layers."""


@dataclass(frozen=True)
class _Flight:
    """A request in flight. ``company``: the samples that were in flight at some moment beside it, by row."""

    sample: Sample
    company: dict[int, Sample]


class ServerEndpoint:
    """A server with up to ``limit`` requests of ours in flight.

    Attributes:
        load: asks that wait for it or are in flight on it.
        trouble: why it is not to be asked; "" while it lives.
    """

    def __init__(
        self, where: SourceSpec | Endpoint, spec: SourceSpec, limit: int, taps: tuple[int, ...] | None
    ) -> None:
        self.url, self.folder, self.limit = where.url, Path(where.dump_dir), limit
        self.api = Api(where.url, spec.api_key_env, spec.timeout_s, limit + 2)
        self.gate = Gate(limit)
        self.load = 0
        self.trouble = ""
        self._spec, self._taps = spec, taps
        self._flying: dict[str, _Flight] = {}
        self._down = asyncio.Event()
        log = Path(where.log) if where.log else None
        self._watch = Watch(self.folder, log, lambda: self.api.ready(3.0), taps)

    async def ready(self) -> bool:
        """Whether it would take a request now; a server that was dead must be whole again."""
        if not await self.api.ready():
            self.trouble = self.trouble or "it does not answer /ready"
            return False
        self.trouble = await self._watch.not_back()
        if self.trouble:
            return False
        if self._down.is_set():
            await asyncio.to_thread(self._watch.begin)
            self._down.clear()
        return True

    async def watch(self) -> None:
        """Until cancelled: look whether it lives while requests are in flight; if not, let them go."""
        await asyncio.to_thread(self._watch.begin)
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception as error:  # a watch that ends would let the next death go unnoticed
                self.trouble = f"it cannot be watched: {type(error).__name__}: {error}"[:200]

    async def _look(self) -> None:
        if self._down.is_set() or (self.trouble and not self._flying):
            await self.ready()  # nobody asks it, so nobody else finds out that it is back
            return
        if not self._flying:
            return
        found = await self._watch.look()
        if found:
            self.trouble = found
            self._down.set()
        elif self.trouble:
            await self.ready()  # one slow answer must not keep asks away from it

    def clear(self, run: str) -> int:
        """Remove the dumps of ``run`` by exact name. Nothing is aborted: the server ends a request whose
        client is gone by itself, and aborting goes by prefix: it would hit a run whose name begins like
        ours."""
        names = {p.name.split(".")[0] for p in self.folder.glob(f"{run_prefix(run)}*")}
        ours = [name for name in names if (parsed := parse_rid(name)) and parsed.run == run]
        for name in ours:
            remove_dump(self.folder, name)
        return len(ours)

    async def ask(self, ask: Ask) -> Taken:
        """One request, from its wait for a place to its checked dump."""
        self.load += 1
        try:
            async with self.gate.enter(ask.alone):
                return await self._fly(ask)
        finally:
            self.load -= 1

    async def _fly(self, ask: Ask) -> Taken:
        if self._down.is_set() and not await self.ready():
            return Taken(ask, lost=self.trouble)
        began = time.monotonic()
        flight = _Flight(ask.sample, {f.sample.row: f.sample for f in self._flying.values()})
        for other in self._flying.values():
            other.company[ask.sample.row] = ask.sample
        self._flying[ask.rid] = flight
        try:
            result = await self._unless_dead(ask)
        finally:
            del self._flying[ask.rid]
        flying = tuple(flight.company.values())
        seconds = time.monotonic() - began
        if isinstance(result, States):
            return Taken(ask, states=result, request_s=seconds, flying=flying)
        await asyncio.to_thread(self._forget, ask.rid)
        if (
            isinstance(result, Finding)
            and result.cause in _ANOTHERS
            and (why := await self._watch.not_back())
        ):
            self.trouble = result = why  # it was started anew, as another: no fault of the row
            self._down.set()
        if isinstance(result, Finding):
            final = result.cause in _FINAL
            return Taken(ask, finding=result, request_s=seconds, flying=flying, final=final)
        return Taken(ask, lost=result, request_s=seconds, flying=flying, asked_at=began)

    async def _unless_dead(self, ask: Ask) -> States | Finding | str:
        """The request's result, or that the server has died under it."""
        request = asyncio.ensure_future(self._request(ask))
        death = asyncio.ensure_future(self._down.wait())
        try:
            await asyncio.wait({request, death}, return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else self.trouble
        finally:
            for each in (request, death):
                each.cancel()
            await asyncio.gather(request, death, return_exceptions=True)

    def _forget(self, rid: str) -> None:
        """Remove a dump that nobody will read; one that comes later still goes at the end of the run."""
        try:
            remove_dump(self.folder, rid)
        except OSError:
            return  # the folder is gone or not ours: preflight and the next dump say so

    async def _request(self, ask: Ask) -> States | Finding | str:
        """States, a finding, or a text: nothing is known. While the capture has no room, the request keeps
        its place and waits: so fewer are in flight."""
        until, pause = time.monotonic() + _BUSY_S, 0.2
        while True:
            result = await self._send(ask)
            if not isinstance(result, Busy) or time.monotonic() > until:
                return result
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 5.0)

    async def _send(self, ask: Ask) -> States | Finding | str:
        body = {
            "rid": ask.rid,
            "input_ids": list(ask.sample.input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "extra_key": ask.rid,  # a prefix cache never answers for another request
            "stream": False,
        }
        try:
            response = await self.api.generate(body)
        except httpx.ReadTimeout:
            await self.api.abort(ask.rid)
            limit = self._spec.timeout_s
            if not await self.api.ready():
                return f"no answer within {limit:g} s, and the server is not ready"
            return Finding(Cause.LATE, round(limit), None, {"timeout_s": limit})
        except httpx.HTTPError as error:
            return f"the connection to {self.url} broke: {str(error) or type(error).__name__}"
        if response.status_code != 200:
            return refusal(response, len(ask.sample.input_ids), self.url)
        shake = read_reply(response, ask, self._taps)
        if isinstance(shake, Finding | str):
            return shake
        try:
            return await asyncio.to_thread(self._read, ask, shake)
        except OSError as error:
            return Finding(Cause.UNREADABLE, "the dump folder", None, {"why": str(error)[:200]})

    def _read(self, ask: Ask, shake: Mapping[str, Any]) -> States | Finding:
        name = f"{ask.rid}.safetensors"
        if Path(str(shake.get("path"))).name != name:
            return Finding(Cause.FOREIGN, str(shake.get("path"))[:120], name, {"where": "the handshake"})
        deadline = time.monotonic() + _FILE_WAIT_S
        while True:
            try:
                dump = read_dump(self.folder, ask.rid)
                break
            except DumpMissing:
                if time.monotonic() > deadline or self._down.is_set():
                    return Finding(Cause.MISSING, None, name, {"waited_s": _FILE_WAIT_S})
                time.sleep(0.005)
            except WriterFailed as error:
                if error.marker.get("dump_id") != shake.get("dump_id") and time.monotonic() < deadline:
                    time.sleep(0.005)  # the sign of an earlier try, for which there was no room
                    continue
                remove_dump(self.folder, ask.rid)
                return Finding(Cause.WRITER_ERROR, str(error)[:200], None, {})
            except DumpUnreadable as error:
                return Finding(Cause.UNREADABLE, str(error)[:200], None, {})
        remove_dump(self.folder, ask.rid)
        return judge_dump(dump, ask.rid, ask.sample.input_ids, str(shake.get("dump_id")))
