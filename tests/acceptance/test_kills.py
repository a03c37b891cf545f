"""kill -9 of the engine, its supervisor, the SSH sessions and the console at random moments; then the same
command again.

Whatever was killed: the finished store has every row once, verify finds nothing, and no done row is taken
again. With the tiny model the moments lie within the extraction, which is seen by its events.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from engine.store.store import read_index
from hsx_tui.deploy.embedded import read_host
from hsx_tui.services.demo import Demo
from hsx_tui.services.demo_options import DemoOptions
from tests.acceptance.cli import finish, start
from tests.models import CACHE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

TARGETS = ("engine", "supervisor", "ssh", "console")


@dataclass(frozen=True)
class Strike:
    """One kill: what, and how many rows were durable (of how many) just before."""

    target: str
    done: int
    dataset: int

    @property
    def in_the_middle(self) -> bool:
        return 0 < self.done < self.dataset


@pytest.fixture(scope="session")
def strikes() -> list[Strike]:
    """All kills of the session's runs on the tiny model."""
    return []


def options(workdir: Path, samples: int, model: str, taps: tuple[int, ...], **more: Any) -> DemoOptions:
    return DemoOptions(workdir, CACHE, samples=samples, model=model, taps=taps, **more)


async def with_demo(o: DemoOptions, work: Callable[[Demo], Awaitable[Any]]) -> Any:
    demo = Demo(o, lambda _message: None)
    try:
        return await work(demo)
    finally:
        await demo.close()


def run_dir(o: DemoOptions) -> Path:
    return o.workdir / "home" / ".local" / "state" / "hsx" / "runs" / o.run


def pids(o: DemoOptions) -> dict[str, int]:
    """Of the run's engine and supervisor, as the run directory records them."""
    out = {}
    for name, file in (("engine", "child.json"), ("supervisor", "sup.json")):
        try:
            out[name] = int(json.loads((run_dir(o) / file).read_bytes())["pid"])
        except (OSError, ValueError, KeyError):
            continue
    return out


def events(o: DemoOptions) -> list[dict[str, Any]]:
    """The whole events of all attempts so far; a killed engine leaves a torn line."""
    try:
        data = (run_dir(o) / "events.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in data.split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def running(o: DemoOptions) -> bool:
    return len(pids(o)) == 2 and not (run_dir(o) / "exit.json").exists()


def reached(o: DemoOptions, kind: str) -> bool:
    """Whether the attempt that runs now has written an event of this kind."""
    if not running(o):
        return False
    attempt = json.loads((run_dir(o) / "spec.json").read_bytes())["attempt"]
    now = None
    for event in events(o):
        if event["type"] == "run_started":
            now = event["attempt"]
        elif event["type"] == kind and now == attempt:
            return True
    return False


def durable(o: DemoOptions) -> int:
    """Rows that the run has reported as durable."""
    return len({row for event in events(o) if event["type"] == "shard_committed" for row in event["rows"]})


def strike(target: str, o: DemoOptions, console: int) -> None:
    """Kill one of the four by its recorded pid."""
    if target == "console":
        os.kill(console, signal.SIGKILL)
        return
    if target == "ssh":
        record = read_host(o.workdir)
        assert record is not None
        os.kill(int(record["pid"]), signal.SIGUSR1)  # the embedded host drops every connection
        return
    pid = pids(o).get(target)
    if pid is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def storm(
    o: DemoOptions, flags: list[str], seed: int, most_s: float, ripe: Callable[[], bool], struck: list[Strike]
) -> None:
    """Kill at random moments, up to ``most_s`` after the run is ``ripe``; repeat the command until it
    succeeds; check the store after each end."""
    rng = random.Random(seed)
    kept: dict[int, str] = {}
    for attempt in range(12):
        process = start(o.workdir, *flags)
        targets = [rng.choice(TARGETS) for _ in range(rng.randint(1, 2))] if attempt < 2 else []
        deadline = time.monotonic() + 120
        while targets and time.monotonic() < deadline and process.poll() is None and not ripe():
            time.sleep(0.05)
        for target in targets:
            time.sleep(rng.uniform(0.0, most_s))
            if process.poll() is None:
                struck.append(Strike(target, durable(o) if running(o) else 0, o.samples or 0))
                strike(target, o, process.pid)
        out = finish(process)
        index, _ = read_index(o.store)
        for row, name in kept.items():
            assert index[row].rid == name, f"row {row} was done and was taken again"
        kept = {row: line.rid for row, line in index.items()}
        if out.code == 0:
            break
    else:
        raise AssertionError(f"it never finished: {out.talk}")
    assert sorted(kept) == list(range(out.result["dataset"]))
    assert out.result["bad"] == []
    assert out.result["verified"]["min_cosine"] >= 0.9999


@pytest.mark.tiny
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(17))
def test_kills_on_a_tiny_model(
    tiny_workdir: Path, tiny_model: Path, seed: int, strikes: list[Strike]
) -> None:
    samples = 40 + seed
    # One request at a time, beside foreign ones: the extraction lasts some seconds.
    flags = ["--samples", str(samples), "--model", str(tiny_model), "--taps", "1 3 4", "--foreign-traffic"]
    flags += ["--shard-bytes", "65536", "--concurrency", "1"]
    o = options(tiny_workdir, samples, str(tiny_model), (1, 3, 4), foreign_traffic=True)
    kind = "shard_committed" if seed % 2 else "progress"
    storm(o, flags, seed, 1.0, lambda: reached(o, kind), strikes)


@pytest.mark.smollm2
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_kills_on_smollm2(smol_workdir: Path, seed: int) -> None:
    samples = 12 + seed
    flags = ["--samples", str(samples), "--shard-bytes", str(1 << 20)]
    o = options(smol_workdir, samples, "smollm2", (1, 14, 26))
    storm(o, flags, 100 + seed, 12.0, lambda: running(o), [])


def test_the_demo_host_survives_its_console(tiny_workdir: Path, tiny_model: Path) -> None:
    """After all the kills the host is still the same one, with its server."""
    o = options(tiny_workdir, 30, str(tiny_model), (1, 3, 4))
    states = asyncio.run(with_demo(o, lambda demo: demo.runs.all()))
    assert [s["state"] for s in states if s["kind"] == "server"] == ["running"]


@pytest.mark.tiny
def test_the_kills_fell_into_the_extraction(strikes: list[Strike]) -> None:
    """At least a third of them found some rows durable and some not: else the tests above prove little."""
    landed = [strike for strike in strikes if strike.in_the_middle]
    assert strikes, "this looks at the kills above: run them together"
    assert 3 * len(landed) >= len(strikes), strikes
