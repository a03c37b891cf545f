"""A tiny model, the scheduler in this process with a lone forward to compare with, and a server as a
process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.capture.pythonpath.hsx_capture.folder import Limits
from engine.capture.pythonpath.hsx_capture.recorder import CaptureFacts, Recorder
from engine.demo.batching import BatchRules
from engine.demo.counts import Counts
from engine.demo.packed import PackedModel, load_weights
from engine.demo.prefix_cache import PrefixCache
from engine.demo.sabotage import Sabotage
from engine.demo.scheduler import Scheduler
from engine.demo.tiny import HIDDEN, make_tiny
from tests.demo.harness import TAPS, Bench, Lone, Server, start_server, stop_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def packed(tiny: Path) -> PackedModel:
    """The tiny model as the server computes it."""
    torch.set_num_threads(1)
    return PackedModel(load_weights(tiny), TAPS)


@pytest.fixture(scope="session")
def lone(tiny: Path) -> Lone:
    """The yardstick."""
    return Lone(load_weights(tiny))


@pytest.fixture
def bench(packed: PackedModel, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes schedulers over the tiny model; they are stopped at the end."""
    made: list[Bench] = []

    def make(
        chunk: int = 64, running: int = 16, mixed: bool = True, cache: bool = False, sabotage: str | None =
            None,
        always: bool = False, limits: Limits | None = None,
    ) -> Bench:  # fmt: skip
        folder = tmp_path / f"dumps{len(made)}"
        facts = CaptureFacts(TAPS, TAPS, "tiny", "test")
        recorder = Recorder(folder, facts, limits or Limits(free_floor_bytes=1 << 20), packed.norm)
        recorder.start()
        counts = Counts()
        log = tmp_path / "sabotage.jsonl"
        saboteur = Sabotage(sabotage, always, 0, log, HIDDEN) if sabotage else None
        scheduler = Scheduler(
            packed, BatchRules(chunk, running, mixed), counts, 100_000,
            PrefixCache(10_000) if cache else None, recorder, saboteur, threads=1,
        )  # fmt: skip
        scheduler.start()
        made.append(Bench(scheduler, recorder, counts, folder))
        return made[-1]

    yield make
    for b in made:
        b.scheduler.stop(0)
        b.recorder.close()


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module."""
    running = start_server(tiny, tmp_path_factory.mktemp("server"), "--chunked-prefill-size", "64")
    yield running
    stop_server(running.process)
