"""What the capture plugin costs a real SGLang: prefill speed without it, beside it and with it at work.

    python -m benchmarks.capture [--model smollm2|tiny] [--rounds 10] [--requests N]

Four ways over the same prompts with the same concurrency, interleaved in rotating order: *plain* has neither
flag nor plugin; *flag* has the aux flag alone; *idle* is the server with the plugin, asked by a foreign
client; *capturing* is the same server asked by us, each dump removed after its answer. Tokens are prompt
tokens, one greedy token is answered. The clock runs from the first request to the last answer; CPU seconds
are those of the scheduler process. Needs `make sglang`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.measure import cpu_seconds, machine, spread
from tests.models import smollm2
from tests.sglang import tiny
from tests.sglang.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

CONCURRENCY = 4
TOKENS = 256


@dataclass(frozen=True)
class Measured:
    """One way, once."""

    tok_per_s: float
    cpu: float


async def drive(server: Server, prompts: list[list[int]], prefix: str, serial: int) -> None:
    """Send all prompts, CONCURRENCY at once; remove what is dumped after each answer."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(http: httpx.AsyncClient, i: int, ids: list[int]) -> None:
        name = f"{prefix}-bench-{serial * 1000 + i:08d}-01_"
        params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"rid": name, "input_ids": ids, "sampling_params": params, "extra_key": name}
        async with gate:
            response = await http.post("/generate", json=body)
        response.raise_for_status()
        (server.dump_dir / f"{name}.safetensors").unlink(missing_ok=True)

    async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(one(http, i, ids) for i, ids in enumerate(prompts)))


def measure(server: Server, prompts: list[list[int]], prefix: str, serial: int) -> Measured:
    """One pass over all prompts."""
    scheduler = server.scheduler_pid()
    before, began = cpu_seconds(scheduler), time.monotonic()
    asyncio.run(drive(server, prompts, prefix, serial))
    seconds = time.monotonic() - began
    return Measured(sum(map(len, prompts)) / seconds, cpu_seconds(scheduler) - before)


def start(model: Path, taps: tuple[int, ...], place: Path, name: str, stack: ExitStack) -> Server:
    """A server of one kind; ended, and its dump folder removed, with ``stack``."""
    dumps = Path(f"/dev/shm/hsx-bench-{secrets.token_hex(6)}")
    extra = (
        "--disable-radix-cache", "--chunked-prefill-size", "512", "--max-total-tokens", "16384",
        "--max-running-requests", "16",
    )  # fmt: skip
    server = Server(model, dumps, place / f"{name}.log", taps, extra, plugins="hsx_cpu_shim")
    server.capture = name != "plain"
    if name == "plugin":
        server.plugins = "hsx_cpu_shim,hsx_capture"
    else:
        server.env = {"PYTHONPATH": ""}  # not even on the path
    stack.callback(shutil.rmtree, dumps, ignore_errors=True)
    stack.callback(server.stop)
    return server.start().wait()


def main() -> None:
    """Measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--requests", type=int, help="of 256 tokens each (12, tiny: 96)")
    a = p.parse_args()
    number = a.requests or (12 if a.model == "smollm2" else 96)
    rng = random.Random(1)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="hsx-bench-") as folder, ExitStack() as stack:
        place = Path(folder)
        model = smollm2() if a.model == "smollm2" else tiny.make("qwen3", place)
        taps = (5, 15, 25) if a.model == "smollm2" else (0, 1, 2)
        top = 49000 if a.model == "smollm2" else tiny.VOCABULARY
        prompts = [[rng.randrange(3, top) for _ in range(TOKENS)] for _ in range(number)]
        print(
            f"{number} prompts of {TOKENS} tokens, concurrency {CONCURRENCY}, {a.rounds} rounds, taps {taps}"
        )
        plain, flag, plugin = (start(model, taps, place, n, stack) for n in ("plain", "flag", "plugin"))
        ways: dict[str, Callable[[int], Measured]] = {
            "plain": lambda i: measure(plain, prompts, "user", i),
            "flag": lambda i: measure(flag, prompts, "user", i),
            "idle": lambda i: measure(plugin, prompts, "user", i),
            "capturing": lambda i: measure(plugin, prompts, "hsx", i),
        }
        table(ways, a.rounds)


def table(ways: dict[str, Callable[[int], Measured]], rounds: int) -> None:
    """Interleaved rounds in rotating order; ratios are paired within a round."""
    seen: dict[str, list[Measured]] = {name: [] for name in ways}
    orders, serial = list(itertools.permutations(ways)), itertools.count()
    for name in ways:
        ways[name](next(serial))  # warm
    for i in range(rounds):
        for name in orders[(i * 5) % len(orders)]:
            seen[name].append(ways[name](next(serial)))
        row = "  ".join(f"{n} {m[-1].tok_per_s:.0f}" for n, m in seen.items())
        print(f"round {i + 1}: {row} tok/s", flush=True)
    print("\n| way | tok/s | ratio to plain | scheduler CPU s |\n|---|---|---|---|")
    for name, measured in seen.items():
        ratio = [m.tok_per_s / b.tok_per_s for m, b in zip(measured, seen["plain"], strict=True)]
        speed = spread([m.tok_per_s for m in measured]).median
        print(f"| {name} | {speed:.0f} | {spread(ratio)} | {spread([m.cpu for m in measured]).median:.2f} |")


if __name__ == "__main__":
    main()
