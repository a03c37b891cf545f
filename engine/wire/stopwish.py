"""The wish to stop, from the first moment of a process on: before its event loop and its handlers exist.

A SIGTERM that comes while heavy modules are imported would kill the process; here it is only noted.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_asked = False


def install() -> None:
    """Note SIGTERM and SIGINT from now on. A job's own handlers take over later and look at ``asked``."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note)


def _note(_number: int, _frame: FrameType | None) -> None:
    global _asked
    _asked = True


def asked() -> bool:
    """Whether a stop was asked for since ``install``."""
    return _asked
