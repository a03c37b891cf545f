"""The verbs ``store_files`` and ``fetch``: what a store has, and one of its files with the hash of what was
sent.

A file is opened below the store's folder without following a link, so no name leads elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

from engine.host import args as arg
from engine.wire.errors import Refused
from engine.wire.storefiles import FOLDERS, check_name, is_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_LISTED = 20_000
"""Files in one answer; the caller goes on after the last of them."""
BLOCK = 1 << 20

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _open_store(path: str) -> int:
    """A descriptor of the store's folder. Raises Refused for what is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(
            f"there is no store at {path}", error.strerror or "", "look at the run's output"
        ) from error
    try:
        os.stat("manifest.json", dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        os.close(fd)
        raise Refused(
            f"{path} is no store", "it has no manifest.json", "name the folder of a run's output"
        ) from error
    return fd


def _entries(store: int, folder: str) -> Iterator[dict[str, Any]]:
    """The regular files of a store's folder ("" for its own), as the answer lists them."""
    try:
        fd = os.open(folder or ".", _FOLDER, dir_fd=store)
    except FileNotFoundError:
        return
    try:
        for entry in os.scandir(fd):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not is_name(name):
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield {"name": name, "size": status.st_size, "inode": status.st_ino}
    finally:
        os.close(fd)


def store_files(args: Mapping[str, Any], _: BinaryIO) -> dict[str, Any]:
    """``{"files": [{"name", "size", "inode"}], "more": bool}``, by name, those after ``after``.

    Raises Refused when ``store`` is none.
    """
    path, after = arg.path(args, "store"), args.get("after") or ""
    store = _open_store(path)
    try:
        files = [entry for folder in ("", *FOLDERS) for entry in _entries(store, folder)]
    finally:
        os.close(store)
    left = sorted((f for f in files if f["name"] > str(after)), key=lambda f: str(f["name"]))
    return {"files": left[:MAX_LISTED], "more": len(left) > MAX_LISTED}


def _open_file(store: int, name: str) -> int:
    folder, _, last = name.rpartition("/")
    if not folder:
        return os.open(last, _FILE, dir_fd=store)
    within = os.open(folder, _FOLDER, dir_fd=store)
    try:
        return os.open(last, _FILE, dir_fd=within)
    finally:
        os.close(within)


def serve_fetch(args: Mapping[str, Any], _: int, out: BinaryIO) -> None:
    """Send bytes ``offset`` to ``size`` of the file ``name``: a JSON line ``{"ok": true, "bytes": n}``, the
    bytes, a JSON line ``{"ok": true, "sha256"}`` over all ``size`` bytes, those before ``offset`` too.

    Ends with status 1 when the file shrinks meanwhile. Raises SpecError (a name that no store has), Refused
    (no store, no such file, shorter than ``size``).
    """
    name, size = check_name(args.get("name")), arg.integer(args, "size", 0)
    offset = arg.integer(args, "offset", 0, 0)
    store = _open_store(arg.path(args, "store"))
    try:
        fd = _open_file(store, name)
    except OSError as error:
        raise Refused(
            f"{name} cannot be read", error.strerror or "", "list the store's files again"
        ) from error
    finally:
        os.close(store)
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not offset <= size <= status.st_size:
            raise Refused(
                f"{name} is not as it was", f"it has {status.st_size} bytes", "list the store's files again"
            )
        _send(file, name, offset, size, out)


def _send(file: Any, name: str, offset: int, size: int, out: BinaryIO) -> None:
    digest = hashlib.sha256()
    at = 0
    out.write(b'{"ok": true, "bytes": %d}\n' % (size - offset))
    while at < size:
        # What the console has already is hashed only, so that its part and ours are proved to be one file.
        until = offset if at < offset else size
        block = file.read(min(BLOCK, until - at))
        if not block:
            # An error as an answer would be taken for the file's bytes: the exit status tells it.
            sys.stderr.write(f"{name} shrank while it was read, at {at} of {size} bytes\n")
            raise SystemExit(1)
        digest.update(block)
        if at >= offset:
            out.write(block)
        at += len(block)
    out.write(json.dumps({"ok": True, "sha256": digest.hexdigest()}).encode() + b"\n")
    out.flush()
