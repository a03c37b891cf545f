"""Files of the host: JSON records, locks, private folders. Durable writing itself is engine.wire.durable."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from engine.wire.durable import atomic_bytes
from engine.wire.errors import Refused

if TYPE_CHECKING:
    from pathlib import Path


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
