"""``python -m engine demo traffic``: other people's requests, and health checks, on the server that we
extract from.

A process of its own. It reads the server's counters and keeps at least as many foreign requests as ours: 2 to
8 in flight, shorter answers while it is behind. It ends on SIGTERM, after --max-seconds, or when the server
is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from engine.wire.errors import ExitCode, UsageError

if TYPE_CHECKING:
    import httpx

LEAST, MOST = 2, 8
GONE_S = 30.0
HEALTH_EVERY_S = 2.0

# Token ids, not words: the process needs no tokenizer. Every prompt begins with one of the openings, as chats
# do.
_OPENINGS = (
    (
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
    ),
    (1, 4093, 198),
    (1, 4093, 198, 1780, 314, 260, 3575, 282),
    (504, 2365, 1131, 282, 260),
)


@dataclass
class Pace:
    """How many are in flight, from the counters of the server."""

    in_flight: int = LEAST
    longest_prompt: int = 120
    longest_answer: int = 4
    sent: int = 0

    def adapt(self, ours: int, foreign: int) -> None:
        """More while foreign requests are not clearly ahead of ours, fewer when they are."""
        lead = foreign - ours
        self.longest_prompt = 40 if lead < 4 else 120
        self.longest_answer = 1 if lead < 4 else 4 if lead < 12 else 20
        if lead < 12:
            self.in_flight = min(self.in_flight + 2, MOST)
        elif lead > 24:
            self.in_flight = max(self.in_flight - 1, LEAST)


@dataclass
class Traffic:
    """The foreign users of one server."""

    client: httpx.AsyncClient
    dice: random.Random
    pace: Pace = field(default_factory=Pace)
    seen: float = field(default_factory=time.monotonic)

    def prompt(self) -> list[int]:
        """5 to 120 token ids that share their beginning with others."""
        opening = self.dice.choice(_OPENINGS)
        length = self.dice.randint(5, self.pace.longest_prompt)
        rest = [self.dice.randrange(100, 49000) for _ in range(max(length - len(opening), 0))]
        return [*opening, *rest][:length]

    async def ask(self) -> None:
        """One request, from the prompt to the answer."""
        import httpx

        body = {
            "rid": uuid.uuid4().hex, "input_ids": self.prompt(),
            "sampling_params": {
                "max_new_tokens": self.dice.randint(1, self.pace.longest_answer),
                "temperature": self.dice.choice((0.0, 0.7)), "ignore_eos": True,
            },
        }  # fmt: skip
        try:
            answer = await self.client.post("/generate", json=body)
        except httpx.HTTPError:
            await asyncio.sleep(0.5)
            return
        self.seen = time.monotonic()
        if answer.status_code != 200:  # it shuts down, or is full
            await asyncio.sleep(0.5)
        self.pace.sent += 1

    async def crowd(self) -> None:
        """Keep as many requests in flight as the pace says."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(tasks) < self.pace.in_flight:
                    tasks.add(asyncio.create_task(self.ask()))
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def watch(self) -> None:
        """Read the counters every second and adapt."""
        import httpx

        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.client.get("/server_info", timeout=10.0)
                self.seen = time.monotonic()
                counts = answer.json()["hsx_demo"]["traffic"]
                self.pace.adapt(int(counts["ours"]), int(counts["foreign"]))
            await asyncio.sleep(1.0)

    async def health(self) -> None:
        """GET /health every 2 s."""
        import httpx

        while True:
            begun = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                await self.client.get("/health", timeout=30.0)
            await asyncio.sleep(max(0.0, HEALTH_EVERY_S - (time.monotonic() - begun)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", "", f"see {self.prog} --help")


def main(argv: list[str]) -> int:
    """Send requests until the end; returns the exit code. Raises HsxError."""
    p = _Parser(prog="python -m engine demo traffic", description="Foreign requests on a server.")
    p.add_argument("--url", required=True)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-seconds", type=float, default=3600.0)
    p.add_argument("--gone-seconds", type=float, default=GONE_S, help="end when the server is silent so long")
    a = p.parse_args(argv)
    return asyncio.run(_run(a.url, a.seed, a.max_seconds, a.gone_seconds))


async def _run(url: str, seed: int, max_seconds: float, gone_s: float) -> int:
    import httpx

    if not url.startswith("http://127.0.0.1:"):
        raise UsageError(f"--url {url}", "the demo's traffic goes to a server on 127.0.0.1 only")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    end = time.monotonic() + max_seconds
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        traffic = Traffic(client, random.Random(seed))
        tasks = [asyncio.create_task(t) for t in (traffic.crowd(), traffic.watch(), traffic.health())]
        while not stop.is_set() and time.monotonic() < end and time.monotonic() - traffic.seen < gone_s:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
            for task in tasks:
                if task.done():
                    task.result()  # none ends by itself: this is its error
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    sys.stderr.write(f"traffic: {traffic.pace.sent} foreign requests answered\n")
    return int(ExitCode.OK)
