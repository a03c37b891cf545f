"""Durable writing: temporary name, fsync, rename, fsync of the folder. Nothing half-written is left
behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.wire.errors import HsxError, StoreError

if TYPE_CHECKING:
    from pathlib import Path


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` durably; on any error (a full disk) no file and no leftover. StoreError."""
    tmp = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, path)
        sync_folder(path.parent)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise store_write_error(path, error) from error


def append_durably(path: Path, data: bytes) -> None:
    """Append whole lines and fsync; a failed append is cut off again. StoreError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd).st_size
        try:
            write_all(fd, data)
            os.fsync(fd)
        except OSError as error:
            os.ftruncate(fd, before)
            raise store_write_error(path, error) from error
        if before == 0:
            sync_folder(path.parent)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """os.write until everything is written (a short write is how a full disk begins)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def store_write_error(path: Path, error: OSError) -> HsxError:
    """The user's form of a failed write."""
    return StoreError(
        f"cannot write {path}",
        error.strerror or str(error),
        "free space on that file system; nothing that was done is lost, resume the run then",
    )
