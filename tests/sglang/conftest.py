"""Real SGLang servers for the tests, each started once and shared: a start takes half a minute."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sglang import tiny
from tests.sglang.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ("--max-total-tokens", "16384", "--max-running-requests", "16", "--chunked-prefill-size", "128")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the tiny models."""
    return tmp_path_factory.mktemp("models")


@contextmanager
def serving(model: Path, place: Path, *extra: str, **how: Any) -> Iterator[Server]:
    """A server with a dump folder of its own; both are gone afterwards."""
    dumps = Path(f"/dev/shm/hsx-{os.geteuid()}-{secrets.token_hex(6)}")
    server = Server(model, dumps, place / "server.log", how.pop("taps", (0, 1, 2)), (*SMALL, *extra), **how)
    try:
        yield server.start().wait()
    finally:
        server.stop()
        shutil.rmtree(dumps, ignore_errors=True)


@pytest.fixture(scope="session")
def llama(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tiny Llama: radix cache on, overlap schedule, mixed chunks."""
    with serving(tiny.make("llama", models), tmp_path_factory.mktemp("llama"), "--enable-mixed-chunk") as s:
        yield s
