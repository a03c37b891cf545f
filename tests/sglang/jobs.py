"""Extraction jobs against a real SGLang server, and the comparison of what they stored with transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sglang import tiny
from tests.sglang.server import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tests.sglang.server import Server

LENGTHS = (1, 2, 8, 33, 63, 64, 65, 100, 257, 700)


def rows_of(lengths: Sequence[int], seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Token ids of random rows; ``shared``: so many first ids are the same in all rows."""
    rng = random.Random(seed)
    head = [rng.randrange(3, tiny.VOCABULARY) for _ in range(shared)]
    return [(head + [rng.randrange(3, tiny.VOCABULARY) for _ in range(n)])[: max(n, 1)] for n in lengths]


@dataclass
class Job:
    """One run and its store. ``python``: the interpreter that runs the engine."""

    place: Path
    spec: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """Its store."""
        return self.place / "store"

    def start(self) -> subprocess.Popen[bytes]:
        """Begin an attempt."""
        (self.place / "spec.json").write_text(json.dumps(self.spec))
        run = self.place / "run"
        command = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from engine.__main__ import main; sys.exit("
        )
        argv = [
            self.python, "-I", "-B", "-c", command + "main(sys.argv[1:]))", str(REPOSITORY), "extract",
            "--spec", str(self.place / "spec.json"), "--run-dir", str(run), "--json",
        ]  # fmt: skip
        with (self.place / "engine.log").open("ab") as log:
            env = {**os.environ, **self.environment}
            return subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)

    def run(self, timeout_s: float = 300.0) -> int:
        """One attempt to its end: the exit code."""
        return self.start().wait(timeout_s)

    def log(self) -> str:
        """What the engine said, its last lines."""
        return (self.place / "engine.log").read_text(errors="replace")[-4000:]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one type."""
        lines = (self.place / "run" / "events.jsonl").read_bytes().splitlines()
        return [e for e in map(json.loads, lines) if e["type"] == kind]

    def index(self) -> dict[int, dict[str, Any]]:
        """The done samples, by row; each once."""
        lines = [json.loads(line) for line in (self.store / "index.jsonl").read_bytes().splitlines()]
        by_row = {line["row"]: line for line in lines}
        assert len(by_row) == len(lines)
        return by_row

    def tensors(self, row: int) -> dict[str, torch.Tensor]:
        """What is stored of a row."""
        from safetensors import safe_open

        with safe_open(self.store / self.index()[row]["shard"], "pt") as shard:
            names = [name for name in shard.keys() if name.startswith(f"{row:08d}.")]  # noqa: SIM118
            return {name.partition(".")[2]: shard.get_tensor(name) for name in names}


def make_job(place: Path, server: Server, rows: Sequence[Sequence[int]], **changes: Any) -> Job:
    """A job that stores float32, so that nothing is rounded before it is compared."""
    place.mkdir(parents=True, exist_ok=True)
    file = place / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"input_ids": list(ids), "loss_mask": [1] * len(ids)}) + "\n" for ids in rows)
    )
    spec = {
        "run": "t", "store": str(place / "store"), "dataset": {"path": str(file)},
        "target": {
            "model": str(server.model), "taps": list(server.taps), "last": "pre", "dtype": "float32",
            **changes.pop("target", {}),
        },
        "source": {
            "url": server.url, "dump_dir": str(server.dump_dir), "log": str(server.log),
            **changes.pop("source", {}),
        },
        "concurrency": 8, "shard_bytes": 400_000, "retake_every": 7, **changes,
    }  # fmt: skip
    return Job(place, spec)


def least_cosines(job: Job, rows: Sequence[Sequence[int]], model: Any) -> dict[str, float]:
    """Per tap and for the last state: the least cosine of all stored samples with a lone forward."""
    least: dict[str, float] = {}
    last = job.spec["target"]["last"]
    for row in job.index():
        stored, truth = job.tensors(row), tiny.lone(model, rows[row])
        assert stored["input_ids"].tolist() == list(rows[row])
        pairs = {
            f"tap {t}": (stored["taps"][:, i], truth.taps[t])
            for i, t in enumerate(job.spec["target"]["taps"])
        }
        if last:
            pairs[last] = (stored["last"], truth.pre if last == "pre" else truth.post)
        for name, (got, true) in pairs.items():
            least[name] = min(least.get(name, 1.0), tiny.least_cosine(got, true))
    return least
