"""The events of a run as the console follows them: decoded, in order, with lost links as messages.

The cursor is all our state: the file on the host is the truth, so after a lost link the same question is
asked again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from engine.wire.errors import SpecError
from engine.wire.events import Event, decode
from hsx_tui.deploy.tail import START, Batch, Cursor, Eof, Gap, Reset, Waiting, follow

from hsx_tui.model.messages import Connection, EngineEvent, Link as LinkState, LogGap, Message, ServerLog  # isort: skip
from typing import TYPE_CHECKING

from hsx_tui.model.messages import LogSource
from hsx_tui.text import clean

if TYPE_CHECKING:
    from hsx_tui.deploy.link import Link

Post = Callable[[Message], None]

LOG_BACKLOG = 256 << 10
"""How much of a log is read when it is opened (bytes); the rest is a gap that is said."""


async def run_events(link: Link, run: str, post: Post) -> AsyncIterator[Event]:
    """Every event of the run from its first, also posted; ends when the run has ended and all is read."""
    lost = False
    async for item in follow(link.session, run, "events.jsonl"):
        if isinstance(item, Waiting):
            lost = True
            post(Connection(LinkState.LOST, str(item.error), item.retry_in_s))
            continue
        if lost:
            lost = False
            post(Connection(LinkState.CONNECTED))
        if isinstance(item, Eof):
            return
        if isinstance(item, Batch):
            for line in item.lines:
                try:
                    event = decode(line)
                except SpecError:
                    continue  # the torn last line of a killed writer; seq shows whether one is missing
                post(EngineEvent(run, event))
                yield event


async def follow_log(
    link: Link,
    run: str,
    source: LogSource,
    post: Post,
    start: Cursor = START,
    *,
    max_bytes: int = LOG_BACKLOG,
) -> Cursor:
    """Post the lines of a run's log until it ends; returns where it ended."""
    cursor = start
    async for item in follow(link.session, run, "stdio.log", start, max_bytes=max_bytes):
        cursor = item.cursor
        if isinstance(item, Batch) and item.lines:
            post(ServerLog([clean(line.decode("utf-8", "backslashreplace")) for line in item.lines], source))
        elif isinstance(item, Gap):
            post(LogGap(source))
        elif isinstance(item, Reset):
            post(ServerLog(["-- the log began anew --"], source))
    return cursor
