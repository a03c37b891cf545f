"""The store of a run: what is done, what waits for its shard, what is set aside. One writer (the run holds
the lock).

Order of durability: shard (tmp, fsync, rename) -> lines in index.jsonl (fsync) -> done. After a crash at
any point no done sample is lost or double, and at most the shard in memory is taken again.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from engine.store.aside import remove_aside, rows_aside, write_aside
from engine.store.files import append_lines
from engine.store.records import IndexLine, Record, parse_index_line
from engine.store.shards import read_shard_lines, shard_number, shard_numbers, write_shard
from engine.wire.errors import StoreError
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def read_index(store: Path) -> tuple[dict[int, IndexLine], int]:
    """The valid lines of index.jsonl by row, and the length in bytes of the part that ends with a newline.

    A torn last line is not a line. A damaged line elsewhere or a row that is there twice is a StoreError.
    """
    try:
        data = (store / "index.jsonl").read_bytes()
    except FileNotFoundError:
        return {}, 0
    whole = data.rfind(b"\n") + 1
    lines: dict[int, IndexLine] = {}
    for number, raw in enumerate(data[:whole].splitlines(), 1):
        try:
            line = parse_index_line(json.loads(raw))
        except (ValueError, StoreError) as error:
            raise StoreError(
                f"index.jsonl line {number} of {store} is damaged",
                str(error),
                "run verify, or restore the file",
            ) from error
        if line.row in lines:
            raise StoreError(f"row {line.row} is twice in index.jsonl of {store}", "", "run verify")
        lines[line.row] = line
    return lines, whole


class Store:
    """An open store. ``done`` holds the durable samples, ``buffer`` those that wait for their shard."""

    def __init__(self, path: Path, shard_bytes: int = 256 << 20, shard_seconds: float = 60.0) -> None:
        self.path = path
        self.shard_bytes = shard_bytes
        self.shard_seconds = shard_seconds
        self.buffer: list[Record] = []
        self._oldest = 0.0
        self.recovered: list[IndexLine] = []
        self.done, whole = read_index(path)
        index = path / "index.jsonl"
        if index.exists() and index.stat().st_size > whole:
            with index.open("r+b") as f:
                f.truncate(whole)
        for tmp in [
            *path.glob(".tmp-*"),
            *(path / "shards").glob(".tmp-*"),
            *(path / "quarantine").glob(".tmp-*"),
        ]:
            tmp.unlink()
        self._next = max(shard_numbers(path), default=-1) + 1
        self._recover()
        self.quarantined = rows_aside(path) - set(self.done)

    def _recover(self) -> None:
        """Append the lines of shards that were durable before their lines were (only the newest can be)."""
        newest = max((shard_number(line.shard) for line in self.done.values()), default=-1)
        for number in shard_numbers(self.path):
            if number < newest:
                continue
            lines = [line for line in read_shard_lines(self.path, number) if line.row not in self.done]
            if lines:
                self._append(lines)
                self.recovered += lines

    def _append(self, lines: list[IndexLine]) -> None:
        append_lines(self.path / "index.jsonl", b"".join(line.encode() for line in lines))
        self.done.update((line.row, line) for line in lines)

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for their shard."""
        return sum(r.nbytes for r in self.buffer)

    def add(self, record: Record) -> None:
        """Take a checked sample; it becomes done at the next commit."""
        if record.row in self.done or any(r.row == record.row for r in self.buffer):
            raise StoreError(
                f"row {record.row} is done already", "it was taken twice", "this is a defect: report it"
            )
        if not self.buffer:
            self._oldest = time.monotonic()
        self.buffer.append(record)

    @property
    def due(self) -> bool:
        """Whether the buffer should become a shard now (size or age)."""
        if not self.buffer:
            return False
        return (
            self.buffered_bytes >= self.shard_bytes or time.monotonic() - self._oldest >= self.shard_seconds
        )

    def commit(self) -> list[IndexLine]:
        """Make the buffer a durable shard and its samples done. StoreError leaves the buffer as it was."""
        if not self.buffer:
            return []
        records = self.buffer[:]
        lines = write_shard(self.path, self._next, records)
        self._next += 1
        self._append(lines)
        self.buffer = self.buffer[len(records) :]
        self._oldest = time.monotonic()
        for line in lines:
            self._release(line.row)
        return lines

    def _release(self, row: int) -> None:
        """A row that is done now is no longer set aside."""
        if row in self.quarantined:
            remove_aside(self.path, row)
            self.quarantined.discard(row)

    def quarantine(self, row: int, entry: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> None:
        """Set a row aside with its cause and evidence (and its tensors where there were some)."""
        write_aside(self.path, row, entry, tensors)
        self.quarantined.add(row)

    def log_attempt(self, entry: Mapping[str, Any]) -> None:
        """A line in attempts.jsonl: what may change between attempts."""
        line = json.dumps({"at": now_iso(), **entry}, separators=(",", ":"), default=str).encode() + b"\n"
        append_lines(self.path / "attempts.jsonl", line)
