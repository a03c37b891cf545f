"""The one Protocol of sources: a source is given asks and yields, for each, states or what went wrong.

`run/extract.py` knows no server and no model: a server over HTTP and a model in this process are both a
Source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from engine.capture.states import Finding, States
    from engine.dataset.tokens import Sample


@dataclass(frozen=True)
class Ask:
    """One attempt at one sample. ``alone``: nothing else of ours may be in flight beside it."""

    sample: Sample
    rid: str
    attempt: int
    alone: bool = False


@dataclass(frozen=True)
class Taken:
    """The answer to an ask: ``states``, or a ``finding``, or ``lost`` (it is unknown whether anything was
    done).

    ``passed_over``: dumps that were refused on the way to the answer, each with its cause.
    ``final``: asking again would give the same finding. ``asked_at``: when it was sent (monotonic), or 0.
    """

    ask: Ask
    states: States | None = None
    finding: Finding | None = None
    lost: str = ""
    request_s: float = 0.0
    flying: tuple[Sample, ...] = ()
    passed_over: tuple[Finding, ...] = ()
    final: bool = False
    asked_at: float = 0.0


@dataclass(frozen=True)
class SourceFacts:
    """What a source says of itself.

    Attributes:
        layers: what it was asked to capture, as outputs of 0-based layers.
        flags: settings that are kept in attempts.jsonl. problems: what speaks against the run.
        infos: what each server says of itself (/server_info), by its address: the preflight judges it.
    """

    model: str
    dtype: str
    version: str
    layers: tuple[int, ...] | None
    context_length: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Source(Protocol):
    """Where hidden states come from."""

    attribution: str
    """rid, token_ids or count: known at the latest when ``describe`` has answered."""

    @property
    def trouble(self) -> str:
        """Why the source cannot be asked, as far as it knows; "" while it can."""
        ...

    async def describe(self) -> SourceFacts:
        """Read the settings back. Raises ConnectionFailed when the source does not answer."""
        ...

    async def ready(self) -> bool:
        """Whether it would take an ask now."""
        ...

    async def clear(self, run: str) -> int:
        """Remove what ``run`` left behind; returns how many dumps there were."""
        ...

    def take(self, asks: AsyncIterator[Ask]) -> AsyncGenerator[Taken, None]:
        """Answer every ask, in any order, as many at once as the source thinks good."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...
