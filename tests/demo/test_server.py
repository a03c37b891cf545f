"""The server as a process: its interface, its log, its errors, its end."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from tests.demo.harness import TAPS, Lone, Server, compare, start_server
from tests.demo.test_states import prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.tiny


def test_a_reply_names_its_dump(server: Server, lone: Lone) -> None:
    rid, ids = "hsx-reply-00000001-01_", prompt(1, 150)
    reply = server.generate(rid, ids, extra_key=rid).json()
    meta = reply["meta_info"]
    assert meta["id"] == rid and meta["prompt_tokens"] == 150 and meta["cached_tokens"] == 0
    assert meta["completion_tokens"] == 1 == len(reply["output_ids"])
    assert meta["finish_reason"] == {"type": "length", "length": 1}
    assert meta["e2e_latency"] > 0 and meta["weight_version"] == "default"
    dump = server.dump(rid)
    assert meta["hsx"] == {
        "path": str(server.folder / f"{rid}.safetensors"), "num_tokens": 150, "dump_id": dump.meta.dump_id,
        "taps": list(TAPS), "engine_layer_ids": list(TAPS),
    }  # fmt: skip
    assert dump.meta.dump_id.startswith(f"{server.process.pid}-")
    assert [c.start for c in dump.meta.chunks] == [0, 64, 128]
    assert compare(dump, lone.states(ids)).cosine >= 0.999999


def test_only_requests_of_ours_leave_anything(server: Server) -> None:
    before = server.traffic()
    assert "hsx" not in server.generate("somebody", prompt(2, 20), new=4).json()["meta_info"]
    assert "hsx" not in server.generate("hsxc-complete-1", prompt(2, 20)).json()["meta_info"]
    uuid = server.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}).json()
    assert re.fullmatch(r"[0-9a-f]{32}", uuid["meta_info"]["id"])
    after = server.traffic()
    assert after["foreign"] - before["foreign"] == 2 and after["complete"] - before["complete"] == 1
    assert after["ours"] == before["ours"]
    names = {p.name for p in server.folder.iterdir()}
    assert all(n.startswith(("hsx-", "plugin-")) for n in names)
    assert [b["pid"] for b in read_beacons(server.folder)] == [server.process.pid]


def test_health_is_a_real_request(server: Server) -> None:
    before, lines = server.traffic()["health"], server.log.read_text().count("Prefill batch")
    assert server.get("/health").status_code == 200
    assert server.traffic()["health"] == before + 1
    assert server.log.read_text().count("Prefill batch") == lines + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"input_ids": [5] * 3000},
            "The input (3000 tokens) is longer than the model's context length (2048 tokens).",
        ),
        ({"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 100}}, "a total of 2100 tokens"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [[5, 6], [7]]}, "whole numbers"),
        ({"input_ids": [5, True]}, "whole numbers"),
        ({"input_ids": [49152]}, "vocab size (49152)"),
        ({"input_ids": [-1]}, "vocab size (49152)"),
        ({"text": "hello"}, "does not know text"),
        ({"sampling_params": {"n": 2}}, "n must be 1"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"rid": ["a"]}, "rid must be a string"),
        ({"extra_key": 5}, "extra_key must be a string"),
        ({"stream": True}, "does not stream"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server: Server, change: dict[str, Any], text: str) -> None:
    reply = server.post("/generate", {"rid": "bad", "input_ids": [5, 6], **change})
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"7", b""])
def test_a_body_that_is_no_object_is_refused(server: Server, body: bytes) -> None:
    for path in ("/generate", "/abort_request"):
        assert httpx.post(server.url + path, content=body, trust_env=False).status_code == 400


def test_duplicate_abort_and_flush(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(server.generate, "dup", prompt(3, 20), 1500)
        while server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0:
            time.sleep(0.01)
        again = server.generate("dup", [5, 6])
        assert again.status_code == 400
        assert again.json() == {"error": {"message": "Duplicate request ID detected: dup"}}
        busy = server.post("/flush_cache", None)
        assert (busy.status_code, busy.text) == (400, "Flush cache failed.\n")
        assert server.post("/abort_request", {"rid": "du"}).status_code == 200
        assert slow.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/flush_cache", None).status_code == 200
    assert server.post("/abort_request", {}).status_code == 400
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200


def test_a_client_that_leaves_aborts_its_request(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        body = {
            "rid": "left",
            "input_ids": prompt(4, 20),
            "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        }
        server.post("/generate", body, timeout_s=0.3)
    deadline = time.monotonic() + 5
    while server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] and time.monotonic() < deadline:
        time.sleep(0.02)
    load = server.get("/v1/loads").json()["loads"][0]
    assert (load["num_running_reqs"], load["num_used_tokens"]) == (0, 0)
    assert "sglang:num_aborted_requests_total{" in server.get("/metrics").text


def test_the_server_says_how_it_runs(server: Server) -> None:
    info = server.get("/server_info").json()
    assert info["enable_return_aux_hidden_states"] is True
    assert info["return_aux_hidden_state_layer_ids"] == list(TAPS)
    assert info["disable_radix_cache"] is True and info["chunked_prefill_size"] == 64
    assert info["speculative_algorithm"] is None and info["status"] == "ready"
    assert (info["tp_size"], info["dp_size"], info["pp_size"]) == (1, 1, 1)
    assert info["internal_states"][0]["chunked_prefill_size"] == 64
    assert info["startup_time"]["load_weight"] > 0 and "demo serve" in info["launch_command"]
    model = server.get("/model_info").json()
    assert model["architectures"] == ["LlamaForCausalLM"] and model["model_path"] == info["model_path"]
    metrics = server.get("/metrics").text
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "prompt_tokens_total",
        "num_requests_total",
    ):
        assert re.search(rf"^sglang:{name}\{{.*\}} \d", metrics, re.M)
    assert server.get("/no/such/path").status_code == 404
    assert "no/such" not in server.get("/metrics").text


def test_the_log_has_sglangs_lines_in_its_order(server: Server) -> None:
    log = server.log.read_text()
    at = -1
    for line in (
        "server_args=", "Load weight begin. avail mem=", "Multi-thread loading shards:   0% Completed | 0/1",
        "100% Completed | 1/1", "Load weight end. elapsed=", "KV Cache is allocated. dtype: torch.float32",
        "max_total_num_tokens=", "INFO:     Application startup complete.",
        f"INFO:     Uvicorn running on {server.url} (Press CTRL+C to quit)",
        '"GET /model_info HTTP/1.1" 200 OK',
        "Prefill batch, #new-seq: 1, #new-token: 3,", '"POST /generate HTTP/1.1" 200 OK',
        "The server is fired up and ready to roll!",
    ):  # fmt: skip
        found = log.find(line, at + 1)
        assert found > at, f"{line!r} is not where it should be in\n{log}"
        at = found
    stamped = [text for text in log.splitlines() if text and "Multi-thread" not in text]
    assert all(re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", text) for text in stamped)


def test_decode_lines_appear(server: Server) -> None:
    server.generate("talk", prompt(5, 10), new=90)
    assert re.search(
        r"Decode batch, #running-req: 1, #token: \d+, token usage: 0\.\d\d", server.log.read_text()
    )


def test_sigterm_writes_what_was_promised_and_ends_with_0(tiny: Path, tmp_path: Path) -> None:
    server = start_server(tiny, tmp_path)
    replies: list[Any] = []

    def ask(i: int) -> None:
        replies.append(server.generate(f"hsx-end-{i:08d}-01_", prompt(i, 600)).json())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    while server.traffic()["ours"] < 6:
        time.sleep(0.01)
    server.process.terminate()
    for t in threads:
        t.join(30)
    assert server.process.wait(30) == 0
    promised = [r["meta_info"]["hsx"] for r in replies if "hsx" in r["meta_info"]]
    assert len(replies) == 6 and promised
    for handshake in promised:
        rid = handshake["path"].rsplit("/", 1)[1].removesuffix(".safetensors")
        assert server.dump(rid).meta.ok
    assert not [p.name for p in server.folder.iterdir() if p.name.startswith((".tmp", "plugin"))]


def test_a_port_is_open_only_after_loading_and_a_taken_one_is_refused(tiny: Path, tmp_path: Path) -> None:
    from tests.demo.test_flags import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        code, out = serve("--model", str(tiny), "--dump-dir", str(tmp_path / "d"), "--port", str(port))
        assert code == 5 and f"port {port} cannot be used: Address already in use" in out
        assert time.monotonic() - began < 30 and not (tmp_path / "d").exists()
