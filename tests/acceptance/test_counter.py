"""The main job from counter-numbered dumps, with real trained weights, as the README's reader runs it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from engine.store.store import read_index
from tests.acceptance.cli import demo

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(900)]


def test_counter_numbered_dumps_beside_foreign_traffic(smol_workdir: Path) -> None:
    """Row 4 has 1432 tokens, more than the server's chunk of 512: nothing proves that its chunks belong
    together."""
    samples = 21
    flags = ("--samples", str(samples), "--dump-mode", "counter", "--foreign-traffic")
    out = demo(smol_workdir, *flags, timeout_s=800)
    r = out.result
    assert out.code == 1, out.talk
    assert (r["dataset"], r["pending"], r["bad"]) == (samples, 0, [])
    assert r["done"] >= samples - 3
    assert r["done"] + r["quarantined"] == samples
    assert r["verified"]["samples"] == r["done"]
    assert r["verified"]["min_cosine"] >= 0.9999
    assert r["server"]["attribution"] == "count"
    store = Path(r["store"])
    assert json.loads((store / "manifest.json").read_bytes())["attribution"] == "count"
    assert len(read_index(store)[0]) == r["done"]
    causes = Counter(m["cause"] for m in r["mismatches"])
    assert {"stale", "decode_step", "partial_chunk", "foreign"} <= set(causes), causes
    assert {"row": 4, "cause": "partial_chunk", "got": 512, "expected": 1432, "outcome": "quarantined"} in (
        r["mismatches"]
    )
    assert all(m["outcome"] in ("retried", "quarantined") for m in r["mismatches"])
    again = demo(smol_workdir, *flags)
    assert (again.result["done"], again.result["run"]) == (r["done"], r["run"])
