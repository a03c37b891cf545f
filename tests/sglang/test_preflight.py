"""What the preflight refuses on a real server, and that it is right: last layer, a hybrid's conv state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from tests.sglang import tiny
from tests.sglang.conftest import serving
from tests.sglang.jobs import make_job, rows_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def refused(place: Path, server: object, taps: tuple[int, ...]) -> dict[str, str]:
    """Run a job that must be refused: what each failed check says to do."""
    job = make_job(place, server, rows_of((1, 65, 257)), target={"taps": list(taps)})  # type: ignore[arg-type]
    assert job.run() == 5, job.log()
    assert not (job.store / "manifest.json").exists()
    checks = job.events("preflight")[0]["checks"]
    return {c["name"]: c["next"] for c in checks if not c["ok"]}


def test_the_last_layer_is_refused_and_would_have_ended_the_server(models: Path, tmp_path: Path) -> None:
    model = tiny.make("llama", models)
    with serving(model, tmp_path, "--skip-server-warmup", taps=(0, 1, 3)) as server:
        found = refused(tmp_path / "job", server, (0, 1, 3))
        assert list(found) == ["last layer"]
        assert "--return-aux-hidden-state-layer-ids 0 1" in found["last layer"]
        assert httpx.get(f"{server.url}/ready", trust_env=False).status_code == 200
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{server.url}/generate", json=body, timeout=60.0, trust_env=False).raise_for_status()
        end = time.monotonic() + 60
        why = "The model captured 2 aux hidden states"
        while why not in server.log.read_text(errors="replace") and time.monotonic() < end:
            time.sleep(0.1)
        assert why in server.log.read_text(errors="replace")
        while read_beacons(server.dump_dir) and time.monotonic() < end:
            assert all(why in str(b.get("failed", why)) for b in read_beacons(server.dump_dir))
            time.sleep(0.1)
        assert not read_beacons(server.dump_dir)


def test_a_chunked_hybrid_with_an_inexact_conv_state_is_refused(models: Path, tmp_path: Path) -> None:
    model = tiny.make("qwen3_next", models)
    with serving(model, tmp_path, "--disable-radix-cache") as server:
        found = refused(tmp_path / "job", server, (0, 1, 2))
    assert list(found) == ["chunked hybrid"]
    assert "SGLANG_MAMBA_CONV_DTYPE=float32" in found["chunked hybrid"]
