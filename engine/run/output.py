"""The lock on a store for a run that no supervisor started (the supervisor holds it for those that it
starts)."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.host.files import atomic_json, read_json, try_lock
from engine.wire.errors import LockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def hold_output(store: Path, *, supervised: bool) -> Iterator[None]:
    """Hold ``<store>/.hsx.lock`` for the block; LockedError names the holder."""
    if supervised:
        yield
        return
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = try_lock(store / ".hsx.lock")
    if fd is None:
        owner = read_json(store / ".hsx.owner") or {}
        raise LockedError(
            f"the store {store} is in use",
            f"run {owner.get('run', '?')}, pid {owner.get('pid', '?')}",
            "wait for it or abort it",
        )
    try:
        atomic_json(store / ".hsx.owner", {"run": "-", "pid": os.getpid()})
        yield
    finally:
        os.close(fd)
