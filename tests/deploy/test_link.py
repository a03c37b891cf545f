"""One call through a lost link: as long as the host comes back in time, the caller does not notice."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import hsx_tui.deploy.link
from engine.wire.errors import ConnectionFailed
from hsx_tui.deploy.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx_tui.deploy.address import HostAddress

    from .conftest import Host


@pytest.fixture
def dead_port() -> Iterator[int]:
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class Moving:
    """An address whose host cannot be reached for some connects."""

    def __init__(self, host: Host, dead_port: int) -> None:
        self._live, self._dead = host.address, replace(host.address, port=dead_port)
        self.away = 0
        self.asked = 0

    def __call__(self) -> HostAddress:
        self.asked += 1
        if self.away == 0:
            return self._live
        self.away -= 1
        return self._dead


async def test_a_call_outlives_a_host_that_is_away_for_a_while(host: Host, dead_port: int) -> None:
    address = Moving(host, dead_port)
    link = Link(address)
    try:
        session = await link.session()
        address.away = 3
        session.abort("the test drops it")
        assert "runs" in await link.call("list")
        assert address.asked == 1 + 3 + 1
    finally:
        await link.close()


async def test_a_host_that_was_never_reached_fails_at_once(host: Host, dead_port: int) -> None:
    address = Moving(host, dead_port)
    address.away = 100
    with pytest.raises(ConnectionFailed):
        await Link(address).call("list")
    assert address.asked == 1


async def test_a_host_that_stays_away_is_an_error_in_the_end(
    host: Host, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hsx_tui.deploy.link, "PATIENCE_S", 1.0)
    address = Moving(host, dead_port)
    link = Link(address)
    (await link.session()).abort("the test drops it")
    address.away = 100
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionFailed):
            await link.call("list")
    assert address.asked > 2
