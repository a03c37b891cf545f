"""Pulling a store, or the shards of some of its rows, to this machine: named files only, each proved by its
hash, going on where a lost link left it.

The index comes first and is written last, with the lines of the shards that are here: at any moment the
folder is a store whose every line is true.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.wire.durable import atomic_bytes, write_all
from engine.wire.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    HostKeyError,
    LinkLost,
    Refused,
    RemoteError,
)
from engine.wire.storefiles import is_name
from hsx_tui.deploy.pullfolder import PullFolder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from hsx_tui.deploy.link import Link
    from hsx_tui.deploy.session import Session

T = TypeVar("T")

BLOCK = 256 << 10
BEGIN_S = 60.0
SILENCE_S = 30.0
"""A file's hash so far is computed before its first byte comes; a terabyte is not read in this time, a shard
is."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_FILES = 2_000_000
TELL_S = 0.1
WRONG_TRIES = 2


@dataclass(frozen=True)
class Rate:
    """How far a pull is. ``done`` and ``total``: bytes of the files that are wanted, ``per_s``: bytes a
    second since this pull began. ``waiting``: why nothing comes at the moment."""

    name: str
    done: int
    total: int
    per_s: float
    waiting: str = ""


@dataclass(frozen=True)
class Pulled:
    """``transferred``: bytes that came over the link this time; ``bytes``: all that was wanted."""

    files: int
    bytes: int
    transferred: int
    samples: int
    seconds: float


class Pull:
    """One pull of ``store`` (absolute path on the host) into ``dest``.

    Args:
        source: the host's name, for the record: another host's store is never mixed in.
        rows: [first, last): only the shards that have these rows, and their whole lines; None = all.
        told: called after each block, at most ten times a second.
        patience_s: how long one lost link is waited for; None = for ever.
    """

    def __init__(
        self,
        link: Link,
        store: str,
        dest: Path,
        *,
        source: str,
        rows: tuple[int, int] | None = None,
        told: Callable[[Rate], None] = lambda _rate: None,
        patience_s: float | None = 600.0,
    ) -> None:
        self._link, self._store, self._dest, self._rows = link, store, dest, rows
        self._source, self._told, self._patience = f"{source}:{store}", told, patience_s
        self._began = time.monotonic()
        self._spoke = float("-inf")
        self._done = self._total = self._transferred = 0

    async def run(self) -> Pulled:
        """Do it. Safe to repeat: what is here is not asked for again.

        Raises Refused (no store there, a folder here that is something else), RemoteError (bytes that stay
        wrong), ConnectionFailed and its kin once patience is at its end. Refused when this disk is full.
        """
        files = {f["name"]: f["size"] for f in await self._list()}
        folder = await asyncio.to_thread(PullFolder, self._dest, self._source)
        try:
            self._total = sum(files.get(n, 0) for n in ("manifest.json", "index.jsonl"))
            await self._file(folder, "manifest.json", files.get("manifest.json", 0), keep=True)
            if "index.jsonl" in files:
                await self._file(folder, "index.jsonl", files["index.jsonl"], keep=False)
            wanted = await asyncio.to_thread(self._wanted, folder, files)
            self._total += sum(files[name] for name in wanted)
            for name in wanted:
                await self._file(folder, name, files[name], keep=True)
            samples = await asyncio.to_thread(_write_index, folder)
        finally:
            folder.close()
        seconds = time.monotonic() - self._began
        return Pulled(len(wanted) + 2, self._total, self._transferred, samples, seconds)

    async def _list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = ""
        while len(found) < MAX_FILES:
            answer = await self._link.call("store_files", store=self._store, after=after, deadline_s=120)
            files = answer.get("files")
            if not isinstance(files, list) or not all(_is_entry(f) for f in files):
                raise RemoteError("the host's list of the store is malformed")
            found += files
            if not answer.get("more") or not files:
                return found
            after = files[-1]["name"]
        raise RemoteError("the host lists too many files", f"more than {MAX_FILES}")

    def _wanted(self, folder: PullFolder, files: dict[str, int]) -> list[str]:
        """The files beside manifest and index, in the order in which they are asked for."""
        shards = {entry["shard"] for entry in _lines(folder) if self._in_rows(entry.get("row"))}
        missing = sorted(shards - set(files))
        if missing:
            raise RemoteError(
                f"the store lacks {missing[0]}", "its index names it", "run hsx-console verify on the host"
            )
        rest = [n for n in files if n in ("norm.safetensors", "attempts.jsonl")]
        aside = [n for n in files if n.startswith("quarantine/") and self._in_rows(int(n[11:].split(".")[0]))]
        return sorted(rest) + sorted(aside) + sorted(shards)

    def _in_rows(self, row: object) -> bool:
        return self._rows is None or (isinstance(row, int) and self._rows[0] <= row < self._rows[1])

    async def _file(self, folder: PullFolder, name: str, size: int, *, keep: bool) -> None:
        """Bring one file; ``keep``: one that is whole here already is not asked for again."""
        if keep and folder.whole(name, size):
            self._say(name, size)
            return
        before, pause, since, wrong = self._done, FIRST_PAUSE_S, time.monotonic(), 0
        while True:
            try:
                if await self._try(folder, name, size, keep):
                    self._done = before + size
                    return
                wrong += 1
                if wrong >= WRONG_TRIES:
                    raise RemoteError(
                        f"{name} does not arrive as it is on the host",
                        f"its hash differed {wrong} times",
                        "verify the store on the host",
                    )
            except HostKeyError:
                raise
            except (ConnectionFailed, DeadlineExceeded) as error:
                if self._done > before:
                    since, pause = time.monotonic(), FIRST_PAUSE_S
                if self._patience is not None and time.monotonic() - since > self._patience:
                    raise
                self._told(Rate(name, self._done, self._total, self._per_s(), str(error)))
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(pause * 2, LONGEST_PAUSE_S)
            self._done = before

    async def _try(self, folder: PullFolder, name: str, size: int, keep: bool) -> bool:
        """One transfer from where the part ends; False if the hash is wrong (the part is dropped)."""
        session = await self._link.session()
        try:
            return await self._transfer(session, folder, name, size, keep)
        except OSError as error:  # of this machine: one of the link has come as LinkLost
            raise Refused(
                f"{self._dest} cannot be written", error.strerror or str(error), "make room and pull again"
            ) from error

    async def _transfer(self, session: Session, folder: PullFolder, name: str, size: int, keep: bool) -> bool:
        fd, have, digest = await asyncio.to_thread(folder.open_part, name, size)
        try:
            self._say(name, have)
            asked: dict[str, Any] = {"store": self._store, "name": name, "offset": have, "size": size}
            async with session.stream("fetch", deadline_s=BEGIN_S, **asked) as call:
                if (await _soon(call.answer())).get("bytes") != size - have:
                    raise RemoteError(f"the host offers another length of {name}")
                left = size - have
                while left:
                    block = await _soon(call.exactly(min(BLOCK, left)))
                    digest.update(block)
                    write_all(fd, block)
                    left -= len(block)
                    self._transferred += len(block)
                    self._say(name, len(block))
                right = (await _soon(call.answer())).get("sha256") == digest.hexdigest()
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
        if not right:
            folder.drop_part(name)
        elif keep:
            await asyncio.to_thread(folder.finish, name, size, digest.hexdigest())
        return right

    def _say(self, name: str, more: int) -> None:
        self._done += more
        if time.monotonic() - self._spoke >= TELL_S:
            self._spoke = time.monotonic()
            self._told(Rate(name, self._done, self._total, self._per_s()))

    def _per_s(self) -> float:
        return self._transferred / max(time.monotonic() - self._began, 1e-6)


async def _soon(answer: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await answer
    except TimeoutError as error:
        raise LinkLost("the transfer fell silent", f"nothing for {SILENCE_S:g} s", "ask again") from error


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and is_name(entry.get("name"))
        and isinstance(entry.get("size"), int)
        and entry["size"] >= 0
    )


def _lines(folder: PullFolder) -> Iterator[dict[str, Any]]:
    """The whole lines of the pulled index that name a shard. Raises RemoteError for a line that is none."""
    part = folder.part("index.jsonl")
    if not part.exists():
        return
    with part.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return  # the run is appending to it
            try:
                entry = json.loads(line)
                good = is_name(entry["shard"]) and entry["shard"].startswith("shards/")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                good = False
            if not good:
                raise RemoteError(f"the store's index is malformed in line {number + 1}")
            yield {**entry, "line": line}


def _write_index(folder: PullFolder) -> int:
    """The lines of the shards that are here, whole; returns how many."""
    lines = [e["line"] for e in _lines(folder) if folder.sha256(e["shard"]) is not None]
    atomic_bytes(folder.place("index.jsonl"), b"".join(lines))
    return len(lines)


def check_rows(text: str) -> tuple[int, int]:
    """``A:B`` as [A, B). Raises Refused."""
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) >= int(last):
        raise Refused(f"rows {text!r}", "they are FIRST:LAST, the last one not included", "as in 0:100")
    return int(first), int(last)
