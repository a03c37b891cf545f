"""Recordings: a JSON-lines file of messages, ``{"t": seconds, "message": "EngineEvent", ...its fields}`` a
line.

``Recorder`` writes one beside a live session; ``ReplayDriver`` plays one, for pictures, for tests and for
looking at a run that is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Any, TextIO

from engine.wire.errors import Refused, UsageError
from hsx_tui.model import messages
from hsx_tui.model.driver import Plan, Post
from hsx_tui.model.messages import Link, Message, StepState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        messages.Connection, messages.HostFactsSeen, messages.RunStatusSeen, messages.EngineEvent,
        messages.EventsGap, messages.ServerLog, messages.LogGap, messages.Step, messages.Notice,
    )
}  # fmt: skip
_MAX_STEP_S = 3600.0


def to_json(message: Message, t: float) -> dict[str, Any]:
    """One line of a recording, as an object; ``t`` is in seconds from its beginning."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    if "lines" in fields and not isinstance(fields["lines"], int | None):
        fields["lines"] = list(fields["lines"])
    return {"t": round(t, 3), "message": type(message).__name__, **fields}


def from_json(data: Any) -> tuple[float, Message]:
    """Read one line of a recording. Raises UsageError that says what is wrong with it."""
    if not isinstance(data, dict) or not isinstance(data.get("t"), int | float):
        raise UsageError("a line of the recording has no time")
    cls = KINDS.get(str(data.get("message")))
    if cls is None:
        raise UsageError(
            f"the recording has a message {data.get('message')!r}", "this version does not know it"
        )
    known = {f.name for f in dataclasses.fields(cls)}
    fields = {k: v for k, v in data.items() if k in known}
    try:
        if "state" in fields:
            fields["state"] = (Link if cls is messages.Connection else StepState)(fields["state"])
        message: Message = cls(**fields)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a {cls.__name__} of the recording is malformed", str(error)) from error
    return float(data["t"]), message


def load(path: Path) -> list[tuple[float, Message]]:
    """The messages of a recording with their times. Raises UsageError that names the line."""
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    found.append(from_json(json.loads(line)))
                except (ValueError, UsageError) as error:
                    raise UsageError(f"{path} is not a recording", f"line {number}: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error)) from error
    return found


class Recorder:
    """Wraps a ``post``: every message goes to ``out`` as well. ``clock`` gives seconds."""

    def __init__(self, out: TextIO, post: Post, clock: Callable[[], float]) -> None:
        self._out = out
        self._post = post
        self._clock = clock
        self._began = clock()

    def __call__(self, message: Message) -> None:
        """Record and pass on."""
        self._out.write(json.dumps(to_json(message, self._clock() - self._began), ensure_ascii=False) + "\n")
        self._out.flush()
        self._post(message)


class ReplayDriver:
    """Plays a recording. ``speed``: 2.0 is twice as fast, infinity plays all at once; then it stays at the
    end.
    """

    def __init__(self, recording: list[tuple[float, Message]], speed: float = 1.0) -> None:
        self.recording = recording
        self.speed = speed

    async def run(self, post: Post) -> None:
        """Post every message at its time."""
        before = 0.0
        for t, message in self.recording:
            wait = min(max(0.0, t - before), _MAX_STEP_S) / self.speed
            if wait:
                await asyncio.sleep(wait)
            before = t
            post(message)
        await asyncio.Event().wait()

    async def start(self) -> None:
        """Refused: what is over cannot be changed."""
        raise _refused("start")

    async def abort(self) -> None:
        """Refused."""
        raise _refused("abort")

    async def resume(self) -> None:
        """Refused."""
        raise _refused("resume")

    def plan(self, action: str) -> Plan:
        """A plan that says that there is nothing to do."""
        return Plan(
            title=action.replace(".", " ").upper(),
            host="a recording",
            steps=("nothing: this is a recording",),
            undo="not needed",
        )

    def retry_now(self) -> None:
        """There is no link to try again."""


def _refused(action: str) -> Refused:
    return Refused(f"cannot {action} the run", "this is a recording", "open the console on its host")
