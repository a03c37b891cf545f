"""A private folder and its members, opened so that nobody else's file is ever read or written through.

The folder is 0700 and ours. A member is opened relative to the folder, without following a link, and is a
regular file of ours with one name and a bounded size: a symlink, a fifo, a hard link or a foreign owner is
refused.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NotPrivate(OSError):
    """The folder or the file is not ours alone; the message says what is wrong with it."""


def open_private_dir(path: Path, *, create: bool = False) -> int:
    """Open a folder (descriptor returned, the caller closes it). ``create``: make it 0700 when it is not
    there.

    Raises NotPrivate, FileNotFoundError, or another OSError of the system.
    """
    if create:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise NotPrivate(f"{path} is a link or no folder") from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise NotPrivate(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; "
            f"it must be ours ({os.geteuid()}) with mode 700"
        )
    return fd


def check_member_name(name: str) -> str:
    """Return ``name`` if it is one component of a path, else raise NotPrivate."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise NotPrivate(f"{name!r} is not the name of a file in the folder")
    return name


def open_member(dir_fd: int, name: str, max_bytes: int) -> int:
    """Open a member for reading (descriptor returned, the caller closes it).

    Raises FileNotFoundError when there is none, NotPrivate when it is not a private regular file of at most
    ``max_bytes``.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(check_member_name(name), flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPrivate(f"{name} cannot be opened safely: {error.strerror}") from error
    found = os.fstat(fd)
    wrong = [
        text
        for bad, text in (
            (not stat.S_ISREG(found.st_mode), "is not a regular file"),
            (found.st_uid != os.geteuid(), f"belongs to user {found.st_uid}"),
            (found.st_nlink != 1, f"has {found.st_nlink} names"),
            (found.st_size > max_bytes, f"has {found.st_size} bytes, more than {max_bytes}"),
        )
        if bad
    ]
    if wrong:
        os.close(fd)
        raise NotPrivate(f"{name} {', '.join(wrong)}")
    return fd


def create_member(dir_fd: int, name: str) -> int:
    """Create a member that is not there yet, 0600 (descriptor returned, the caller closes it)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(check_member_name(name), flags, 0o600, dir_fd=dir_fd)


def read_member(dir_fd: int, name: str, max_bytes: int) -> bytes:
    """The whole content of a member; raises as open_member, and NotPrivate when it changes while it is
    read."""
    fd = open_member(dir_fd, name, max_bytes)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        data = file.read(size + 1)
    if len(data) != size:
        raise NotPrivate(f"{name} changed while it was read")
    return data


def write_member(dir_fd: int, name: str, temporary: str, *data: bytes | memoryview) -> None:
    """Write a member of these parts in one step: under ``temporary`` first, then renamed. Nothing is left
    behind on an error."""
    fd = create_member(dir_fd, temporary)
    try:
        with os.fdopen(fd, "wb") as file:
            for part in data:
                file.write(part)
        os.rename(temporary, check_member_name(name), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise


def remove_member(dir_fd: int, name: str) -> bool:
    """Remove a member; False when there is none."""
    try:
        os.unlink(check_member_name(name), dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True
