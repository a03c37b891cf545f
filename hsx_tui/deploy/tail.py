"""Following a file of a run through any number of lost links: nothing is lost, nothing comes twice.

The host's file is the truth and the cursor is all our state, so a reconnect is just the same question again.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.wire.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    HostKeyError,
    HsxError,
    LinkLost,
    RemoteError,
)
from hsx_tui.text import clean

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from hsx_tui.deploy.remote import Call
    from hsx_tui.deploy.session import Session

    SessionFactory = Callable[[], Awaitable[Session]]

SILENCE_S = 12.0
"""The host sends a sign of life every 5 s; after this long the link counts as dead."""
MAX_FRAME = 1 << 20

_HEADER = re.compile(rb"(\d{1,18}) (\d{1,9}|RESET|EOF) (\d{1,20})\Z")


@dataclass(frozen=True)
class Cursor:
    """Where the reader is. ``mid_line``: the rest of a line that was already given, cut short, is to be
    dropped."""

    offset: int = 0
    inode: int = 0
    mid_line: bool = False


START = Cursor()


@dataclass(frozen=True)
class Batch:
    """Complete lines (bytes, without newline). Empty = a sign of life. ``cut``: the last line is not whole
    (it is longer than 1 MiB, or the run ended in the middle of it)."""

    cursor: Cursor
    lines: tuple[bytes, ...]
    cut: bool = False


@dataclass(frozen=True)
class Reset:
    """The file shrank or was replaced: what follows begins at its first byte."""

    cursor: Cursor


@dataclass(frozen=True)
class Gap:
    """``missed`` bytes were skipped, as ``max_bytes`` asked."""

    cursor: Cursor
    missed: int


@dataclass(frozen=True)
class Eof:
    """The run has ended and the file is drained."""

    cursor: Cursor


@dataclass(frozen=True)
class Waiting:
    """The link is down; the next try is in ``retry_in_s`` seconds."""

    cursor: Cursor
    error: HsxError
    retry_in_s: float


Item = Batch | Reset | Gap | Eof | Waiting


def split_frame(cursor: Cursor, data: bytes) -> Batch:
    """The lines of a frame that begins at the cursor."""
    end = replace(cursor, offset=cursor.offset + len(data))
    if cursor.mid_line:
        at = data.find(b"\n")
        if at < 0:
            return Batch(end, ())
        data = data[at + 1 :]
    lines = data.split(b"\n")
    rest = lines.pop()
    if rest:
        lines.append(rest)
    return Batch(replace(end, mid_line=bool(rest)), tuple(lines), cut=bool(rest))


async def _read_frame(call: Call) -> tuple[int, bytes, int, bytes]:
    """(offset, length or RESET or EOF, inode, bytes) of the next frame."""
    header = await call.line()
    match = _HEADER.match(header)
    if match is None:
        raise RemoteError("the host sent a malformed tail frame", clean(repr(header[:80])))
    what = match[2]
    size = 0 if what in (b"RESET", b"EOF") else int(what)
    if size > MAX_FRAME:
        raise RemoteError("the host sent an oversized tail frame", f"{size} bytes")
    return int(match[1]), what, int(match[3]), await call.exactly(size)


async def _items(call: Call, cursor: Cursor) -> AsyncIterator[Item]:
    """The items of one stream, up to and including Eof."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                offset, what, inode, data = await _read_frame(call)
        except TimeoutError as error:
            raise LinkLost("the tail fell silent", f"no sign of life for {SILENCE_S:g} s") from error
        if what == b"RESET":
            cursor = Cursor(offset, inode)
            yield Reset(cursor)
            continue
        if offset < cursor.offset:
            raise RemoteError("the host sent bytes again", f"at {offset}, expected {cursor.offset}")
        if offset > cursor.offset:
            missed, cursor = offset - cursor.offset, Cursor(offset, inode)
            yield Gap(cursor, missed)
        cursor = replace(cursor, inode=inode)
        if what == b"EOF":
            yield Eof(cursor)
            return
        batch = split_frame(cursor, data)
        cursor = batch.cursor
        yield batch


async def follow(
    session_factory: SessionFactory,
    run: str,
    file: str,
    cursor: Cursor = START,
    *,
    max_bytes: int = 0,
    first_retry_s: float = 0.5,
    last_retry_s: float = 30.0,
) -> AsyncIterator[Item]:
    """Follow ``file`` ("events.jsonl" or "stdio.log") of ``run`` from ``cursor`` on, until Eof.

    Each item carries the cursor after it: following again from there continues exactly. A lost link gives
    Waiting and another try, for ever. ``max_bytes`` > 0: when more than that lies unread, skip to the last
    that many (Gap).

    Args: session_factory: gives a live session with the engine installed (``Link.session``); it owns the
        sessions.

    Raises:
        HostKeyError, and what the host answers (Refused for a run that was never started, SpecError).
    """
    retry = first_retry_s
    while True:
        try:
            session = await session_factory()
            asked: dict[str, Any] = {"run": run, "file": file, "offset": cursor.offset, "inode": cursor.inode}
            async with session.stream("tail", **asked, max_bytes=max_bytes) as call:
                async for item in _items(call, cursor):
                    cursor, retry = item.cursor, first_retry_s
                    yield item
                    if isinstance(item, Eof):
                        return
        except HostKeyError:
            raise
        except (ConnectionFailed, DeadlineExceeded) as error:
            pause = retry * random.uniform(0.75, 1.25)
            yield Waiting(cursor, error, pause)
            await asyncio.sleep(pause)
            retry = min(retry * 2, last_retry_s)
