"""How much of the bare server's speed is left when hidden states are captured, and when they are checked
and stored?

    python -m benchmarks.pipeline [--rounds 10] [--samples 24] [--threads 2]

Three ways over the same samples with the same concurrency, interleaved: the bare server; a server with
capture (dumps written and removed); the whole pipeline to verified shards. Tokens are prompt tokens; the
clock runs from the first request to the last answer, or to the last durable shard. CPU seconds are the
server's and the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from benchmarks.measure import cpu_seconds, machine, spread
from engine.dataset.samples import Samples
from engine.dataset.tokens import Tokens
from engine.demo.dataset import CONVERSATIONS
from engine.host.events import EventLog
from engine.run.job import run_job
from engine.wire.spec import extract_from_json
from tests.demo.harness import Server, start_server, stop_server
from tests.models import smollm2

if TYPE_CHECKING:
    from collections.abc import Callable

TAPS = (1, 14, 26)
CONCURRENCY = 8


@dataclass(frozen=True)
class Measured:
    """One way, once."""

    tok_per_s: float
    server_cpu: float
    client_cpu: float


async def drive(server: Server, requests: list[list[int]], serial: int) -> None:
    """Send all requests, CONCURRENCY at once; remove each dump after its answer."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(i: int, ids: list[int]) -> None:
        name = f"hsx-bench-{serial * 1000 + i:08d}-01_"
        params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        async with gate:
            response = await http.post(
                "/generate",
                json={"rid": name, "input_ids": ids, "sampling_params": params, "extra_key": name},
            )
        response.raise_for_status()
        (server.folder / f"{name}.safetensors").unlink(missing_ok=True)

    async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(one(i, ids) for i, ids in enumerate(requests)))


def measure(server: Server, work: Callable[[], float], tokens: int) -> Measured:
    """``work`` returns the seconds that count."""
    before, mine = cpu_seconds(server.process.pid), time.process_time()
    seconds = work()
    return Measured(tokens / seconds, cpu_seconds(server.process.pid) - before, time.process_time() - mine)


def timed(server: Server, requests: list[list[int]], serial: int) -> float:
    """Seconds for all answers."""
    began = time.monotonic()
    asyncio.run(drive(server, requests, serial))
    return time.monotonic() - began


def pipeline(server: Server, model: Path, dataset: Path, samples: int, place: Path) -> float:
    """Seconds of the extraction phase: from its first request to its last durable shard."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    spec: dict[str, Any] = {
        "run": "bench",
        "store": str(place / "store"),
        "dataset": {"path": str(dataset), "rows": [0, samples]},
        "target": {"model": str(model), "taps": list(TAPS)},
        "source": {"url": server.url, "dump_dir": str(server.folder)},
        "concurrency": CONCURRENCY,
        "canary": 0,
    }
    marks: dict[str, float] = {}
    with contextlib.closing(EventLog(place / "events.jsonl")) as log:
        emit = log.emit

        def note(kind: str, **fields: Any) -> int:
            if kind == "phase" and fields["name"] == "extract":
                marks["began"] = time.monotonic()
            if kind == "shard_committed":
                marks["ended"] = time.monotonic()
            return emit(kind, **fields)

        log.emit = note  # type: ignore[method-assign]
        result = asyncio.run(run_job(extract_from_json(spec), log, 1))
    assert result.done == samples
    return marks["ended"] - marks["began"]


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--samples", type=int, default=24)
    p.add_argument("--threads", type=int, default=2, help="of the server")
    args = p.parse_args()
    torch.set_num_threads(1)
    model = smollm2()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="hsx-bench-") as folder:
        place = Path(folder)
        dataset = place / "d.jsonl"
        ids = [
            list(s.input_ids)
            for s in Samples(str(CONVERSATIONS), Tokens(str(model)))
            if len(s.input_ids) <= 600
        ]
        ids = ids[: args.samples]
        dataset.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
        tokens = sum(map(len, ids))
        print(f"{len(ids)} samples, {tokens} tokens, concurrency {CONCURRENCY}, {args.rounds} rounds")
        print(f"server threads: {args.threads}")
        servers = []
        try:
            for name, flags in (("bare", ["--no-capture"]), ("capture", [])):
                (place / name).mkdir()
                flags += ["--threads", str(args.threads), "--taps", " ".join(map(str, TAPS))]
                servers.append(start_server(model, place / name, *flags))
            bare, capture = servers
            ways: dict[str, Callable[[int], Measured]] = {
                "bare": lambda i: measure(bare, lambda: timed(bare, ids, i), tokens),
                "capture": lambda i: measure(capture, lambda: timed(capture, ids, i), tokens),
                "pipeline": lambda i: measure(
                    capture, lambda: pipeline(capture, model, dataset, len(ids), place / "run"), tokens
                ),
            }
            table(ways, args.rounds)
        finally:
            for server in servers:
                stop_server(server.process)


def table(ways: dict[str, Callable[[int], Measured]], rounds: int) -> None:
    """Interleaved rounds in rotating order; ratios are paired within a round."""
    seen: dict[str, list[Measured]] = {name: [] for name in ways}
    orders = list(itertools.permutations(ways))
    serial = itertools.count()
    for name in ways:
        ways[name](next(serial))  # warm
    for i in range(rounds):
        for name in orders[i % len(orders)]:
            seen[name].append(ways[name](next(serial)))
        print(
            f"round {i + 1}: " + "  ".join(f"{n} {m[-1].tok_per_s:.0f} tok/s" for n, m in seen.items()),
            flush=True,
        )
    print("\n| way | tok/s | ratio to bare | server CPU s | client CPU s |\n|---|---|---|---|---|")
    for name, measured in seen.items():
        ratio = [m.tok_per_s / b.tok_per_s for m, b in zip(measured, seen["bare"], strict=True)]
        print(
            f"| {name} | {spread([m.tok_per_s for m in measured]).median:.0f} | {spread(ratio)} | "
            f"{spread([m.server_cpu for m in measured]).median:.1f} | "
            f"{spread([m.client_cpu for m in measured]).median:.1f} |"
        )


if __name__ == "__main__":
    main()
