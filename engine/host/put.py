"""The verb ``put``: a small file of the console's, stored whole and verified."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, BinaryIO

from engine.host import args as arg
from engine.host.files import private_folder
from engine.host.rundir import state_root
from engine.wire.durable import atomic_bytes
from engine.wire.errors import Refused, RemoteError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PUT = 256 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


def put(args: Mapping[str, Any], stdin: BinaryIO) -> dict[str, Any]:
    """Store a small file of the console's on the host, whole and verified."""
    name, sha = arg.text(args, "path"), arg.text(args, "sha256")
    size = arg.integer(args, "size", 0)
    if not _FILE_NAME.match(name):
        raise SpecError(f"bad path {name!r}", "it is one name of A-Z a-z 0-9 . _ -")
    if size > MAX_PUT:
        raise SpecError(f"{name} is too large to be put", f"{size} bytes, at most {MAX_PUT}")
    path = private_folder(state_root() / "files") / name
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() == sha:
            return {"path": str(path), "state": "present"}
    except OSError:
        pass  # not there yet
    data = stdin.read(size)
    if len(data) != size:
        raise RemoteError(f"{name} arrived incomplete", f"{len(data)} of {size} bytes", "send it again")
    if hashlib.sha256(data).hexdigest() != sha:
        raise RemoteError(f"{name} arrived changed", "its sha256 differs", "send it again")
    try:
        atomic_bytes(path, data)
    except OSError as error:
        raise Refused(
            f"{name} cannot be stored on the host", str(error), "make room in the home folder"
        ) from error
    return {"path": str(path), "state": "written"}
