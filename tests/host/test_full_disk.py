"""A run on a disk that fills up: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .support import ROOT, on_small_disk

if TYPE_CHECKING:
    from pathlib import Path

# Runs inside the namespace: starts a run that fills the disk with its log, and tells how it ended.
SCENARIO = """
import hashlib, json, os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from host.support import Home
home = Home(Path(sys.argv[3]))
filler = '''
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from engine.host.events import EventLog
log = EventLog(Path(os.environ["HSX_RUN"]) / "events.jsonl")
try:
    while True: log.emit("warning", text="x" * 300)
except OSError:
    pass
os.write(1, b"y" * 100000)
raise SystemExit("No space left")
'''
home.start("r1", filler, 1, sys.argv[1])
status = home.wait_state("r1", "exited")
free = os.statvfs(sys.argv[3]).f_bavail
try:
    home.call("put", b"z" * 500000, path="z", sha256=hashlib.sha256(b"z" * 500000).hexdigest(), size=500000)
    put = "written"
except Exception as error:
    put = f"{type(error).__name__}: {error}"
try:
    home.start("r2", "pass")
    second = "started"
except Exception as error:
    second = f"{type(error).__name__}: {error}"
(home.dir("r1") / "events.jsonl").write_bytes(b"")
third = home.start("r1", "pass", 2)["already"]
runs, leftovers = sorted(os.listdir(home.dir("r1").parent)), [str(p) for p in home.path.rglob("*.tmp")]
told = {"status": status, "put": put, "second": second, "third": third, "runs": runs, "leftovers": leftovers}
print(json.dumps({**told, "free": free, "end": home.wait_state("r1", "exited")}))
"""


def test_a_full_disk_still_leaves_the_record_of_the_end(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    tests = str(ROOT / "tests")
    told = on_small_disk(home, 256, [sys.executable, "-c", SCENARIO, str(ROOT), tests, str(home)])
    assert told["free"] < 20
    exit_record = told["status"]["exit"]
    assert (exit_record["rc"], exit_record["stage"]) == (1, 0)
    assert "full" in exit_record["error"]
    assert told["put"].startswith("Refused: z cannot be stored")
    assert told["second"].startswith("Refused: ")
    assert "No space left" in told["second"]
    assert told["runs"] == ["r1"]
    assert told["third"] is False
    assert told["end"]["exit"]["rc"] == 0
    assert told["leftovers"] == []
