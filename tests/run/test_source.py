"""The HTTP source against a server that misbehaves (a fake, beside the real one of test_extract)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from engine.capture.pythonpath.hsx_capture.beacon import remove_beacon, write_beacon
from engine.capture.states import Finding
from engine.dataset.tokens import Sample
from engine.sources.gate import Gate
from engine.sources.protocol import Ask, Taken
from engine.sources.sglang import SGLangSource
from engine.wire.causes import Cause
from engine.wire.errors import UsageError
from engine.wire.ids import rid
from engine.wire.spec import SourceSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int, body: str) -> Answer:
    """An answer to every request but /ready, which is 200."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        if length:
            await reader.readexactly(int(length[0].split(b":")[1]))
        code, text = (200, "{}") if b" /ready " in head.splitlines()[0] else (status, body)
        data = text.encode()
        lines = f"HTTP/1.1 {code} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        writer.write(lines.encode() + data)
        await writer.drain()
        writer.close()

    return answer


@contextlib.asynccontextmanager
async def misbehaving(answer: Answer) -> AsyncIterator[str]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def rows(count: int) -> AsyncIterator[Ask]:
    for row in range(count):
        yield Ask(Sample(row, None, (1, 2, 3), (1, 1, 1)), rid("t", row, 1), 1)


async def take(url: str, folder: Path, count: int = 1, **spec: Any) -> list[Taken]:
    write_beacon(folder, {"taps": []})  # the capture is active: what the server says is about the row
    source = SGLangSource(SourceSpec(url, str(folder), **spec), 4)
    try:
        async with asyncio.timeout(20), contextlib.aclosing(source.take(rows(count))) as answers:
            return [taken async for taken in answers]
    finally:
        await source.aclose()


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (200, "not json", Cause.UNREADABLE),
        (200, "[]", Cause.UNREADABLE),
        (200, '{"meta_info": {"id": "x", "prompt_tokens": null}}', Cause.UNREADABLE),
        (200, '{"meta_info": {"id": "x", "prompt_tokens": Infinity}}', Cause.UNREADABLE),
        (200, "[" * 100_000, Cause.UNREADABLE),
        (200, '{"meta_info": {"id": "x", "prompt_tokens": 3}}', Cause.FOREIGN),
        (200, '{"meta_info": {"id": "hsx-t-00000000-01_", "prompt_tokens": 3}}', Cause.NO_HANDSHAKE),
        (
            200,
            '{"meta_info": {"id": "hsx-t-00000000-01_", "prompt_tokens": 3, "hsx": {"error": "full"}}}',
            Cause.WRITER_ERROR,
        ),
        (
            200,
            '{"meta_info": {"id": "hsx-t-00000000-01_", "prompt_tokens": 2, "hsx": {"path": "x"}}}',
            Cause.TRUNCATED_INPUT,
        ),
        (
            200,
            '{"meta_info": {"id": "hsx-t-00000000-01_", "prompt_tokens": 3, "hsx": {"path": "/etc/passwd"}}}',
            Cause.FOREIGN,
        ),
        (400, "The input (3000 tokens) is longer than the model's context length.", Cause.TRUNCATED_INPUT),
        (404, "no such route", Cause.MISSING),
        (422, "bad", Cause.MISSING),
    ],
)
async def test_what_is_wrong_with_an_answer_has_a_cause(
    tmp_path: Path, status: int, body: str, cause: Cause
) -> None:
    async with misbehaving(reply(status, body)) as url:
        (taken,) = await take(url, tmp_path)
    assert isinstance(taken.finding, Finding)
    assert taken.finding.cause is cause


async def test_a_reply_without_a_handshake_is_lost_where_no_capture_is_active(tmp_path: Path) -> None:
    """The server was started anew without the plugin: no fault of the row, which would be quarantined."""
    body = '{"meta_info": {"id": "hsx-t-00000000-01_", "prompt_tokens": 3}}'
    async with misbehaving(reply(200, body)) as url:
        source = SGLangSource(SourceSpec(url, str(tmp_path)), 4)
        async with contextlib.aclosing(source.take(rows(1))) as answers:
            (taken,) = [t async for t in answers]
        assert taken.finding is None
        assert "without the plugin" in taken.lost
        assert not await source.ready()
        assert source.trouble == taken.lost
        write_beacon(tmp_path, {"taps": []})
        assert await source.ready()
        assert not source.trouble
        remove_beacon(tmp_path)
        await source.aclose()


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, "boom"), (503, "busy"), (429, "slow down"), (400, "Duplicate request ID detected: x")],
)
async def test_what_says_nothing_about_the_row_is_lost(tmp_path: Path, status: int, body: str) -> None:
    async with misbehaving(reply(status, body)) as url:
        (taken,) = await take(url, tmp_path)
    assert taken.finding is None
    assert taken.lost.startswith(f"HTTP {status}")


async def test_a_refused_connection_is_lost_and_a_refused_key_is_an_error(tmp_path: Path) -> None:
    (taken,) = await take("http://127.0.0.1:9", tmp_path)
    assert taken.lost
    async with misbehaving(reply(401, "who are you")) as url:
        with pytest.raises(UsageError, match="refuses us"):
            await take(url, tmp_path)


async def test_a_hanging_server_is_lost_unless_it_is_ready(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b" /ready " in head.splitlines()[0] or b"/abort" in head.splitlines()[0]:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            return
        await reader.read()  # until the client gives up
        writer.close()

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/generate" in head.splitlines()[0]:
            await reader.read()
        writer.close()

    async with misbehaving(hang) as url:
        (taken,) = await take(url, tmp_path, timeout_s=0.3)
    assert taken.finding is not None
    assert taken.finding.cause is Cause.LATE
    async with misbehaving(dead) as url:
        (taken,) = await take(url, tmp_path, timeout_s=0.3)
    assert "not ready" in taken.lost


async def test_no_more_is_asked_for_than_is_looked_at(tmp_path: Path) -> None:
    """A consumer that stops reading stops the asking: nothing piles up."""
    asked = 0

    async def counted() -> AsyncIterator[Ask]:
        nonlocal asked
        async for ask in rows(1000):
            asked += 1
            yield ask

    source = SGLangSource(SourceSpec("http://127.0.0.1:9", str(tmp_path)), 4)
    async with contextlib.aclosing(source.take(counted())) as answers:
        await anext(answers)
        await asyncio.sleep(0.5)
        assert asked <= 4
    await source.aclose()


async def test_an_error_of_the_rows_ends_the_taking(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[Ask]:
        async for ask in rows(1):
            yield ask
        raise OSError("the dataset is gone")

    source = SGLangSource(SourceSpec("http://127.0.0.1:9", str(tmp_path)), 4)
    with pytest.raises(OSError, match="dataset is gone"):
        async with asyncio.timeout(10), contextlib.aclosing(source.take(broken())) as answers:
            [taken async for taken in answers]
    await source.aclose()


def test_clearing_a_run_leaves_its_namesakes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("hsx-a-00000001-01_", "hsx-a-b-00000001-01_", "hsx-ab-00000001-01_"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x")

    async def clear() -> int:
        source = SGLangSource(SourceSpec("http://127.0.0.1:9", str(tmp_path)), 1)
        try:
            return await source.clear("a")
        finally:
            await source.aclose()

    assert asyncio.run(clear()) == 1
    left = sorted(p.name.split(".")[0] for p in tmp_path.iterdir())
    assert left == ["hsx-a-b-00000001-01_", "hsx-ab-00000001-01_"]


async def test_one_alone_waits_for_the_others_and_holds_back_new_ones() -> None:
    gate, inside, seen = Gate(3), set[str](), list[set[str]]()

    async def work(name: str, alone: bool) -> None:
        async with gate.enter(alone):
            inside.add(name)
            seen.append(set(inside))
            await asyncio.sleep(0.02)
            inside.discard(name)

    async with asyncio.TaskGroup() as group:
        for i in range(4):
            group.create_task(work(f"a{i}", False))
        await asyncio.sleep(0.005)
        group.create_task(work("alone", True))
        await asyncio.sleep(0.005)
        for i in range(4):
            group.create_task(work(f"b{i}", False))
    assert {"alone"} in seen
    assert all("alone" not in s for s in seen if len(s) > 1)
    assert max(map(len, seen)) == 3
