"""A server that comes back as another (no capture, other layers), and one of two that comes back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.harness import Server, start_server, stop_server
from tests.run.conftest import Bench, token_rows, write_rows
from tests.run.test_dead_server import replica_spec, when

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(400)]


class Port:
    """One address and one dump folder, and the servers that live there one after the other."""

    def __init__(self, model: Path, place: Path) -> None:
        place.mkdir()
        self.model, self.place = model, place
        self.server = start_server(model, place, "--chunked-prefill-size", "64")
        self.number = self.server.url.rpartition(":")[2]

    def kill(self) -> None:
        """SIGKILL."""
        self.server.process.kill()
        self.server.process.wait()

    def start(self, *flags: str) -> None:
        """The next server; ready when it returns."""
        (self.place / "port").unlink()
        flags = ("--chunked-prefill-size", "64", "--port", self.number, *flags)
        self.server = start_server(self.model, self.place, *flags)


@pytest.fixture
def port(chat_tiny: Path, tmp_path: Path) -> Iterator[Port]:
    one = Port(chat_tiny, tmp_path / "port")
    yield one
    stop_server(one.server.process)


def wait_for(bench: Bench, kind: str, text: str) -> None:
    """Until an event of that type says ``text``."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if any(text in str(e) for e in bench.of(kind)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {kind} says {text!r}: {bench.of(kind)}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [(("--no-capture",), "without the plugin"), (("--taps", "1 2 4"), "captures the output of layers")],
    ids=["no capture", "other layers"],
)
def test_a_server_that_comes_back_as_another_is_not_asked(
    port: Port, chat_tiny: Path, tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    """Else every row would be quarantined within seconds."""
    bench = Bench(tmp_path, port.server, chat_tiny)
    rows = write_rows(tmp_path / "rows.jsonl", token_rows(60))
    failed: list[BaseException] = []

    def strike() -> None:
        try:
            port.kill()
            port.start(*flags)
            wait_for(bench, "warning", says)
            port.kill()
            port.start()
        except BaseException as error:  # raised below, in the test's own thread
            failed.append(error)
            port.start()

    thread = when(bench, "sample_done", 6, strike)
    result = bench.run(bench.make_spec(rows, shard_bytes=20_000, canary=0))
    thread.join()
    assert not failed, failed
    assert (result.done, result.quarantined, result.pending) == (60, 0, 0)
    assert not bench.of("mismatch")
    assert bench.of("paused")
    assert bench.of("resumed")


def test_one_of_two_that_comes_back_is_asked_again(chat_tiny: Path, tmp_path: Path) -> None:
    steady, mortal = Port(chat_tiny, tmp_path / "a"), Port(chat_tiny, tmp_path / "b")
    try:
        bench = Bench(tmp_path, steady.server, chat_tiny)
        rows = write_rows(tmp_path / "rows.jsonl", token_rows(600))
        back: list[Server] = []

        def strike() -> None:
            mortal.kill()
            mortal.start()
            back.append(mortal.server)

        thread = when(bench, "sample_done", 6, strike)
        spec: dict[str, Any] = replica_spec(bench, rows, mortal.server, shard_bytes=20_000)
        result = bench.run(spec)
        thread.join()
        assert (result.done, result.quarantined, result.pending) == (600, 0, 0)
        assert back[0].traffic()["ours"] > 0
    finally:
        for one in (steady, mortal):
            stop_server(one.server.process)
