"""What `hsx-console demo` was asked for, and the names that follow from it.

The run, the server and the store are named by what makes them different, so the same command finds its own
again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from engine.wire.errors import Refused, UsageError

SABOTAGE = ("swap", "shift", "neighbour", "stale")


@dataclass(frozen=True)
class DemoOptions:
    """The demo's choices. ``model``: a folder, or "smollm2" (converted once into ``model_cache``)."""

    workdir: Path
    model_cache: Path
    samples: int | None = None
    foreign_traffic: bool = False
    sabotage: str | None = None
    sabotage_always: bool = False
    abort_at: float | None = None
    server: str = "embedded"
    sglang_python: Path | None = None
    dump_mode: str = "rid"
    model: str = "smollm2"
    taps: tuple[int, ...] = (1, 14, 26)
    shard_bytes: int = 4 << 20
    concurrency: int = 8
    chunk: int | None = None
    prefix_cache: bool = False

    def check(self) -> None:
        """UsageError or Refused for what cannot be."""
        if self.samples is not None and self.samples < 1:
            raise UsageError(
                f"--samples {self.samples}", "at least one sample is needed", "give a number from 1 on"
            )
        if self.abort_at is not None and not 0 < self.abort_at < 100:
            raise UsageError(
                f"--abort-at {self.abort_at:g}", "it is a percentage", "give a number between 0 and 100"
            )
        if self.sabotage is not None and self.sabotage not in SABOTAGE:
            raise UsageError(
                f"--sabotage {self.sabotage}", "unknown kind", f"one of {', '.join(SABOTAGE)}, or KIND:always"
            )
        if self.server not in ("embedded", "sglang"):
            raise UsageError(f"--server {self.server}", "unknown server", "embedded or sglang")
        if self.sglang:
            self._check_sglang()
        if self.dump_mode not in ("rid", "counter"):
            raise UsageError(f"--dump-mode {self.dump_mode}", "unknown mode", "rid or counter")

    def _check_sglang(self) -> None:
        if self.sabotage is not None or self.counter:
            raise UsageError(
                "--server sglang",
                "--sabotage and --dump-mode counter are the embedded server's",
                "leave them out",
            )
        if not os.access(self.sglang_path, os.X_OK):
            raise Refused(
                "--server sglang",
                f"there is no SGLang environment: {self.sglang_path} cannot be run",
                "make it with `make sglang` (three minutes, 3.5 GB), or name one with --sglang-python",
            )

    @property
    def sglang(self) -> bool:
        """Whether the server is a real SGLang."""
        return self.server == "sglang"

    @property
    def sglang_path(self) -> Path:
        """The interpreter that has SGLang: as given, of HSX_SGLANG_PYTHON, or what `make sglang` makes."""
        if self.sglang_python is not None:
            return self.sglang_python.absolute()
        named = os.environ.get("HSX_SGLANG_PYTHON")
        here = Path(__file__).resolve().parents[2]
        return Path(named).absolute() if named else here / ".venv-sglang" / "bin" / "python"

    @property
    def counter(self) -> bool:
        """Whether the server writes counter-numbered dumps."""
        return self.dump_mode == "counter"

    @property
    def chunk_tokens(self) -> int:
        """The server's chunk: larger for dumps by counter, since what is cut there cannot be joined."""
        return self.chunk or (512 if self.counter else 256)

    @property
    def last(self) -> str:
        """Which last state is stored: counter-numbered dumps have the one after the final norm only."""
        return "post" if self.counter else "pre"

    @property
    def kind(self) -> str:
        """The sabotage as it is written: "", "swap", "swap:always"."""
        return f"{self.sabotage}{':always' if self.sabotage_always else ''}" if self.sabotage else ""

    @property
    def run(self) -> str:
        """The extraction run's id."""
        parts = ["demo", str(self.samples) if self.samples else "all"]
        if self.sabotage:
            parts.append(self.sabotage + ("-always" if self.sabotage_always else ""))
        if self.counter:
            parts.append("counter")
        if self.foreign_traffic:
            parts.append("traffic")
        if self.sglang:
            parts.append("sglang")
        if self.model != "smollm2":
            parts.append(_digest(self.model)[:6])
        return "-".join(parts)

    def verify_run(self, *, recompute: bool) -> str:
        """The run that reads the store again: another one for each thoroughness."""
        return f"verify-{_digest(self.run)[:8]}-{'recompute' if recompute else 'hashes'}"

    @property
    def server_run(self) -> str:
        """The server's run id: other flags are another server."""
        flags = [self.model, list(self.taps), self.kind, self.chunk_tokens, self.prefix_cache]
        if self.sglang:
            flags = [*flags, "sglang", str(self.sglang_path)]
        return "server-" + _digest([*flags, "counter"] if self.counter else flags)[:8]

    @property
    def dataset_run(self) -> str:
        """The run that completes the prompts and puts the dataset together."""
        return "dataset-" + _digest(self.model)[:6]

    @property
    def dataset(self) -> Path:
        """The dataset file; a clean server answers the prompts, so it does not depend on the sabotage."""
        return self.workdir / f"{self.dataset_run}.jsonl"

    @property
    def store(self) -> Path:
        """Where the verified states go."""
        return self.workdir / "stores" / self.run


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
