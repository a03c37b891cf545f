"""A proxy on loopback between the collector and the real server: it damages a dump, or the reply, before it
hands the reply on.

Requests come in blocks of four (fault_plan.py). All four are held back until they are all there, so each has
three others in flight beside it, whatever the machine does.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from engine.capture.pythonpath.hsx_capture.dumpfile import Dump, DumpMissing, dump_path, read_dump
from engine.wire.ids import parse_rid
from tests.capture.faults import SLOW, Scene
from tests.capture.faults_files import late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from engine.targets.lone import LoneForward
    from tests.capture.faults import Fault

BLOCK = 4
_PATIENCE_S = 60.0


@dataclass(eq=False)
class Proxy:
    """What is done to which row.

    Attributes:
        plan: the fault of a row; rows without one pass untouched.
        attempts: at which attempts (as request ids number them) faults are injected.
        blocks: hold requests back until their block is there.
        injected: the rows that were damaged; dumps: what the recorder really wrote, by row.
        errors: defects of the proxy or of a fault: there must be none.
    """

    server: str
    folder: Path
    plan: Mapping[int, Fault]
    seed: int
    strangers: Sequence[Dump] = ()
    elders: Sequence[int] = ()
    lone: LoneForward | None = None
    attempts: frozenset[int] = frozenset({1})
    blocks: bool = True
    injected: set[int] = field(default_factory=set)
    dumps: dict[int, Dump] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _here: dict[int, set[int]] = field(default_factory=dict)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: requests one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                verb, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(sizes[0].split(b":")[1])) if sizes else b""
                status, data = await self._answer(verb, path, body)
                lines = (
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
                )
                writer.write(f"{lines}\r\n\r\n".encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone
        except Exception as error:  # shown by the test: nothing of it may pass for a refusal
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    async def _answer(self, verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path != "/generate":
            response = await self.http.request(verb, path, content=body)
            return response.status_code, response.content
        asked = json.loads(body)
        name = parse_rid(asked.get("rid", ""))
        if name is None:  # the canary's strangers
            response = await self.http.post(path, content=body)
            return response.status_code, response.content
        ours = name.attempt in self.attempts
        if ours and self.blocks:
            await self._together(name.row)
        response = await self.http.post(path, content=body)
        if not ours:
            return response.status_code, response.content
        assert response.status_code == 200, response.text
        fault = self.plan.get(name.row)
        reply: dict[str, Any] = response.json()
        data = await self._dumped(asked["rid"], name.row)
        if fault is None:
            return 200, response.content
        if fault.inject is late:
            self.injected.add(name.row)
            await self.end.wait()
            raise ConnectionError
        siblings = await self._siblings(name.row) if self.blocks and fault.run != SLOW else ()
        rng = random.Random(f"{self.seed} {name.row}")
        elders = [self.dumps[row] for row in self.elders if row in self.dumps]
        scene = Scene(
            asked["rid"], tuple(asked["input_ids"]), self.dumps[name.row], data, reply, self.folder, rng,
            siblings, elders, self.strangers, self.lone,
        )  # fmt: skip
        fault.inject(scene)
        self.injected.add(name.row)
        return 200, json.dumps(reply).encode()

    async def _together(self, row: int) -> None:
        here = self._here.setdefault(row // BLOCK, set())
        here.add(row)
        await self._until(lambda: len(here) == BLOCK, f"the block of row {row} is not complete")

    async def _dumped(self, rid: str, row: int) -> bytes:
        def there() -> bool:
            try:
                self.dumps[row] = read_dump(self.folder, rid)
            except DumpMissing:
                return False
            return True

        await self._until(there, f"no dump of {rid}")
        return dump_path(self.folder, rid).read_bytes()

    async def _siblings(self, row: int) -> list[Dump]:
        first = row // BLOCK * BLOCK
        others = [r for r in range(first, first + BLOCK) if r != row]
        await self._until(lambda: all(r in self.dumps for r in others), f"no dumps beside row {row}")
        return [self.dumps[r] for r in others]

    async def _until(self, condition: Any, otherwise: str) -> None:
        for _ in range(int(_PATIENCE_S / 0.003)):
            if condition():
                return
            await asyncio.sleep(0.003)
        raise AssertionError(otherwise)

    async def serve(
        self, started: threading.Event, ends: list[Callable[[], object]], port: list[int]
    ) -> None:
        """Until the function in ``ends`` is called (from any thread)."""
        self.end = asyncio.Event()
        ends.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self.end.set))
        limits = httpx.Limits(keepalive_expiry=1.0)  # the server closes idle connections after 5 s
        async with httpx.AsyncClient(
            base_url=self.server, timeout=60.0, trust_env=False, limits=limits
        ) as self.http:
            server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
            port.append(server.sockets[0].getsockname()[1])
            started.set()
            await self.end.wait()
            server.close()
            await asyncio.sleep(0.1)  # those that were held back end


@contextmanager
def running(proxy: Proxy) -> Iterator[str]:
    """The proxy in a thread of its own (the job under test wants the main one): its url."""
    started, port, ends = threading.Event(), list[int](), list["Callable[[], object]"]()
    thread = threading.Thread(
        target=lambda: asyncio.run(proxy.serve(started, ends, port)), name="fault-proxy"
    )
    thread.start()
    try:
        assert started.wait(10)
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        for end in ends:
            end()
        thread.join(30)
    assert not proxy.errors, proxy.errors[:5]
