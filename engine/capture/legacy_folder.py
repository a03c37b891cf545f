"""The folder of counter-numbered dumps: what lies in it, what changed since, what is whole, what may go.

A number is used again when the server's counter restarts, and the files of the earlier life lie there until
they are overwritten one by one. So a dump is told by the signature of each file, never by its name alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.capture.legacy import (
    DONE,
    META,
    LegacyDump,
    LegacyMeta,
    LegacyUnreadable,
    open_dir,
    read_legacy,
    read_meta,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"req_(0|[1-9]\d{0,11})\Z")

KEEP_S = 600.0
KEEP_BYTES = 256 << 20
"""Dumps of others are removed when they are older, or when they take more: /dev/shm is memory."""

_SETTLED_NS = 2_000_000_000
"""A dump whose newest file is younger may still be in the middle of being written."""

Signature = tuple[int, int, int]
"""(inode, size, mtime in ns) of a file."""


@dataclass(frozen=True)
class Seen:
    """A dump folder at one moment. ``key``: changes when a file comes, goes, or when its meta is
    rewritten."""

    number: int
    files: Mapping[str, Signature]
    key: tuple[Signature | None, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """As the folder is called."""
        return f"req_{self.number}"

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self.files.values())

    @property
    def newest_ns(self) -> int:
        """When its last file was written."""
        return max((mtime for _, _, mtime in self.files.values()), default=0)


Scan = dict[int, Seen]


class LegacyFolder:
    """``<path>/req_<n>/``. Raises LegacyUnreadable where the folder is not safe, FileNotFoundError where it
    is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: Scan = {}
        self._metas: dict[int, tuple[Seen, LegacyMeta]] = {}
        self._held = -1
        self.writable = True

    def _open(self) -> tuple[int, set[int]]:
        fd = open_dir(str(self.path), ())
        return fd, {os.geteuid(), os.fstat(fd).st_uid}  # whose folder it is, that is the server

    def hold(self) -> None:
        """Claim the folder for this reader: two of them would take each other's dumps for strangers'.

        Raises LegacyUnreadable when another one has it, and what speaks against the folder.
        """
        fd, _ = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise LegacyUnreadable(f"another run reads {self.path}: wait for it") from error
        self.release()
        self._held = fd

    def release(self) -> None:
        """Give the claim back."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def scan(self) -> Scan:
        """All dump folders, by number."""
        root, owners = self._open()
        try:
            found: Scan = {}
            with os.scandir(root) as entries:
                for entry in entries:
                    name = _NAME.match(entry.name)
                    if name:
                        seen = self._look(root, int(name[1]), owners)
                        if seen is not None:
                            found[seen.number] = seen
        finally:
            os.close(root)
        self._known = found
        self._metas = {n: m for n, m in self._metas.items() if n in found}
        return found

    def _look(self, root: int, number: int, owners: set[int]) -> Seen | None:
        name = f"req_{number}"
        key = tuple(_signature(root, path) for path in (name, f"{name}/{META}", f"{name}/{DONE}"))
        known = self._known.get(number)
        if known is not None and known.key == key and time.time_ns() - known.newest_ns > _SETTLED_NS:
            return known  # a look at three files instead of all: there may be thousands of folders
        try:
            fd = open_dir(name, owners, root)
        except (FileNotFoundError, LegacyUnreadable):
            return None  # removed meanwhile, or a link: no dump
        try:
            files = {n: s for n in os.listdir(fd) if (s := _signature(fd, n)) is not None}
        finally:
            os.close(fd)
        return Seen(number, files, key)

    def meta(self, seen: Seen) -> LegacyMeta:
        """What a dump says about itself. Raises LegacyUnreadable."""
        known = self._metas.get(seen.number)
        if known is not None and known[0] == seen:
            return known[1]
        root, owners = self._open()
        try:
            fd = _member(root, seen, owners)
            try:
                meta = read_meta(fd, seen.files, owners)
            finally:
                os.close(fd)
        finally:
            os.close(root)
        self._metas[seen.number] = (seen, meta)
        return meta

    def read(self, seen: Seen) -> LegacyDump:
        """The whole dump, unchanged since ``seen`` until the end. Raises LegacyUnreadable."""
        root, owners = self._open()
        try:
            fd = _member(root, seen, owners)
            try:
                dump = read_legacy(fd, seen.files, owners)
                now = {n: s for n in os.listdir(fd) if (s := _signature(fd, n)) is not None}
            finally:
                os.close(fd)
        finally:
            os.close(root)
        if now != seen.files:
            raise LegacyUnreadable(f"{seen.name} changed while it was read")
        return dump

    def remove(self, seen: Seen) -> bool:
        """Remove a dump, if it is still the one that was seen; False when it could not be."""
        if not self.writable:
            return False
        root, owners = self._open()
        try:
            fd = open_dir(seen.name, owners, root)
            try:
                if {n: s for n in os.listdir(fd) if (s := _signature(fd, n)) is not None} != seen.files:
                    return False
                for name in seen.files:
                    os.unlink(name, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(seen.name, dir_fd=root)
        except PermissionError:
            self.writable = False  # the server's alone: whoever runs it must clean up
            return False
        except (OSError, LegacyUnreadable):
            return False  # gone already, or being written again
        finally:
            os.close(root)
        return True

    def prune(self, scan: Scan, now_s: float | None = None) -> int:
        """Remove what is old, and the oldest beyond the byte budget; returns how many dumps went."""
        now_ns = int((time.time() if now_s is None else now_s) * 1e9)
        left, gone = sum(s.bytes for s in scan.values()), 0
        for seen in sorted(scan.values(), key=lambda s: s.newest_ns):
            if left <= KEEP_BYTES and now_ns - seen.newest_ns < KEEP_S * 1e9:
                break
            gone += self.remove(seen)
            left -= seen.bytes
        return gone


def changed(before: Scan, now: Scan) -> list[Seen]:
    """Dumps that are new since ``before``, by number: the folder was not there, or none of its files is what
    it was (a leftover that is half overwritten is not new yet)."""
    out = []
    for number, seen in sorted(now.items()):
        old = before.get(number)
        if old is None or (old.files and not set(old.files.items()) & set(seen.files.items())):
            out.append(seen)
    return out


def touched(before: Scan, now: Scan) -> list[int]:
    """Numbers into which something was written since ``before``, whole or not: the server has given them
    away."""
    none: Mapping[str, Signature] = {}
    return [
        number
        for number, seen in now.items()
        if set(seen.files.items()) - set((before[number].files if number in before else none).items())
    ]


def _member(root: int, seen: Seen, owners: set[int]) -> int:
    try:
        return open_dir(seen.name, owners, root)
    except FileNotFoundError as error:
        raise LegacyUnreadable(f"{seen.name} is gone") from error


def _signature(dir_fd: int, name: str) -> Signature | None:
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return None
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return found.st_ino, size, found.st_mtime_ns
