"""The foreign users: at least as many requests as ours, health checks, and an end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from engine.demo.traffic import LEAST, MOST, Pace, Traffic, main
from engine.wire.errors import UsageError
from tests.demo.test_states import prompt

if TYPE_CHECKING:
    from tests.demo.harness import Server

pytestmark = pytest.mark.tiny


def test_it_keeps_up_with_ours_and_ends_on_sigterm(server: Server) -> None:
    before = server.traffic()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "demo", "traffic", "--url", server.url],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while server.traffic()["foreign"] == before["foreign"]:
            assert process.poll() is None
            time.sleep(0.05)
        for i in range(40):
            assert server.generate(f"hsx-crowd-{i:08d}-01_", prompt(i, 200)).status_code == 200
        time.sleep(1.5)
        after = server.traffic()
        ours, foreign = after["ours"] - before["ours"], after["foreign"] - before["foreign"]
        assert ours == 40 and foreign >= ours
        assert after["health"] > before["health"]
        assert after["shared_forwards"] - before["shared_forwards"] >= 20
    finally:
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=20)[1]
    assert process.returncode == 0 and "foreign requests answered" in err


def test_it_ends_when_its_time_is_over_or_the_server_is_gone(server: Server) -> None:
    began = time.monotonic()
    argv = ["--url", "http://127.0.0.1:9", "--gone-seconds", "1"]
    assert main(argv) == 0 and time.monotonic() - began < 10
    began = time.monotonic()
    assert main(["--url", server.url, "--max-seconds", "1"]) == 0 and time.monotonic() - began < 10


def test_it_goes_to_loopback_only() -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1 only"):
        main(["--url", "http://example.org:80"])
    with pytest.raises(UsageError, match="--url"):
        main([])


def test_the_pace_follows_the_counters() -> None:
    pace = Pace()
    for _ in range(5):
        pace.adapt(ours=20, foreign=10)
    assert pace.in_flight == MOST and (pace.longest_prompt, pace.longest_answer) == (40, 1)
    for _ in range(10):
        pace.adapt(ours=20, foreign=60)
    assert pace.in_flight == LEAST and (pace.longest_prompt, pace.longest_answer) == (120, 20)


async def test_prompts_share_beginnings_and_vary_in_length() -> None:
    async with httpx.AsyncClient() as client:
        traffic = Traffic(client, random.Random(0))
        prompts = [traffic.prompt() for _ in range(300)]
    assert min(map(len, prompts)) == 5 and 110 < max(map(len, prompts)) <= 120
    starts = [tuple(p[:3]) for p in prompts]
    assert len(set(starts)) <= 4
