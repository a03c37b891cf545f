"""The main job on real SGLang, model by model: every stored sample against transformers, in company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sglang import tiny
from tests.sglang.conftest import serving
from tests.sglang.foreign import Foreign
from tests.sglang.jobs import LENGTHS, least_cosines, make_job, rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LEAST = 0.999999

SERVERS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "qwen3, radix cache off": ("qwen3", ("--disable-radix-cache",), {}),
    "qwen3_moe, tp 2, dp 2, DP attention": (
        "qwen3_moe",
        ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
        {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "qwen3_next, hybrid": ("qwen3_next", ("--disable-radix-cache",), {"SGLANG_MAMBA_CONV_DTYPE": "float32"}),
    "llama, tp 2": ("llama", ("--tp", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}


def check_job(server: Server, place: Path, copies: int = 3, **changes: object) -> dict[str, float]:
    """Take rows of every length under foreign load; all must be stored and equal a lone forward."""
    rows = rows_of(LENGTHS * copies, seed=len(str(place)))
    job = make_job(place, server, rows, **changes)
    with Foreign(server.url) as foreign:
        code = job.run()
    assert code == 0, job.log()
    assert sorted(job.index()) == list(range(len(rows)))
    assert not foreign.errors
    assert foreign.answers > len(rows) // 2
    assert foreign.checks > 0
    assert not job.events("mismatch"), job.events("mismatch")[:3]
    assert [p.name for p in server.dump_dir.iterdir() if not p.name.startswith("plugin-")] == []
    return least_cosines(job, rows, tiny.load(server.model))


def test_llama_with_mixed_chunks_and_the_radix_cache(llama: Server, tmp_path: Path) -> None:
    least = check_job(llama, tmp_path, copies=8)
    assert min(least.values()) >= LEAST, least
    assert "#new-seq: 2" in llama.log.read_text(errors="replace")  # requests did share forwards


def test_post_norm_states(llama: Server, tmp_path: Path) -> None:
    least = check_job(llama, tmp_path, target={"last": "post"})
    assert min(least.values()) >= LEAST, least


@pytest.mark.parametrize("name", SERVERS)
def test_other_models_and_parallel_forms(name: str, models: Path, tmp_path: Path) -> None:
    kind, flags, env = SERVERS[name]
    with serving(tiny.make(kind, models), tmp_path, *flags, env=env) as server:
        least = check_job(server, tmp_path / "job")
    assert min(least.values()) >= LEAST, least
