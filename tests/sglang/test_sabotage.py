"""States damaged inside real SGLang, with right rids, ids and lengths: every touched sample is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.sglang import tiny
from tests.sglang.conftest import serving
from tests.sglang.foreign import Foreign
from tests.sglang.jobs import least_cosines, make_job, rows_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LENGTHS = (2, 8, 33, 64, 65, 100, 257, 300, 12, 40)


def test_every_touched_sample_is_refused_and_taken_again(models: Path, tmp_path: Path) -> None:
    plan = tmp_path / "sabotage"
    plan.mkdir()
    rows = rows_of(LENGTHS * 3, seed=5)
    plugins = "hsx_capture,hsx_cpu_shim,hsx_sabotage"
    env = {"HSX_SABOTAGE": str(plan)}
    with serving(tiny.make("qwen3", models), tmp_path, plugins=plugins, env=env) as server:
        truth = tiny.load(server.model)
        for kind in ("shift", "swap", "repeat"):
            (plan / "kind").write_text(kind)
            (plan / "touched.jsonl").write_text("")
            job = make_job(tmp_path / kind, server, rows, run=kind, canary=0)
            with Foreign(server.url):
                assert job.run() == 0, job.log()
            touched = {json.loads(line)["rid"] for line in (plan / "touched.jsonl").read_text().splitlines()}
            refused = {e["rid"]: e["cause"] for e in job.events("mismatch")}
            assert len(touched) >= 5
            assert set(refused) == touched, (kind, refused)
            print(f"{kind}: {len(touched)} of {len(touched)} refused, {sorted(set(refused.values()))}")  # noqa: T201
            assert {e["outcome"] for e in job.events("mismatch")} == {"retried"}
            assert len(job.index()) == len(rows)
            assert min(least_cosines(job, rows, truth).values()) >= 0.999999
