"""SmolLM2-135M through real SGLang: the demo's command, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.models import CACHE, smollm2

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.smollm2, pytest.mark.timeout(900)]


def demo(place: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """hsx-console demo --server sglang in a work directory."""
    argv = [
        sys.executable, "-m", "hsx_tui.cli", "demo", "--workdir", str(place), "--server", "sglang",
        "--model-cache", str(CACHE), "--json", *more,
    ]  # fmt: skip
    return subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False)


def test_the_demo_on_real_sglang(tmp_path: Path) -> None:
    smollm2()
    try:
        done = demo(tmp_path, "--headless", "--samples", "8", "--foreign-traffic")
        assert done.returncode == 0, done.stderr[-3000:]
        out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (out["done"], out["quarantined"], out["pending"]) == (8, 0, 0)
        assert out["verified"]["samples"] == 8
        assert out["verified"]["min_cosine"] > 0.9999  # stored in bfloat16
        assert out["server"]["attribution"] == "rid"
        assert out["traffic"]["ours"] >= 8
        assert out["traffic"]["foreign"] > 0
    finally:
        demo(tmp_path, "--stop")
