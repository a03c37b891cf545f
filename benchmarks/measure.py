"""What the benchmarks share: interleaved rounds, medians with intervals, CPU seconds of other processes."""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


@dataclass(frozen=True)
class Spread:
    """A median with a 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(values: Sequence[float], seed: int = 0) -> Spread:
    """Median and interval of paired measurements."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return Spread(statistics.median(values), medians[50], medians[-51])


def machine() -> str:
    """The machine in a line."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        os.uname().machine,
    )
    return f"{os.cpu_count()} cores, {model}, load {os.getloadavg()[0]:.2f} at the start"
