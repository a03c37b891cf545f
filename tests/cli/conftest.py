"""One embedded host for all tests of the verbs, and a configuration that names it alone."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from hsx_tui.deploy.embedded import ensure_host, stop_host

from .support import DemoHost, write_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def demo_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoHost]:
    workdir = tmp_path_factory.mktemp("cli") / "host"
    asyncio.run(ensure_host(workdir))
    host = DemoHost(workdir)
    yield host
    host.end_runs()
    asyncio.run(stop_host(workdir))


@pytest.fixture
def config(demo_host: DemoHost, tmp_path: Path) -> Path:
    """The host, a server that is not there, a run that was never started and one whose dataset is missing."""
    return write_config(
        tmp_path / "config.toml",
        {
            "hosts.demo": demo_host.table(python=sys.executable),
            "servers.small": {"host": "demo", "url": "http://127.0.0.1:9", "dump_dir": "/dev/shm/hsx-no"},
            "targets.small": {"model": "/nowhere/model", "taps": [1, 3, 4]},
            "datasets.missing": {"path": "missing.jsonl"},
            "runs.never": {"dataset": "missing", "store": "stores/never"},
            "runs.broken": {"dataset": "missing", "store": "stores/broken", "rows": [0, 4]},
        },
    )
