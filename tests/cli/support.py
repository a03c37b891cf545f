"""A console's command line in a test: the host, configurations for it, and the verbs' outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.wire.procid import ProcessId
from hsx_tui.cli import main
from hsx_tui.deploy.embedded import host_address, read_host
from hsx_tui.deploy.link import Link

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = Path(__file__).with_name("program.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``data``: its one JSON object, empty for lines for people."""

    code: int
    out: str
    talk: str

    @property
    def data(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def hsx(*argv: str | Path) -> Ended:
    """Run a command in this process."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        code = main([str(arg) for arg in argv])
    return Ended(code, out.getvalue(), talk.getvalue())


def spawn(*argv: str | Path) -> subprocess.Popen[str]:
    """Run a command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hsx_tui.cli", *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class DemoHost:
    """An embedded host and configurations that name it."""

    workdir: Path

    def table(self, **more: object) -> dict[str, object]:
        """Its [hosts.NAME]."""
        record = read_host(self.workdir)
        assert record is not None
        keys = self.workdir / "keys"
        return {
            "address": "127.0.0.1",
            "port": record["port"],
            "user": "demo",
            "identity_file": str(keys / "client_ed25519"),
            "known_hosts": str(keys / "known_hosts"),
            "workdir": str(self.workdir),
            **more,
        }

    def start(self, run: str, mode: str) -> None:
        """Begin a run of the test's program, and wait until its first events are there."""
        asyncio.run(self.begin(run, mode))
        events = self.workdir / f"home/.local/state/hsx/runs/{run}/events.jsonl"
        end = time.monotonic() + 20
        while not events.exists() or b'"progress"' not in events.read_bytes():
            assert time.monotonic() < end, f"run {run} wrote no events"
            time.sleep(0.02)

    async def begin(self, run: str, mode: str, attempt: int = 1) -> None:
        """Begin an attempt of the test's program."""
        record = read_host(self.workdir)
        assert record is not None
        link = Link(host_address(self.workdir, record["port"]))
        try:
            engine = (await link.session()).engine
            assert engine is not None
            await link.call(
                "start",
                run=run,
                attempt=attempt,
                kind="extract",
                argv=[engine.python, "-I", "-B", "-c", PROGRAM, engine.dir, mode],
                cwd="/",
                output=str(self.workdir / "stores" / run),
                grace=[10, 2],
            )
        finally:
            await link.close()

    def end_runs(self) -> None:
        """End what its runs still have, by their records."""
        for name in ("sup.json", "child.json"):
            for record in self.workdir.glob(f"home/.local/state/hsx/runs/*/{name}"):
                process = ProcessId.from_json(json.loads(record.read_bytes()))
                if process is not None:
                    process.send(signal.SIGKILL)


def write_config(path: Path, tables: Mapping[str, Mapping[str, object]]) -> Path:
    """A config.toml of these tables. JSON strings, numbers, booleans and flat lists are TOML ones."""
    text = ""
    for name, table in tables.items():
        text += f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.chmod(path, 0o600)
    return path
