"""Becoming a daemon: a process that no end of an SSH session can reach."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import traceback
from typing import TYPE_CHECKING

from engine.wire.errors import HsxError, Refused, RemoteError, from_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def _cut_ties(log: Path, keep: set[int]) -> None:
    """Cut every tie to the SSH session: standard streams, inherited files, signals; become a subreaper."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for fd, source in ((0, null), (1, out), (2, out)):
        os.dup2(source, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of this very listing
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_detached(work: Callable[[int], None], what: str, log: Path, keep: set[int]) -> None:
    """Run ``work(report)`` in a daemon; return once it has closed the pipe ``report``.

    Args:
        work: may write an error (HsxError.to_json) to the pipe before it closes it.
        what: names the work in an error.
        log: where the daemon's stdout and stderr go.
        keep: file descriptors that stay open in the daemon, beside the pipe.

    Raises:
        The error that ``work`` reported; Refused for an OSError of it.
    """
    ready, report = os.pipe()
    if os.fork() == 0:
        _daemon(work, what, log, keep, report)
    os.close(report)
    os.wait()
    with os.fdopen(ready, "rb") as pipe:
        message = pipe.read()
    if message:
        raise _error(message)


def _daemon(work: Callable[[int], None], what: str, log: Path, keep: set[int], report: int) -> None:
    """The forked side; never returns."""
    status = 70
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        _cut_ties(log, keep | {report})
        work(report)
        status = 0
    except OSError as error:
        traceback.print_exc()
        failed = Refused(f"{what} cannot be started", str(error), "make room on that disk")
        os.write(report, json.dumps(failed.to_json()).encode())
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _error(message: bytes) -> HsxError:
    try:
        return from_json(json.loads(message))
    except ValueError:
        return RemoteError("the supervisor failed", repr(message[:200]))
