"""What the console needs of whatever is behind it: a host over SSH, the embedded host, or a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hsx_tui.model.messages import Message

Post = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an action will do, in the words of the dialog that asks for it.

    Attributes:
        title: in capitals, what is about to happen.
        host: where.
        facts: label and value pairs, read just now (process, samples done ...).
        steps: what will be done, in order.
        undo: how to take it back, or that it cannot be.
        command: the same without the console.
        accept: the label of the button that does it.
    """

    title: str
    host: str
    facts: tuple[tuple[str, str], ...] = ()
    steps: tuple[str, ...] = ()
    undo: str = ""
    command: str = ""
    accept: str = "Yes"


class Driver(Protocol):
    """The other side of the screen. All methods run in the application's event loop and must not block it.

    ``run`` may raise HsxError when it cannot go on; start, abort and resume raise HsxError, which is shown
    and stays on screen until it is dismissed.
    """

    async def run(self, post: Post) -> None:
        """Connect, follow, post messages; go on until cancelled. A lost link is a message, not the end."""

    async def start(self) -> None:
        """Begin the run. Returns when the host has accepted it."""

    async def abort(self) -> None:
        """Stop the run gracefully. Returns when the host has accepted it, not when the run has ended."""

    async def resume(self) -> None:
        """Begin the run's next attempt."""

    def plan(self, action: str) -> Plan:
        """What ``action`` ("run.start", "run.abort", "run.resume") would do now, without doing it."""

    def retry_now(self) -> None:
        """Do not wait for the next try to connect."""
