"""The folder on this machine that a store is pulled into: its record, its parts, and what is whole in it.

It is ours alone (0700), nothing is written through a link, and a file has its name only when all of its bytes
are there and their hash is the host's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from engine.wire.durable import atomic_bytes, fsync_folder
from engine.wire.errors import Refused
from engine.wire.storefiles import FOLDERS, check_name, is_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORD = ".hsx-pull.json"
BLOCK = 1 << 20


class PullFolder:
    """A destination. Raises Refused for a folder that is not empty and was not made by a pull of the same
    store, or that another pull is writing."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise Refused(f"{path} is not ours alone", "others could write in it", "name another folder")
            self._lock = os.open(path / ".hsx-pull.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Refused(f"{path} cannot be written", error.strerror or "", "name another folder") from error
        try:
            self._hold()
            self._files: dict[str, dict[str, Any]] = self._record(source)
            for folder in FOLDERS:
                (path / folder).mkdir(mode=0o700, exist_ok=True)
                if (path / folder).is_symlink():
                    raise Refused(f"{path / folder} is a link", "", "name another folder")
            self._source = source
            self._save()
        except BaseException:
            os.close(self._lock)
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"another pull writes {self.path}", "", "wait for its end") from error

    def _record(self, source: str) -> dict[str, dict[str, Any]]:
        record = self.path / RECORD
        if not record.exists():
            if any(entry.name != ".hsx-pull.lock" for entry in self.path.iterdir()):
                raise Refused(
                    f"{self.path} is not empty", "it was not made by a pull", "name a new or empty folder"
                )
            return {}
        try:
            data = json.loads(record.read_bytes())
            files = {k: v for k, v in data["files"].items() if is_name(k) and isinstance(v["sha256"], str)}
            found = data["source"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{record} is unreadable", str(error), "name another folder") from error
        if found != source:
            raise Refused(f"{self.path} holds another store", f"{found}", "name another folder")
        return files

    def _save(self) -> None:
        data = {"format_version": 1, "source": self._source, "files": self._files}
        atomic_bytes(self.path / RECORD, json.dumps(data).encode() + b"\n")

    def close(self) -> None:
        """Let others pull into it."""
        os.close(self._lock)

    def place(self, name: str) -> Path:
        """Where a file of the store lies here."""
        return self.path / check_name(name)

    def part(self, name: str) -> Path:
        """Where its bytes lie until all are there."""
        return self.path / f".part-{check_name(name).replace('/', '-')}"

    def whole(self, name: str, size: int) -> bool:
        """Whether it is here already, by its record and its size."""
        known = self._files.get(name)
        try:
            return known is not None and known["size"] == size == self.place(name).lstat().st_size
        except OSError:
            return False

    def sha256(self, name: str) -> str | None:
        """The hash that a whole file was recorded with."""
        known = self._files.get(name)
        return None if known is None else str(known["sha256"])

    def open_part(self, name: str, size: int) -> tuple[int, int, hashlib._Hash]:
        """(descriptor to append to, bytes that are there already, their running hash)."""
        digest = hashlib.sha256()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.part(name), flags, 0o600)
        try:
            have = os.fstat(fd).st_size
            if have > size:
                os.ftruncate(fd, 0)
                have = 0
            for block in _blocks(fd, have):
                digest.update(block)
            os.lseek(fd, have, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd, have, digest

    def drop_part(self, name: str) -> None:
        """Forget bytes that proved wrong."""
        with contextlib.suppress(FileNotFoundError):
            self.part(name).unlink()

    def finish(self, name: str, size: int, sha256: str) -> None:
        """All bytes are in the part and their hash is right: give the file its name."""
        place = self.place(name)
        self.part(name).replace(place)
        fsync_folder(place.parent)
        self._files[name] = {"size": size, "sha256": sha256}
        self._save()


def _blocks(fd: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size and (block := os.pread(fd, min(BLOCK, size - at), at)):
        yield block
        at += len(block)
