"""What the tests of the demo share: a lone forward, a scheduler in this process, a server as a process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import torch

from engine.capture.pythonpath.hsx_capture.dumpfile import Dump, DumpMissing, read_dump
from engine.demo.requests import Request, Sampling
from engine.demo.tiny import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.capture.pythonpath.hsx_capture.recorder import Recorder
    from engine.demo.counts import Counts
    from engine.demo.scheduler import Scheduler

TAPS = (1, 3, 4)


@dataclass(frozen=True)
class Truth:
    """A lone forward of transformers: [S, H] each."""

    taps: dict[int, torch.Tensor]
    last: torch.Tensor
    pre: torch.Tensor


@dataclass(frozen=True, eq=False)
class Lone:
    """transformers by itself: no batch, no chunks, its own attention."""

    model: Any

    @torch.inference_mode()
    def states(self, ids: list[int]) -> Truth:
        """All taps of one prompt."""
        decoder = self.model.get_decoder()
        seen: list[torch.Tensor] = []
        handle = decoder.layers[-1].register_forward_hook(lambda m, a, o: seen.append(o))
        try:
            out = decoder(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        finally:
            handle.remove()
        taps = {t: out.hidden_states[t + 1][0] for t in TAPS}
        return Truth(taps, out.last_hidden_state[0], seen[0][0])

    @torch.inference_mode()
    def greedy(self, ids: list[int], new: int) -> list[int]:
        """The greedy continuation, recomputed from the first token at every step."""
        tokens = list(ids)
        for _ in range(new):
            tokens.append(
                int(self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
        return tokens[len(ids) :]


@dataclass(frozen=True)
class Comparison:
    """Over all rows and tensors: the least cosine and the largest error relative to the row's norm."""

    cosine: float
    error: float


def row_errors(got: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """[S, H] twice -> [S], relative."""
    a, b = got.double(), true.double()
    errors: torch.Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1)
    return errors


def compare(dump: Dump, truth: Truth) -> Comparison:
    """All tensors of a dump against a lone forward."""
    assert dump.aux is not None and dump.last is not None and dump.pre is not None
    pairs = [(dump.last, truth.last), (dump.pre, truth.pre)]
    pairs += list(zip(torch.split(dump.aux, HIDDEN, dim=1), truth.taps.values(), strict=True))
    cosine, error = 1.0, 0.0
    for got, true in pairs:
        assert got.shape == true.shape
        cos = torch.nn.functional.cosine_similarity(got.double(), true.double(), dim=-1)
        cosine = min(cosine, float(cos.min()))
        error = max(error, float(row_errors(got, true).max()))
    return Comparison(cosine, error)


def wait_for_dump(folder: Path, rid: str, timeout_s: float) -> Dump:
    """The dump of a request whose answer came: the writer may still be at it. Raises DumpMissing."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return read_dump(folder, rid)
        except DumpMissing:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@dataclass(eq=False)
class Bench:
    """A scheduler in this process."""

    scheduler: Scheduler
    recorder: Recorder
    counts: Counts
    folder: Path
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def submit(
        self, rid: str, ids: list[int], new: int = 1, extra_key: str | None = None, **sampling: Any
    ) -> Answer:
        """Ask; the answer comes later."""
        answer = Answer()
        how = Sampling(**{"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.scheduler.submit(Request(rid, next(self.serials), ids, how, answer.settle, extra_key))
        return answer

    def dump(self, rid: str, timeout_s: float = 10.0) -> Dump:
        """The dump of a request whose answer came."""
        return wait_for_dump(self.folder, rid, timeout_s)


class Answer:
    """What a request will become."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._request: Request | None = None

    def settle(self, request: Request) -> None:
        """Called by the scheduler."""
        self._request = request
        self._event.set()

    def get(self, timeout_s: float = 60.0) -> Request:
        """Wait for it."""
        assert self._event.wait(timeout_s), "no answer in time"
        assert self._request is not None
        return self._request


@dataclass(eq=False)
class Server:
    """A server as a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    log: Path
    sabotage_log: Path

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, timeout=60.0, trust_env=False)

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> httpx.Response:
        """POST JSON."""
        return httpx.post(self.url + path, json=body, timeout=timeout_s, trust_env=False)

    def generate(self, rid: str, ids: list[int], new: int = 1, **more: Any) -> httpx.Response:
        """POST /generate, greedy."""
        params = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"rid": rid, "input_ids": ids, "sampling_params": params, **more})

    def traffic(self) -> dict[str, int]:
        """Its own counters."""
        counts: dict[str, int] = self.get("/server_info").json()["hsx_demo"]["traffic"]
        return counts

    def dump(self, rid: str) -> Dump:
        """The dump of a request whose answer came."""
        return wait_for_dump(self.folder, rid, 10.0)


def start_server(model: Path, place: Path, *flags: str) -> Server:
    """Start ``python -m engine demo serve`` and wait until it is ready."""
    port_file, log = place / "port", place / "server.log"
    argv = [
        sys.executable, "-m", "engine", "demo", "serve", "--model", str(model), "--taps", " ".join(map(str,
        TAPS)), "--dump-dir", str(place / "dumps"), "--port-file", str(port_file), "--threads", "1",
        "--sabotage-log", str(place / "sabotage.jsonl"), *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists():
            url = f"http://127.0.0.1:{int(port_file.read_text())}"
            try:
                if httpx.get(url + "/ready", trust_env=False).status_code == 200:
                    return Server(process, url, place / "dumps", log, place / "sabotage.jsonl")
            except httpx.TransportError:
                pass
        time.sleep(0.05)
    stop_server(process)
    raise AssertionError(f"the server did not come up:\n{log.read_text()}")


def stop_server(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, and SIGKILL when that does not help."""
    process.terminate()
    try:
        return process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(10)


def sabotage_lines(path: Path) -> list[dict[str, Any]]:
    """The truth about what was corrupted."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
