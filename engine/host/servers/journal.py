"""The journal of a server's job: each step's intent before it and its outcome after it, durable, so that a
job that was killed is finished by the next call of the same verb."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.host.files import atomic_json, read_json
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.host.events import EventLog

NAME = "job.json"


def unfinished(folder: Path) -> dict[str, Any] | None:
    """The journal of a job that had begun to act and did not end; None when there is none."""
    found = read_json(folder / NAME)
    if found is None or found.get("ended") is not None or not isinstance(found.get("steps"), dict):
        return None
    return found if "save" in found["steps"] else None


class Journal:
    """One job's journal. ``events``: told of each step, for whoever watches.

    A journal of the same ``key`` that did not end is gone on with; any other is given up.
    """

    def __init__(self, folder: Path, key: str, job: str, events: EventLog | None) -> None:
        self._path = folder / NAME
        self._events = events
        left = unfinished(folder)
        self.resumes = left is not None and left.get("key") == key
        self.data: dict[str, Any] = (
            left
            if left is not None and self.resumes
            else {"format_version": 1, "key": key, "jobs": [], "began": now_iso(), "steps": {}}
        )
        self.data["jobs"] = [*self.data.get("jobs", []), job]
        self.data["ended"] = None
        self._write()
        if left is not None and not self.resumes:
            self.say(f"an unfinished job is given up: {left.get('key')}, begun {left.get('began')}")

    def done(self, step: str) -> bool:
        """Whether the step has been completed."""
        return self.data["steps"].get(step, {}).get("done") is not None

    def begun(self, step: str) -> bool:
        """Whether the step was at least begun."""
        return step in self.data["steps"]

    def fact(self, step: str, name: str) -> Any:
        """What the step's intent or outcome recorded."""
        return self.data["steps"].get(step, {}).get(name)

    @contextmanager
    def step(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Record the intent with ``facts``, and once the body is through, the outcome. The body may add
        facts."""
        entry = {**self.data["steps"].get(name, {}), **facts, "intent": now_iso()}
        self.data["steps"][name] = entry
        self._write()
        self._tell(name, "begun")
        yield entry
        entry["done"] = now_iso()
        self._write()
        self._tell(name, "done")

    def end(self, outcome: str, detail: str = "") -> None:
        """The job has ended; nothing is left to resume."""
        self.data["ended"] = {"outcome": outcome, "detail": detail, "at": now_iso()}
        self._write()

    def say(self, text: str) -> None:
        """What goes on within a step."""
        self._tell("server", text)

    def _tell(self, name: str, detail: str) -> None:
        if self._events is None:
            return
        try:
            self._events.emit("phase", name=name, detail=detail)
        except OSError as error:  # the journal is the truth; a full disk must not leave a server stopped
            sys.stderr.write(f"{name}: {detail} (no event: {error})\n")

    def _write(self) -> None:
        atomic_json(self._path, self.data)
