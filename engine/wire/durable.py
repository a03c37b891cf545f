"""Durable writing, for both sides: whole or not at all, and there after a power failure. Raises OSError.

Nothing half-written is left behind, whatever goes wrong; a short write is how a full disk announces itself.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def fsync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        view = view[written:]


def atomic_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write ``path`` (0600): a temporary name, fsync, rename, fsync of the folder."""
    tmp = path.with_name(f".tmp-{secrets.token_hex(6)}-{path.name}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Append whole lines and fsync; a failed append is cut off again."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd).st_size
        try:
            write_all(fd, data)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, before)
            raise
        if before == 0:
            fsync_folder(path.parent)
    finally:
        os.close(fd)
