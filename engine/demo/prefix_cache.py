"""The prefix cache: keys and values of finished requests, reused where a prompt begins with the same tokens.

A capture wants it off, or a different ``extra_key`` for each request: rows that come from here are not
computed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.demo.requests import Request


class PrefixCache:
    """Least recently used sequences, at most ``capacity`` tokens in all. Used by the scheduler thread
    only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[str | None, tuple[int, ...]], torch.Tensor] = OrderedDict()
        self.tokens = 0

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self.tokens = 0

    def fill(self, request: Request) -> int:
        """Copy the longest known prefix into the request's K/V buffer.

        Returns its tokens; at least one token of the prompt is always left to be computed.
        """
        best, found = 0, None
        for key in self._held:
            if key[0] != request.extra_key:
                continue
            n = min(_common(key[1], request.prompt), len(request.prompt) - 1)
            if n > best:
                best, found = n, key
        if found is not None:
            assert request.kv is not None
            request.kv[:, :, :, :best] = self._held[found][:, :, :, :best]
            self._held.move_to_end(found)
        return best

    def keep(self, request: Request) -> None:
        """Keep what a finished request computed."""
        ids = tuple((request.prompt + request.output)[: request.computed])
        key = (request.extra_key, ids)
        if request.kv is None or not ids or key in self._held or len(ids) > self._capacity:
            return
        self._held[key] = request.kv[:, :, :, : len(ids)].clone()
        self.tokens += len(ids)
        while self.tokens > self._capacity:
            (_, old), _ = self._held.popitem(last=False)
            self.tokens -= len(old)


def _common(a: tuple[int, ...], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
