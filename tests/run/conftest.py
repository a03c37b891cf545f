"""A tiny model behind the small real server, a dataset for it, and extraction jobs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.host.events import EventLog
from engine.run.job import Result, run_job
from engine.run.output import hold_output
from engine.wire.spec import extract_from_json
from tests.demo.harness import Server, start_server, stop_server
from tests.models import TINY_TAPS, tiny_with_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def chat_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a real tokenizer and chat template."""
    return tiny_with_tokenizer(tmp_path_factory.mktemp("chat-tiny"))


@pytest.fixture(scope="module")
def clean_server(chat_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without sabotage, shared by a module's tests."""
    running = start_server(chat_tiny, tmp_path_factory.mktemp("server"), "--chunked-prefill-size", "64")
    yield running
    stop_server(running.process)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A dataset file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def token_rows(count: int, longest: int = 150) -> list[dict[str, Any]]:
    """Rows of token ids of many lengths, 1 and 2 and the chunk size among them; all different."""
    lengths = [1, 2, 63, 64, 65] + [3 + (37 * i) % longest for i in range(count)]
    return [
        {"input_ids": [20 + (7919 * (row + 1) + 104729 * i) % 40000 for i in range(n)]}
        for row, n in enumerate(lengths[:count])
    ]


@dataclass
class Bench:
    """Where a test's jobs run."""

    place: Path
    server: Server
    model: Path
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.place / "store"

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far; the sequence has no gap."""
        lines = (self.place / "run" / "events.jsonl").read_bytes().splitlines()
        events = [json.loads(line) for line in lines]
        assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
        return events

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one type."""
        return [e for e in self.events if e["type"] == kind]

    def make_spec(self, rows_file: Path, **changes: Any) -> dict[str, Any]:
        return {
            "run": "t",
            "store": str(self.store),
            "dataset": {"path": str(rows_file), **changes.pop("dataset", {})},
            "target": {"model": str(self.model), "taps": list(TINY_TAPS), **changes.pop("target", {})},
            "source": {
                "url": self.server.url,
                "dump_dir": str(self.server.folder),
                **changes.pop("source", {}),
            },
            "concurrency": 6,
            "shard_bytes": 200_000,
            **changes,
        }

    def run(self, spec: dict[str, Any], attempt: int = 1, stop_after: int | None = None) -> Result:
        """One attempt in this process; ``stop_after``: a graceful stop once so many samples were accepted."""
        parsed = extract_from_json(spec)
        run = self.place / "run"
        run.mkdir(exist_ok=True)
        with contextlib.closing(EventLog(run / "events.jsonl")) as events:
            with hold_output(Path(parsed.store), supervised=False):
                return asyncio.run(self._stopping(run_job(parsed, events, attempt), run, stop_after))

    async def _stopping(self, job: Any, run: Path, stop_after: int | None) -> Result:
        import os
        import signal

        task = asyncio.ensure_future(job)
        while not task.done():
            await asyncio.sleep(0.02)
            if stop_after is None:
                continue
            seen = (run / "events.jsonl").read_bytes().count(b'"type":"sample_done"')
            if seen >= stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
                stop_after = None
        result = await task
        assert isinstance(result, Result)
        return result


@pytest.fixture
def bench(tmp_path: Path, clean_server: Server, chat_tiny: Path) -> Bench:
    """Jobs against the clean server."""
    return Bench(tmp_path, clean_server, chat_tiny)


@pytest.fixture
def sabotaged(tmp_path: Path, chat_tiny: Path) -> Iterator[Callable[[str], Bench]]:
    """Jobs against a server that corrupts states on purpose."""
    started: list[Server] = []

    def start(kind: str) -> Bench:
        place = tmp_path / "server"
        place.mkdir()
        server = start_server(chat_tiny, place, "--chunked-prefill-size", "64", "--sabotage", kind)
        started.append(server)
        return Bench(tmp_path, server, chat_tiny)

    yield start
    for server in started:
        stop_server(server.process)
