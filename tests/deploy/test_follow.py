"""Following a run's files through lost links: nothing lost, nothing twice, no line floods the console."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

import hsx_tui.deploy.tail
from engine.wire.errors import HostKeyError, LinkLost, Refused
from hsx_tui.deploy.link import Link
from hsx_tui.deploy.tail import START, Batch, Cursor, Eof, Gap, Reset, Waiting, follow, split_frame

from .proxy import FaultProxy

if TYPE_CHECKING:
    from pathlib import Path

    from hsx_tui.deploy.session import Session
    from hsx_tui.deploy.tail import Item

    from .conftest import Host

EVENTS = """
import json, os, sys, time
fd = os.open(os.environ["HSX_RUN"] + "/events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for n in range(1, int(sys.argv[1]) + 1):
    os.write(fd, json.dumps({"seq": n, "at": "", "type": "progress"}).encode() + b"\\n")
    time.sleep(float(sys.argv[2]))
"""


async def begin(link: Link, run: str, program: str, *argv: str, attempt: int = 1) -> None:
    session = await link.session()
    assert session.engine is not None
    whole = [session.engine.python, "-I", "-u", "-c", program, *argv]
    await link.call("start", run=run, attempt=attempt, kind="extract", argv=whole)


async def ended(link: Link, run: str) -> None:
    """Wait until the run is over: its log's tail ends then."""
    async for _ in follow(link.session, run, "stdio.log"):
        pass


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


async def collect(link: Link, run: str, file: str, cursor: Cursor = START, max_bytes: int = 0) -> list[Item]:
    return [item async for item in follow(link.session, run, file, cursor, max_bytes=max_bytes)]


def lines(items: list[Item]) -> list[bytes]:
    return [line for item in items if isinstance(item, Batch) for line in item.lines]


async def test_no_event_is_lost_or_double_through_killed_connections(
    link: Link, host: Host, run_id: str
) -> None:
    await begin(link, run_id, EVENTS, "60", "0.03")

    async def drop_often() -> None:
        for _ in range(4):
            await asyncio.sleep(0.4)
            host.drop()

    dropping = asyncio.create_task(drop_often())
    items = [item async for item in follow(link.session, run_id, "events.jsonl", first_retry_s=0.05)]
    await dropping
    assert [json.loads(line)["seq"] for line in lines(items)] == list(range(1, 61))
    assert sum(isinstance(item, Waiting) for item in items) >= 2
    assert isinstance(items[-1], Eof)


async def test_a_cursor_continues_where_it_was_left_and_over_a_resume(link: Link, run_id: str) -> None:
    await begin(link, run_id, EVENTS, "3", "0")
    await ended(link, run_id)
    first = await collect(link, run_id, "events.jsonl")
    assert len(lines(first)) == 3
    assert lines(await collect(link, run_id, "events.jsonl", first[-1].cursor)) == []
    await begin(link, run_id, EVENTS, "2", "0", attempt=2)
    assert len(lines(await collect(link, run_id, "events.jsonl", first[-1].cursor))) == 2


async def test_bytes_that_are_no_text_arrive_as_they_are(link: Link, run_id: str) -> None:
    await begin(link, run_id, "import os; os.write(1, b'ok\\n\\xff\\xfe\\x1b[2J\\n\\xe2\\x82\\nend')")
    await ended(link, run_id)
    items = await collect(link, run_id, "stdio.log")
    assert lines(items) == [b"ok", b"\xff\xfe\x1b[2J", b"\xe2\x82", b"end"]
    assert (await (await link.session()).call("status", run=run_id))["status"]["exit"]["rc"] == 0


async def test_an_endless_line_is_cut_once_and_the_next_line_is_whole(link: Link, run_id: str) -> None:
    await begin(
        link, run_id, "import os\nfor _ in range(50): os.write(1, b'x' * 100_000)\nos.write(1, b'\\nnext\\n')"
    )
    await ended(link, run_id)
    items = await collect(link, run_id, "stdio.log")
    got = lines(items)
    assert [len(line) for line in got] == [1 << 20, 4]
    assert got[1] == b"next"
    assert [i.cut for i in items if isinstance(i, Batch) and i.lines] == [True, False]


async def test_a_log_viewer_may_skip_to_the_end(link: Link, run_id: str) -> None:
    await begin(link, run_id, "for n in range(50_000): print('line %06d' % n)")
    await ended(link, run_id)
    items = await collect(link, run_id, "stdio.log", max_bytes=36)
    assert isinstance(items[0], Gap)
    assert items[0].missed == 50_000 * 12 - 36
    assert lines(items) == [b"line 049997", b"line 049998", b"line 049999"]


async def test_a_file_that_was_replaced_gives_a_reset_and_all_of_the_new_one(
    link: Link, host: Host, run_id: str
) -> None:
    await begin(link, run_id, EVENTS, "3", "0")
    await ended(link, run_id)
    first = await collect(link, run_id, "events.jsonl")
    overwrite(host.home / ".local/state/hsx/runs" / run_id / "events.jsonl", b'{"seq":1}\n')
    items = await collect(link, run_id, "events.jsonl", first[-1].cursor)
    assert isinstance(items[0], Reset)
    assert lines(items) == [b'{"seq":1}']


async def test_a_silent_link_is_given_up_and_followed_anew(
    host: Host, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hsx_tui.deploy.tail, "SILENCE_S", 0.6)
    async with FaultProxy(host.address) as proxy:
        link = Link(proxy.address(host.address.known_hosts.read_text()))
        await begin(link, run_id, EVENTS, "40", "0.03")
        seen: list[int] = []
        waited = 0
        async for item in follow(link.session, run_id, "events.jsonl", first_retry_s=0.1):
            if isinstance(item, Batch):
                seen += [json.loads(line)["seq"] for line in item.lines]
            if isinstance(item, Waiting):
                waited += 1
                proxy.reset()
                proxy.down_open.set()
            elif len(seen) > 5 and not waited:
                proxy.down_open.clear()
        await link.close()
    assert seen == list(range(1, 41))
    assert waited >= 1


async def test_what_waiting_cannot_mend_is_raised(link: Link, host: Host, run_id: str) -> None:
    with pytest.raises(Refused, match="never started"):
        await collect(link, run_id, "events.jsonl")

    async def refused() -> Session:
        raise HostKeyError("the key has CHANGED")

    with pytest.raises(HostKeyError):
        await anext(follow(refused, run_id, "events.jsonl"))


async def test_each_failed_try_is_told_with_a_growing_pause() -> None:
    async def unreachable() -> Session:
        raise LinkLost("gone")

    pauses = []
    async for item in follow(unreachable, "r", "events.jsonl", first_retry_s=0.01, last_retry_s=0.03):
        assert isinstance(item, Waiting)
        pauses.append(item.retry_in_s)
        if len(pauses) == 4:
            break
    for pause, middle in zip(pauses, (0.01, 0.02, 0.03, 0.03), strict=True):
        assert 0.74 * middle < pause < 1.26 * middle


def test_a_frame_is_cut_into_lines() -> None:
    start = Cursor(10, 7)
    assert split_frame(start, b"a\n\nb\n") == Batch(Cursor(15, 7), (b"a", b"", b"b"))
    cut = split_frame(start, b"a\nlong")
    assert cut == Batch(Cursor(16, 7, mid_line=True), (b"a", b"long"), cut=True)
    assert split_frame(cut.cursor, b"more") == Batch(Cursor(20, 7, mid_line=True), ())
    assert split_frame(cut.cursor, b"er\nb\n") == Batch(Cursor(21, 7), (b"b",))
    assert split_frame(start, b"") == Batch(start, ())
