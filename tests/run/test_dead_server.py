"""A server that dies or hangs under a run, also at its very end; and runs on several servers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.harness import Server, start_server, stop_server
from tests.run.conftest import Bench, token_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(300)]


class Lives:
    """A server that can be ended and started again on the same port with the same dump folder."""

    def __init__(self, model: Path, place: Path) -> None:
        self.model, self.place = model, place
        self.server = start_server(model, place, "--chunked-prefill-size", "64")
        self.port = self.server.url.rpartition(":")[2]

    def again(self) -> None:
        """Start it again; waits until it is ready."""
        (self.place / "port").unlink()
        self.server = start_server(
            self.model, self.place, "--chunked-prefill-size", "64", "--port", self.port
        )


@pytest.fixture
def lives(chat_tiny: Path, tmp_path: Path) -> Iterator[Lives]:
    place = tmp_path / "server"
    place.mkdir()
    one = Lives(chat_tiny, place)
    yield one
    stop_server(one.server.process)


def when(bench: Bench, kind: str, count: int, act: Callable[[], None]) -> threading.Thread:
    """Do something once the run has told so many events of a type."""

    def wait() -> None:
        file = bench.place / "run" / "events.jsonl"
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if file.exists() and file.read_bytes().count(f'"type":"{kind}"'.encode()) >= count:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def check(bench: Bench, rows: int, result: Any) -> None:
    """Every row once, nothing refused for the server's death, and the run said that it waited."""
    assert (result.done, result.quarantined, result.pending) == (rows, 0, 0)
    done = [e["row"] for e in bench.of("sample_done")]
    assert sorted(done) == list(range(rows))
    assert bench.of("paused")
    assert bench.of("resumed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_server_that_dies_in_the_middle(lives: Lives, chat_tiny: Path, tmp_path: Path, number: int) -> None:
    bench = Bench(tmp_path, lives.server, chat_tiny)
    rows = write_rows(tmp_path / "rows.jsonl", token_rows(60))

    def strike() -> None:
        process = lives.server.process
        os.kill(process.pid, number)
        time.sleep(1.0)
        if number == signal.SIGSTOP:
            end = time.monotonic() + 120
            while not bench.of("paused") and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGCONT)
        else:
            process.wait()
            lives.again()

    thread = when(bench, "sample_done", 6, strike)
    result = bench.run(bench.make_spec(rows, shard_bytes=20_000, canary=0))
    thread.join()
    check(bench, 60, result)
    reasons = " ".join(str(e["reason"]) for e in bench.of("paused"))
    assert "gone" in reasons or "did not answer" in reasons or "onnect" in reasons, reasons


def test_a_server_that_dies_under_the_last_request(lives: Lives, chat_tiny: Path, tmp_path: Path) -> None:
    """Nothing is left to ask for: the run must find out by watching, and the row is asked for again."""
    bench = Bench(tmp_path, lives.server, chat_tiny)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [21 + i % 900 for i in range(1900)]}])

    def strike() -> None:
        os.kill(lives.server.process.pid, signal.SIGSTOP)  # it hangs first, so that the request is in flight
        time.sleep(0.5)
        os.kill(lives.server.process.pid, signal.SIGKILL)
        lives.server.process.wait()
        lives.again()

    thread = when(bench, "progress", 1, strike)
    result = bench.run(bench.make_spec(rows, canary=0))
    thread.join()
    assert (result.done, result.pending) == (1, 0)


@pytest.fixture
def two(chat_tiny: Path, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    servers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        servers.append(start_server(chat_tiny, tmp_path / name, "--chunked-prefill-size", "64"))
    yield servers[0], servers[1]
    for server in servers:
        stop_server(server.process)


def replica_spec(bench: Bench, rows: Path, other: Server, **changes: Any) -> dict[str, Any]:
    replicas = [{"url": other.url, "dump_dir": str(other.folder)}]
    return bench.make_spec(rows, source={"replicas": replicas}, canary=0, **changes)


def test_two_servers_share_a_run_and_check_each_other(
    two: tuple[Server, Server], chat_tiny: Path, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, two[0], chat_tiny)
    rows = write_rows(tmp_path / "rows.jsonl", token_rows(40))
    result = bench.run(replica_spec(bench, rows, two[1], retake_every=4))
    assert (result.done, result.quarantined) == (40, 0)
    asked = [server.traffic()["ours"] for server in two]
    assert sum(asked) >= 50  # every fourth row is taken twice
    assert min(asked) >= 10
    assert all(not list(server.folder.glob("hsx-*")) for server in two)


def test_a_server_that_dies_leaves_its_rows_to_the_other(
    two: tuple[Server, Server], chat_tiny: Path, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, two[0], chat_tiny)
    rows = write_rows(tmp_path / "rows.jsonl", token_rows(60))
    thread = when(bench, "sample_done", 6, two[1].process.kill)
    result = bench.run(replica_spec(bench, rows, two[1], shard_bytes=20_000))
    thread.join()
    assert (result.done, result.quarantined, result.pending) == (60, 0, 0)
    assert not bench.of("mismatch")
