"""The main job with real trained weights, as the README's reader runs it."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.store.store import read_index
from tests.acceptance.cli import Outcome, demo, start

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(900)]

KINDS = ("swap", "shift", "neighbour", "stale")
KEYS = {
    "schema_version", "run", "store", "dataset", "done", "quarantined", "pending", "mismatches", "traffic",
    "verified", "tokens", "tok_per_s", "wall_s", "server",
}  # fmt: skip


def check_clean(out: Outcome, samples: int) -> None:
    """Every row done, each equal to a lone forward of transformers."""
    r = out.result
    assert out.code == 0, out.talk
    assert set(r) >= KEYS
    assert (r["dataset"], r["done"], r["quarantined"], r["pending"]) == (samples, samples, 0, 0)
    assert r["verified"]["samples"] == samples
    assert r["verified"]["min_cosine"] >= 0.9999
    assert sorted(read_index(Path(r["store"]))[0]) == list(range(samples))


def test_forty_samples_beside_foreign_traffic(smol_workdir: Path) -> None:
    out = demo(smol_workdir, "--samples", "40", "--foreign-traffic", timeout_s=800)
    check_clean(out, 40)
    r = out.result
    traffic: dict[str, Any] = r["traffic"]
    assert r["mismatches"] == [], "a good dump was refused"
    assert traffic["foreign"] >= traffic["ours"] >= 40
    assert traffic["shared_forwards"] * 2 >= traffic["ours"]
    assert traffic["chunks"] > traffic["ours"], "no sample came in several chunks"
    assert traffic["largest_batch"] >= 5
    assert traffic["health"] >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_sabotage_is_refused_and_taken_again(smol_workdir: Path, kind: str) -> None:
    log = smol_workdir / "sabotage.jsonl"
    log.unlink(missing_ok=True)
    out = demo(smol_workdir, "--samples", "14", "--foreign-traffic", "--sabotage", kind)
    check_clean(out, 14)
    truth = Counter(json.loads(line)["row"] for line in log.read_text().splitlines())
    refused = Counter(m["row"] for m in out.result["mismatches"])
    assert len(truth) >= 3
    assert refused == truth
    assert {m["outcome"] for m in out.result["mismatches"]} == {"retried"}
    assert all(m["cause"] for m in out.result["mismatches"])


def test_the_screenless_job_aborts_at_half_and_resumes(smol_workdir: Path) -> None:
    """A graceful stop finishes what is in flight, so a few more than half are done."""
    flags = ("--samples", "30", "--abort-at", "50", "--shard-bytes", "1048576", "--concurrency", "4")
    first = demo(smol_workdir, *flags)
    assert first.code == 1, first.talk
    assert 15 <= first.result["done"] < 30
    assert first.result["pending"] == 30 - first.result["done"]
    store = Path(first.result["store"])
    before, _ = read_index(store)
    second = demo(smol_workdir, *flags)
    check_clean(second, 30)
    after, _ = read_index(store)
    assert {row: line.rid for row, line in before.items()} == {row: after[row].rid for row in before}
    began = time.monotonic()
    third = demo(smol_workdir, *flags)
    check_clean(third, 30)
    assert third.result["tokens"] == second.result["tokens"]
    assert time.monotonic() - began < 120


def test_a_second_run_on_a_busy_demo_host_is_refused(smol_workdir: Path) -> None:
    first = start(smol_workdir, "--samples", "17")
    assert first.stderr is not None
    for line in first.stderr:
        if "extract:" in line:
            break
    second = demo(smol_workdir, "--samples", "16")
    assert second.code == 5
    assert "is busy with run demo-17" in second.talk
    first.communicate(timeout=300)
    assert first.returncode == 0
