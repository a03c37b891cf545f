"""The folder of dumps as the recorder sees it: how much room there is, and what nobody came to read.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dumpfile import Dump, write_dump
from .privatedir import open_private_dir, remove_member

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("hsx.capture")


@dataclass(frozen=True)
class Limits:
    """The bounds of a recorder.

    Attributes:
        memory_bytes: rows copied and not yet written.
        folder_bytes: what the folder may hold (it is often RAM: /dev/shm).
        free_floor_bytes: what stays free on its file system.
        queue_items: dumps that wait to be written.
        partial_ttl_s: a prefill that makes no progress for so long is given up.
        dump_ttl_s: a dump that nobody fetched for so long is removed.
        tick_s: how often room and ages are looked at when nothing happens.
    """

    memory_bytes: int = 2 << 30
    folder_bytes: int = 8 << 30
    free_floor_bytes: int = 128 << 20
    queue_items: int = 1024
    partial_ttl_s: float = 900.0
    dump_ttl_s: float = 6 * 3600.0
    tick_s: float = 1.0


class NoRoom(OSError):
    """A dump would break the bounds; the message says which."""


class DumpFolder:
    """Room and age of the dumps. ``no_room`` is asked by the forward thread and does sums only."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self._limits = limits
        self._used = 0
        self._free = 0
        self._measured = float("-inf")
        self._ours: OrderedDict[str, tuple[int, float]] = OrderedDict()  # file name -> inode, when written

    def measure(self) -> None:
        """Look at the folder and its file system. Raises OSError."""
        fd = open_private_dir(self.path, create=True)
        try:
            with os.scandir(fd) as entries:
                self._used = sum(_size(entry) for entry in entries)
            system = os.statvfs(fd)
        finally:
            os.close(fd)
        self._free = system.f_bavail * system.f_frsize

    def no_room(self, nbytes: int) -> str:
        """Why ``nbytes`` more find no room, as of the last look; "" when they do."""
        if self._used + nbytes > self._limits.folder_bytes:
            return (
                f"no room: the dump folder holds {self._used} bytes of at most {self._limits.folder_bytes}; "
                "dumps are not fetched fast enough"
            )
        if self._free - nbytes < self._limits.free_floor_bytes:
            return f"no room: {self._free} bytes are free, {self._limits.free_floor_bytes} must stay so"
        return ""

    def write(self, dump: Dump, now: float) -> None:
        """Write a dump if there is room. Raises NoRoom, NotPrivate or another OSError; nothing is left
        behind."""
        nbytes = sum(t.numel() * t.element_size() for t in dump.tensors().values())
        reason = self.no_room(nbytes)
        if reason:
            self.measure()
            reason = self.no_room(nbytes)
        if reason:
            raise NoRoom(reason)
        written = write_dump(self.path, dump)
        self._used += written
        self._free -= written
        name = f"{dump.meta.rid}.safetensors"
        self._ours.pop(name, None)
        self._ours[name] = ((self.path / name).stat(follow_symlinks=False).st_ino, now)

    def tick(self, now: float) -> None:
        """Look again (at most twice a second), and remove our own dumps that nobody fetched. Raises
        OSError."""
        if now - self._measured < 0.5:
            return
        self._measured = now
        self._sweep(now)
        self.measure()

    def _sweep(self, now: float) -> None:
        while self._ours:
            name, (inode, written) = next(iter(self._ours.items()))
            if now - written < self._limits.dump_ttl_s:
                return
            del self._ours[name]
            fd = open_private_dir(self.path)
            try:
                if os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino == inode and remove_member(
                    fd, name
                ):
                    log.warning("removed %s: nobody fetched it for %.0f s", name, self._limits.dump_ttl_s)
            except FileNotFoundError:
                continue  # fetched, as it should be
            finally:
                os.close(fd)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # fetched in this moment
        return 0
