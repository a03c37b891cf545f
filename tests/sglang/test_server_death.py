"""kill -9 of a real SGLang at random moments of a run: the run waits, goes on, and its store ends exact."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from engine.capture.pythonpath.hsx_capture.beacon import start_ticks
from tests.sglang import tiny
from tests.sglang.conftest import serving
from tests.sglang.jobs import least_cosines, make_job, rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sglang.jobs import Job

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("HSX_KILLS", "4"))
"""Four in CI, twenty in `make soak`."""


def seen(job: Job, kind: str) -> int:
    """How many events of a type there are; 0 before the first."""
    return len(job.events(kind)) if (job.place / "run" / "events.jsonl").exists() else 0


def test_killed_at_random_moments(models: Path, tmp_path: Path) -> None:
    rng = random.Random(2026)
    rows = rows_of([rng.randint(200, 900) for _ in range(30 * KILLS)], seed=9)
    before = set(os.listdir("/dev/shm"))
    with serving(tiny.make("llama", models), tmp_path, "--disable-radix-cache") as server:
        job = make_job(tmp_path / "job", server, rows, concurrency=4, shard_seconds=0.5)
        engine = job.start()
        for number in range(KILLS):
            done, end = seen(job, "sample_done"), time.monotonic() + 120
            while seen(job, "sample_done") <= done and engine.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(rng.random() * 1.5)
            if engine.poll() is not None:
                break
            if number % 2:  # the one process that computes; the others find out by themselves
                os.kill(server.scheduler_pid(), signal.SIGKILL)
                time.sleep(rng.random() * 3)
            server.kill()
            time.sleep(rng.random() * 2)
            server.start().wait()
        assert engine.wait(300) == 0, job.log()
        assert number + 1 == KILLS, f"the run was over after {number} kills"
        assert sorted(job.index()) == list(range(len(rows)))
        assert min(least_cosines(job, rows, tiny.load(server.model)).values()) >= 0.999999
        assert seen(job, "paused") >= 1
        dumps, pids = server.dump_dir, server.pids()
        assert not [p for p in dumps.iterdir() if not p.name.startswith("plugin-")]
    assert not dumps.exists()
    assert not [pid for pid in pids if start_ticks(pid) is not None]
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if name.startswith(("sgl", "sem.mp"))}
