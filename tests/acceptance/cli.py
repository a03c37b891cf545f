"""The demo as a user runs it: `hsx-console demo --headless --json`, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HSX = [sys.executable, "-m", "hsx_tui.cli"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    result: dict[str, Any]
    talk: str


def start(workdir: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a headless demo."""
    argv = [*HSX, "demo", "--headless", "--json", "--workdir", str(workdir), *flags]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> Outcome:
    """Wait for its end."""
    out, talk = process.communicate(timeout=timeout_s)
    result = json.loads(out.splitlines()[-1]) if out.strip() else {}
    return Outcome(process.returncode, result, talk)


def demo(workdir: Path, *flags: str, timeout_s: float = 400) -> Outcome:
    """Run it to its end."""
    return finish(start(workdir, *flags), timeout_s)


def stop(workdir: Path) -> None:
    """End the host and the server of a work directory."""
    demo(workdir, "--stop", timeout_s=120)
