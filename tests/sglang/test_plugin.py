"""The plugin inside a real SGLang: how it is loaded, what a reply and a dump say, what it refuses."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.capture import plugin
from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from engine.capture.pythonpath.hsx_capture.dumpfile import Dump, DumpMissing, WriterFailed, read_dump
from tests.sglang import tiny
from tests.sglang.conftest import serving
from tests.sglang.jobs import make_job, rows_of
from tests.sglang.server import PYTHON

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def ask(server: Server, rid: str, ids: list[int], **more: Any) -> httpx.Response:
    """POST /generate, one greedy token."""
    body = {
        "rid": rid, "input_ids": ids, "extra_key": rid, **more,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }  # fmt: skip
    return httpx.post(f"{server.url}/generate", json=body, timeout=120.0, trust_env=False)


def dump_of(server: Server, rid: str, dump_id: str | None = None) -> Dump:
    """The dump of a request whose answer came; ``dump_id``: as its handshake named it."""
    end = time.monotonic() + 20
    while True:
        try:
            dump = read_dump(server.dump_dir, rid)
            if dump_id in (None, dump.meta.dump_id):
                return dump
        except DumpMissing:
            pass
        assert time.monotonic() < end, f"no dump {dump_id} of {rid}"
        time.sleep(0.02)


def test_the_beacon_says_what_is_captured(llama: Server) -> None:
    (beacon,) = read_beacons(llama.dump_dir)
    assert beacon["pid"] == llama.scheduler_pid()
    assert beacon["taps"] == [0, 1, 2]
    assert beacon["engine_layer_ids"] == [1, 2, 3]
    assert beacon["layers_error"] == ""
    assert beacon["hidden_size"] == tiny.HIDDEN
    assert set(beacon["env"]) <= {"SGLANG_USE_CPU_ENGINE"}


def test_the_handshake_names_the_dump(llama: Server) -> None:
    (ids,) = rows_of([300], seed=1)
    meta = ask(llama, "hsx-a-00000000-01_", ids).json()["meta_info"]
    (shake,) = meta["hsx"]
    dump = dump_of(llama, "hsx-a-00000000-01_")
    assert meta["cached_tokens"] == 0
    assert shake["num_tokens"] == 300 == len(dump.input_ids)
    assert shake["dump_id"] == dump.meta.dump_id
    assert dump.meta.ok
    assert dump.meta.ids_checked
    assert dump.meta.taps == (0, 1, 2)
    assert dump.meta.engine_layer_ids == (1, 2, 3)
    assert [c.start for c in dump.meta.chunks] == [0, 128, 256]
    assert oct(llama.dump_dir.stat().st_mode)[-3:] == "700"
    (llama.dump_dir / "hsx-a-00000000-01_.safetensors").unlink()


def test_a_foreign_request_is_neither_captured_nor_told(llama: Server) -> None:
    (ids,) = rows_of([40], seed=2)
    meta = ask(llama, "user-1", ids).json()["meta_info"]
    assert "hsx" not in meta
    assert not list(llama.dump_dir.glob("user*"))


def test_a_prefix_hit_is_never_written_as_good(llama: Server) -> None:
    """Two requests with the same extra_key share the cache: the second one's first rows are missing."""
    (ids,) = rows_of([200], seed=3)
    ask(llama, "hsx-p-00000000-01_", ids, extra_key="shared")
    meta = ask(llama, "hsx-p-00000001-01_", ids, extra_key="shared").json()["meta_info"]
    assert meta["cached_tokens"] > 0
    dump = dump_of(llama, "hsx-p-00000001-01_")
    assert not dump.meta.ok
    assert dump.aux is None
    assert dump.meta.error.startswith("prefix cache hit")
    good = dump_of(llama, "hsx-p-00000000-01_")
    assert good.meta.ok
    for name in ("hsx-p-00000000-01_", "hsx-p-00000001-01_"):
        (llama.dump_dir / f"{name}.safetensors").unlink()


def test_a_request_that_comes_after_an_aborted_one_of_its_name_has_its_own_dump(llama: Server) -> None:
    """A client that is gone is an abort; if the first was written all the same, the handshake tells."""
    (ids,) = rows_of([1900], seed=4)
    with httpx.Client(trust_env=False) as http:
        with pytest.raises(httpx.ReadTimeout):
            body = {"rid": "hsx-x-00000000-01_", "input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
            http.post(f"{llama.url}/generate", json=body, timeout=0.05)
        time.sleep(1.0)
    (short,) = rows_of([20], seed=5)
    meta = ask(llama, "hsx-x-00000000-01_", short).json()["meta_info"]
    dump = dump_of(llama, "hsx-x-00000000-01_", meta["hsx"][0]["dump_id"])
    assert meta["prompt_tokens"] == 20
    assert dump.input_ids.tolist() == short
    (llama.dump_dir / "hsx-x-00000000-01_.safetensors").unlink()


def test_taps_that_the_server_does_not_capture_are_refused_before_the_first_sample(
    llama: Server, tmp_path: Path
) -> None:
    job = make_job(tmp_path, llama, rows_of([30] * 4), target={"taps": [0, 1, 3]})
    assert job.run() == 5, job.log()
    assert "layers" in job.log()
    assert not (job.store / "manifest.json").exists()


def test_the_engine_runs_in_the_servers_own_environment(llama: Server, tmp_path: Path) -> None:
    job = make_job(tmp_path, llama, rows_of([5, 150, 60, 33]))
    job.python = str(PYTHON)
    assert job.run() == 0, job.log()
    assert len(job.index()) == 4


def test_a_full_budget_is_refused_and_costs_a_foreign_user_nothing(models: Path, tmp_path: Path) -> None:
    """python -E, so the plugin comes by its launcher; an API key; a dump folder that nobody empties."""
    env = {"HSX_FOLDER_BYTES": "400000"}
    with serving(tiny.make("qwen3", models), tmp_path, "--api-key", "k3y", env=env, isolated=True) as server:
        (ids,) = rows_of([250], seed=6)
        assert ask(server, "user-2", ids).status_code == 401
        said = []
        with httpx.Client(headers={"authorization": "Bearer k3y"}, trust_env=False, timeout=60.0) as http:
            for number in range(6):
                rid = f"hsx-b-{number:08d}-01_"
                body = {
                    "rid": rid,
                    "input_ids": ids,
                    "extra_key": rid,
                    "sampling_params": {"max_new_tokens": 1},
                }
                (shake,) = http.post(f"{server.url}/generate", json=body).json()["meta_info"]["hsx"]
                said.append("error" in shake)
                time.sleep(0.7)  # the writer is done, and the folder was looked at
            body = {"rid": "user-3", "input_ids": ids, "sampling_params": {"max_new_tokens": 2}}
            assert http.post(f"{server.url}/generate", json=body).status_code == 200
        assert said[0] is False
        assert said[-1] is True
        used = sum(p.stat().st_size for p in server.dump_dir.iterdir())
        assert used <= 400_000
        with pytest.raises(WriterFailed, match="no room"):
            read_dump(server.dump_dir, "hsx-b-00000005-01_")
        for file in server.dump_dir.glob("hsx-b*"):
            file.unlink()
        job = make_job(tmp_path / "job", server, rows_of([40, 90, 12]), source={"api_key_env": "K"})
        job.environment = {"K": "k3y"}
        assert job.run() == 0, job.log()


LAYERS = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from hsx_capture.layers import read_layers
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV2Model

class Group: is_last_rank = True

def ask(setter, ids):
    outer, inner = torch.nn.Module(), object.__new__(DeepseekV2Model)
    torch.nn.Module.__init__(inner)
    inner.layers_to_capture = []
    outer.model, outer.pp_group = inner, Group()
    getattr(DeepseekV2ForCausalLM, setter)(outer, ids)
    return read_layers(outer).taps

eagle, dflash = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
asked = (eagle, [1, 29, 57]), (eagle, [0, 29, 57]), (eagle, [3, 30, 58]), (dflash, [0, 29, 57])
print(json.dumps([ask(*each) for each in asked]))
"""


def test_the_layers_of_deepseek_are_read_from_the_model_not_from_the_flags() -> None:
    """SGLang's own setters decide, only the reading is ours: [0, 29, 57] is captured one layer early."""
    done = subprocess.run(
        [PYTHON, "-c", LAYERS, str(plugin.plugin_folder())], capture_output=True, text=True, timeout=200,
        env={"SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin"}, check=True,
    )  # fmt: skip
    taps = json.loads(done.stdout.splitlines()[-1])
    assert taps == [[1, 29, 57], [-1, 28, 56], [2, 29, 57], [0, 29, 57]]
