"""A run of the tests: a real program under the host's supervisor that writes events as the engine does.

argv: the engine's folder, then complete | quarantined | wait. ``wait`` goes on until it is asked to stop.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])

from engine.host.events import EventLog
from engine.host.files import atomic_json

folder, mode = Path(os.environ["HSX_RUN"]), sys.argv[2]
stops: list[int] = []
signal.signal(signal.SIGTERM, lambda signum, _frame: stops.append(signum))
log = EventLog(folder / "events.jsonl")
log.emit("run_started", run=folder.name)
log.emit("phase", name="extract", detail="3 rows")
log.emit("mismatch", row=81, cause="partial_chunk", got=1283, expected=4710, outcome="retried")
log.emit("warning", text="clear\x1b[2J the screen \x1b]52;c;Zm9v\x07")
log.emit("progress", done=2, quarantined=0, pending=1, samples_per_s=1.5, tok_per_s=90.0, eta_s=120.0)
while mode == "wait" and not stops:
    time.sleep(0.02)
counts = {"dataset": 3, "done": 3, "quarantined": 0, "pending": 0}
if mode == "quarantined":
    counts.update(done=2, quarantined=1)
if mode == "wait":
    counts.update(done=2, pending=1)
result = {"schema_version": 1, "outcome": "aborted" if stops else "complete", **counts}
log.emit("run_finished", **result)
atomic_json(folder / "result.json", result)
sys.exit(75 if stops else int(mode == "quarantined"))
