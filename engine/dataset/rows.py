"""Read dataset rows: jsonl in the four forms of formats.md, one sample a line, by line offset.

A dataset may be larger than memory, so a row is read when it is asked for; only its offset is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.wire.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Row:
    """One line of the dataset: a conversation, or token ids with their loss mask (None = all supervised)."""

    row: int
    id: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Stamp:
    """What tells a file from another, and from what it was."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class RowFile:
    """The lines of a dataset file. ``sha256`` is over the raw bytes; it is the dataset's identity.

    The file stays open, and each read makes sure that it is still the one that was scanned: the offsets are
    worth nothing in another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets: list[tuple[int, int]] = []
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            self._stamp = _Stamp.of(os.fstat(self._fd))
            self.sha256 = self._scan()
        except OSError as error:
            raise DatasetError(
                f"cannot read the dataset {path}",
                error.strerror or str(error),
                "check the path and its permissions",
            ) from error
        self._same_as_scanned()
        if not self.offsets:
            raise DatasetError(
                f"the dataset {path} is empty", "it has no lines", "give a jsonl file, one sample a line"
            )

    def _scan(self) -> str:
        """Note where each line is; returns the sha256 of the whole."""
        digest = hashlib.sha256()
        at = 0
        with open(self._fd, "rb", closefd=False) as f:
            for number, line in enumerate(f):
                digest.update(line)
                if not line.strip():
                    raise _bad(self.path, number, "the line is blank", "remove it: every line is a sample")
                self.offsets.append((at, len(line)))
                at += len(line)
        return digest.hexdigest()

    def _same_as_scanned(self) -> None:
        """DatasetError when the file was written to, replaced or removed since the scan began."""
        try:
            now = (_Stamp.of(os.fstat(self._fd)), _Stamp.of(self.path.stat()))
            why = "" if now == (self._stamp, self._stamp) else "it was written to or replaced"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise DatasetError(
                f"the dataset changed while the run uses it: {self.path}",
                why,
                "put the file back as it was and resume, or begin a new run into another store",
            )

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, row: int) -> Row:
        """Parse line ``row``; raises DatasetError that names it."""
        at, size = self.offsets[row]
        try:
            line = os.pread(self._fd, size, at)
        except OSError as error:
            raise _bad(self.path, row, f"it cannot be read ({error.strerror})", "check its disk") from error
        self._same_as_scanned()  # after the read, so that a change during it is seen, too
        try:
            data = json.loads(line)
        except ValueError as error:
            raise _bad(self.path, row, f"it is not JSON ({error})", "mend or remove the line") from error
        return parse_row(data, row, self.path)


def parse_row(data: object, row: int, path: Path) -> Row:
    """One parsed line -> Row."""
    if not isinstance(data, dict):
        raise _bad(path, row, "it is not a JSON object", "see docs/formats.md for the four forms of a row")
    name = data.get("id")
    name = None if name is None else str(name)
    if "input_ids" in data:
        return _token_row(data, row, name, path)
    if "messages" in data:
        messages = data["messages"]
    elif "conversations" in data:
        messages = _sharegpt(data["conversations"], row, path)
    elif "prompt" in data and "completion" in data:
        messages = [
            {"role": "user", "content": data["prompt"]},
            {"role": "assistant", "content": data["completion"]},
        ]
    else:
        raise _bad(
            path,
            row,
            f"it has none of messages, conversations, prompt and completion, input_ids (keys: "
            f"{', '.join(sorted(map(str, data)))[:80]})",
            "see docs/formats.md for the four forms of a row",
        )
    return Row(row, name, _messages(messages, row, path))


def _token_row(data: Mapping[str, Any], row: int, name: str | None, path: Path) -> Row:
    ids, mask = data["input_ids"], data.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
        raise _bad(
            path, row, "input_ids is not a list of token ids (whole numbers, at least one)", "mend the line"
        )
    if mask is not None and (
        not isinstance(mask, list)
        or len(mask) != len(ids)
        or not all(type(m) is int and m in (0, 1) for m in mask)
    ):
        raise _bad(path, row, f"loss_mask is not {len(ids)} zeros and ones like input_ids", "mend the line")
    return Row(row, name, (), tuple(ids), None if mask is None else tuple(mask))


def _sharegpt(turns: object, row: int, path: Path) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise _bad(path, row, "conversations is not a list", "mend the line")
    messages = []
    for turn in turns:
        role = _SHAREGPT.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None:
            raise _bad(
                path, row, f"unknown speaker in {str(turn)[:60]!r}", f"known are {', '.join(_SHAREGPT)}"
            )
        messages.append({"role": role, "content": turn.get("value")})
    return messages


def _messages(messages: object, row: int, path: Path) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise _bad(path, row, "it has no messages", "mend or remove the line")
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise _bad(path, row, "a message lacks its role", "mend the line")
        content = m.get("content")
        if content is not None and not isinstance(content, str | list):
            raise _bad(path, row, "a message's content is not text", "mend the line")
    if not any(m.get("content") or m.get("tool_calls") for m in messages):
        raise _bad(path, row, "its messages have no content", "mend or remove the line")
    return tuple(messages)


def _bad(path: Path, row: int, why: str, next_step: str) -> DatasetError:
    return DatasetError(f"bad row {row} (line {row + 1}) of {path}", why, next_step)
