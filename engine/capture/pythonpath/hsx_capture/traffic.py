"""Who used the server beside us: counted on the scheduler thread, told by the beacon.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .recorder import PREFIX

HEALTH_PREFIX = "HEALTH_CHECK_"
COMPLETE_PREFIX = "hsxc-"
"""Requests of ours that want the answer, not the states."""


@dataclass
class Traffic:
    """Since the server began.

    Attributes:
        ours, foreign, health, complete: requests whose prefill began, by rid.
        shared_forwards: requests of ours that shared a forward with a foreign one.
        chunks: prefill chunks of ours. largest_batch: the most requests in one forward that prefilled.
    """

    ours: int = 0
    foreign: int = 0
    health: int = 0
    complete: int = 0
    shared_forwards: int = 0
    chunks: int = 0
    largest_batch: int = 0

    def note(self, batch: Any) -> None:
        """Count a ScheduleBatch that prefills something."""
        self.largest_batch = max(self.largest_batch, len(batch.reqs))
        decoding = {id(r) for r in (batch.decoding_reqs or ())}
        foreign = False
        for request in batch.reqs:
            kind = _kind(request.rid)
            foreign |= kind == "foreign"
            if id(request) in decoding:
                continue
            self.chunks += kind == "ours"
            if not getattr(request, "_hsx_counted", False):
                request._hsx_counted = True
                setattr(self, kind, getattr(self, kind) + 1)
        if not foreign:
            return
        for request in batch.reqs:
            ours = _kind(request.rid) == "ours" and id(request) not in decoding
            if ours and not getattr(request, "_hsx_shared", False):
                request._hsx_shared = True
                self.shared_forwards += 1

    def to_json(self) -> dict[str, int]:
        """For the beacon."""
        return asdict(self)


def _kind(rid: str) -> str:
    for prefix, kind in ((PREFIX, "ours"), (HEALTH_PREFIX, "health"), (COMPLETE_PREFIX, "complete")):
        if rid.startswith(prefix):
            return kind
    return "foreign"
