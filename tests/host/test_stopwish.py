"""A stop that comes before the engine has its handlers: heeded, not a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# The specification comes through a pipe that the test holds: the engine waits for it, its handlers set, the
# heavy imports still before it.
SPEC = {
    "run": "r1",
    "store": "/nowhere/store",
    "dataset": {"path": "/nowhere/d.jsonl"},
    "target": {"model": "/nowhere/m", "taps": [1]},
    "source": {"url": "http://127.0.0.1:9", "dump_dir": "/nowhere/d"},
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_job_begins_is_an_aborted_run(tmp_path: Path, number: signal.Signals) -> None:
    run, pipe = tmp_path / "run", tmp_path / "spec"
    run.mkdir()
    os.mkfifo(pipe)
    engine = subprocess.Popen(
        [sys.executable, "-m", "engine", "extract", "--spec", str(pipe)],
        cwd=ROOT,
        env={**os.environ, "HSX_RUN": str(run)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with pipe.open("w") as spec:  # opens when the engine has opened it
            engine.send_signal(number)
            spec.write(json.dumps(SPEC))
        _, err = engine.communicate(timeout=60)
    finally:
        engine.kill()
        engine.wait()
    assert engine.returncode == 75, err.decode()
    assert json.loads((run / "result.json").read_bytes()) == {"schema_version": 1, "outcome": "aborted"}
    assert [p.name for p in run.iterdir()] == ["result.json"]
