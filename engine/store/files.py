"""Durable writing into a store: a failed write is a StoreError that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.wire import durable
from engine.wire.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write ``path`` whole or not at all."""
    try:
        durable.atomic_bytes(path, data)
    except OSError as error:
        raise _failed(path, error) from error


def append_lines(path: Path, data: bytes) -> None:
    """Append whole lines; a failed append is cut off again."""
    try:
        durable.append_durably(path, data)
    except OSError as error:
        raise _failed(path, error) from error


def _failed(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write {path}",
        error.strerror or str(error),
        "free space on that file system; nothing that was done is lost, resume the run then",
    )
