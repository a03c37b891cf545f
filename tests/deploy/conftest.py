"""Each test runs against two hosts: the embedded one, and a real OpenSSH server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from engine.wire.procid import ProcessId
from hsx_tui.deploy.embedded import ensure_host, read_host, stop_host
from hsx_tui.deploy.link import Link

from .sshd import run_sshd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from hsx_tui.deploy.address import HostAddress


@dataclass(frozen=True)
class Host:
    """A host under test. ``drop`` cuts every connection to it."""

    name: str
    address: HostAddress
    home: Path
    drop: Callable[[], None]

    def end_runs(self) -> None:
        """End what its runs still have, by their records."""
        for name in ("sup.json", "child.json"):
            for record in self.home.glob(f".local/state/hsx/runs/*/{name}"):
                process = ProcessId.from_json(json.loads(record.read_bytes()))
                if process is not None:
                    process.send(signal.SIGKILL)


def _embedded(workdir: Path) -> Iterator[Host]:
    address = asyncio.run(ensure_host(workdir))

    def drop() -> None:
        record = read_host(workdir)
        assert record is not None
        os.kill(record["pid"], signal.SIGUSR1)

    host = Host("embedded", address, workdir / "home", drop)
    yield host
    host.end_runs()
    asyncio.run(stop_host(workdir))


def _sshd(folder: Path) -> Iterator[Host]:
    for sshd in run_sshd(folder):
        host = Host("sshd", sshd.address, sshd.home, sshd.drop)
        yield host
        host.end_runs()


@pytest.fixture(scope="session", params=["embedded", "sshd"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp(request.param) / "host"
    yield from {"embedded": _embedded, "sshd": _sshd}[request.param](folder)


@pytest.fixture(scope="session")
def sshd_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    yield from _sshd(tmp_path_factory.mktemp("sshd_only") / "host")


@pytest.fixture
async def link(host: Host) -> AsyncIterator[Link]:
    link = Link(host.address)
    yield link
    await link.close()


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run id of this test's own."""
    name = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")
    return f"{name[:30].strip('-')}-{id(request) % 10000}"
