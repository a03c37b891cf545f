"""The faults of the matrix: what is done to a real dump or a real reply on its way from the server to the
collector, and the causes that are right for it.

Two causes are right only where two names are equally true; ``why`` then says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from engine.capture.pythonpath.hsx_capture.dumpfile import Dump
    from engine.targets.lone import LoneForward
    from engine.wire.causes import Cause

STATES = ("aux", "last", "pre")


@dataclass(frozen=True, eq=False)
class Scene:
    """A request whose real answer and real dump are there, before the collector gets the answer.

    Attributes:
        data: the dump's bytes as the recorder wrote them.
        reply: the server's reply; a fault may change it.
        siblings: real dumps of requests of this run that are in flight at the same time, all of other ids.
        elders: real dumps of requests of this run that were answered and judged before; of 130 tokens.
        strangers: real dumps of another client's requests; of 130 tokens.
    """

    rid: str
    ids: tuple[int, ...]
    dump: Dump
    data: bytes
    reply: dict[str, Any]
    folder: Path
    rng: random.Random
    siblings: Sequence[Dump] = ()
    elders: Sequence[Dump] = ()
    strangers: Sequence[Dump] = ()
    lone: LoneForward | None = None

    @property
    def path(self) -> Path:
        """Where the collector will look."""
        return self.folder / f"{self.rid}.safetensors"

    @property
    def meta(self) -> dict[str, Any]:
        """meta_info of the reply."""
        info: dict[str, Any] = self.reply["meta_info"]
        return info

    @property
    def n(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def sibling(self) -> Dump:
        """One that has the rows of a whole swap, by chance."""
        return self.rng.choice([s for s in self.siblings if len(s.input_ids) >= self.n])

    def put(self, data: bytes) -> None:
        """Replace the dump's file in one step."""
        temporary = self.folder / f".fault-{self.rid}"
        temporary.write_bytes(data)
        temporary.chmod(0o600)
        os.replace(temporary, self.path)

    def write(self, dump: Dump) -> None:
        """Replace the dump by another (under the name of this request, whatever it says itself)."""
        tensors = {name: t.contiguous() for name, t in dump.tensors().items()}
        self.put(save(tensors, metadata=dump.meta.to_strings()))

    def rows(self, make: Callable[[Tensor, str], Tensor], **meta: Any) -> None:
        """Change all states alike, as a wrong cut of the packed rows does. ``make``: (own tensor, name)."""
        new: dict[str, Any] = {name: make(getattr(self.dump, name), name) for name in STATES}
        self.write(replace(self.dump, meta=replace(self.dump.meta, **meta), **new))

    def says(self, **meta: Any) -> None:
        """Change what the dump says of itself."""
        self.write(replace(self.dump, meta=replace(self.dump.meta, **meta)))


HTTP, RETAKE, WIN_RATE, SLOW, EARLY = "http", "retake", "win rate", "slow", "early"
FOUND_BY = {
    HTTP: "one sample",
    RETAKE: "the retake, not one sample",
    WIN_RATE: "one sample, win rate only",
    SLOW: "one sample",
    EARLY: "before anything is asked for",
}


@dataclass(frozen=True)
class Fault:
    """One kind of damage.

    Attributes:
        causes: the right ones.
        peers: the row of the peers' matrix that it is, or "".
        least: tokens that a sample needs for it.
        equal: the requests in flight beside it must be as long.
        shared: they must begin like it.
        run: which run shows it (FOUND_BY).
        refusal: what refuses it where no dump is ever asked for, instead of a cause.
    """

    name: str
    causes: frozenset[Cause]
    inject: Callable[[Scene], None]
    peers: str = ""
    least: int = 1
    equal: bool = False
    shared: bool = False
    run: str = HTTP
    why: str = ""
    refusal: str = ""


PEER_COLUMNS = (
    "SpecForge eagle3", "SpecForge dflash", "speculators", "speculators --validate-outputs", "ModelOpt"
)  # fmt: skip
PEERS: dict[str, tuple[str, str, str, str, str]] = {
    "rows missing": ("A, shifted", "R", "A", "R, file stays", "A"),
    "ids of another request": ("A", "A*", "U", "R", "A"),
    "states reversed or swapped": ("A*", "A*", "A*", "A", "A*"),
    "NaN": ("A", "A", "A", "R, file stays", "A"),
    "Inf": ("A", "A*", "A*", "R*", "A*"),
    "all-zero states": ("A", "A*", "A", "A", "A"),
    "wrong dtype": ("A", "A*", "A, cast", "A", "A"),
    "all-zero loss mask": ("A", "R", "A", "A", "A"),
    "loss mask shorter": ("A", "R*", "–", "–", "A"),
    "2 aux layers instead of 3": ("A", "A*", "A", "A", "A"),
    "missing key": ("R", "R*", "R*", "R*", "R"),
    "truncated file": ("R at read, counted as done*", "R*", "R", "R", "R"),
}
"""A: accepted silently, R: rejected, U: dropped with a warning, *: by reading their code, not executed. Of
SpecForge 0.2.0, speculators 0.9.0 and nvidia-modelopt 0.47.0 as of September 2026."""
