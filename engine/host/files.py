"""Files that survive crashes, full disks and planted symlinks: atomic writes, locks, private folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
from typing import TYPE_CHECKING, Any

from engine.wire.errors import Refused

if TYPE_CHECKING:
    from pathlib import Path


def fsync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``: a short write is how a full disk announces itself. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        view = view[written:]


def atomic_bytes(path: Path, data: bytes) -> None:
    """Write ``path`` (0600) whole or not at all, durably. Raises OSError; leaves nothing behind then."""
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
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


def atomic_json(path: Path, obj: object) -> None:
    """Write ``obj`` as JSON, as ``atomic_bytes`` does."""
    atomic_bytes(path, json.dumps(obj, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None if there is none (absent, unreadable, or something else)."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def try_lock(path: Path) -> int | None:
    """Lock ``path`` exclusively: a file descriptor that holds the lock while any copy of it is open, or None
    if somebody else holds it. It is not inherited by exec unless asked. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def private_folder(path: Path) -> Path:
    """Make ``path`` (0700) or accept it if it is a real folder that only we can write in; else Refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise Refused(
            f"the folder {path} cannot be made", error.strerror or "", "make room or correct its owner"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Refused(f"{path} is not a private folder of ours", "others could write in it", "remove it")
    return path
