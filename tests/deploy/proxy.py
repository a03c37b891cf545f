"""A TCP proxy that fails on command: the faults of a network, without root."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsx_tui.deploy.address import HostAddress


class FaultProxy:
    """Between a client and ``address``. ``up_open`` and ``down_open``: cleared, nothing flows that way."""

    def __init__(self, address: HostAddress) -> None:
        self._to = address
        self.up_open, self.down_open = asyncio.Event(), asyncio.Event()
        self.up_open.set()
        self.down_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def address(self, known_hosts_line: str) -> HostAddress:
        """The proxied host. Its key is known under the proxy's port."""
        port = self._server.sockets[0].getsockname()[1]
        path = self._to.known_hosts.with_name(f"known_hosts_{port}")
        path.write_text(f"[127.0.0.1]:{port} {known_hosts_line.split(' ', 1)[1]}")
        return replace(self._to, port=port, known_hosts=path)

    def reset(self) -> None:
        """Cut every connection hard."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection(self._to.address, self._to.port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(
            self._pump(reader, far_writer, self.up_open), self._pump(far_reader, writer, self.down_open)
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        try:
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other side was cut
        finally:
            writer.close()
