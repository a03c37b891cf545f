"""Copies of rows that outlive the forward pass, taken on the forward's own stream and never waiting for it.

On a GPU the copy goes into pinned buffers of a pool (pinning memory anew for each slice would stop the
device), and an event says when it has arrived; on a CPU it is a plain copy, since a slice would keep the
whole batch alive. Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class BufferPool:
    """Flat byte buffers in powers of two, given out and taken back; ``pinned`` only where there is a GPU.

    A buffer comes back with the event of its last copy and is given out again only once that is over: nobody
    waits for it. What is kept is bounded by ``most_bytes``; beyond it, buffers are let go.
    """

    def __init__(self, pinned: bool, most_bytes: int = 2 << 30) -> None:
        self._pinned, self._most = pinned, most_bytes
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of at least ``nbytes``."""
        import torch

        size = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(size, [])
            for i, (buffer, event) in enumerate(free):
                if event is None or event.query():
                    del free[i]
                    self._kept -= size
                    return buffer
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def release(self, buffer: torch.Tensor, event: Any = None) -> None:
        """Take a buffer back; once ``event`` is over, its content may be overwritten."""
        size = buffer.numel()
        with self._lock:
            if self._kept + size <= self._most:  # else let go: torch's own allocator waits for the copy
                self._free.setdefault(size, []).append((buffer, event))
                self._kept += size


@dataclass
class HostRows:
    """Copies by name, on the host once ``wait`` has returned."""

    tensors: dict[str, torch.Tensor]
    nbytes: int
    buffers: tuple[torch.Tensor, ...] = ()
    event: Any = None

    def wait(self) -> None:
        """Wait until the copies have arrived (at once on a CPU)."""
        if self.event is not None:
            self.event.synchronize()


class HostCopier:
    """Copies slices to the host."""

    def __init__(self) -> None:
        self._pool: BufferPool | None = None

    def copy(self, slices: Mapping[str, torch.Tensor]) -> HostRows:
        """Begin to copy; never waits for the device."""
        nbytes = sum(t.numel() * t.element_size() for t in slices.values())
        if not any(t.is_cuda for t in slices.values()):
            return HostRows({name: t.detach().clone() for name, t in slices.items()}, nbytes)
        import torch

        if self._pool is None:
            self._pool = BufferPool(pinned=True)
        copies, buffers = {}, []
        for name, t in slices.items():
            buffer = self._pool.acquire(t.numel() * t.element_size())
            buffers.append(buffer)
            view = buffer[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            copies[name] = view.copy_(t.detach(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return HostRows(copies, nbytes, tuple(buffers), event)

    def release(self, rows: HostRows) -> None:
        """Give the buffers back once nobody reads ``rows`` any more."""
        if self._pool is not None:
            for buffer in rows.buffers:
                self._pool.release(buffer, rows.event)
