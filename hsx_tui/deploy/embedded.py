"""The embedded host as the console sees it: start it if it does not run, attach if it does, end it.

It outlives the console. Its records lie in the work directory; a lock there keeps two consoles from starting
two.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from engine.wire.errors import DeadlineExceeded, HsxError, Refused, from_json
from engine.wire.procid import ProcessId
from hsx_tui.deploy.address import HostAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

USER = "demo"
START_DEADLINE_S = 30
LOCK_DEADLINE_S = 45


async def ensure_host(workdir: Path) -> HostAddress:
    """The address of the embedded host of ``workdir``; starts it when it does not run.

    Raises Refused (the folder is not ours, not writable, or full), DeadlineExceeded, HsxError (it cannot
    start).
    """
    workdir = _private_workdir(workdir)
    async with _locked(workdir):
        record = read_host(workdir)
        if record is None:
            await asyncio.to_thread(_start, workdir)
            record = read_host(workdir)
    if record is None:
        raise HsxError("the embedded host ended at once", f"see {workdir / 'host.log'}")
    return host_address(workdir, record["port"])


async def stop_host(workdir: Path, deadline_s: float = 10) -> bool:
    """End the embedded host of ``workdir`` and its connections; False if it did not run.

    Detached runs on it go on, as on any host. Raises DeadlineExceeded.
    """
    if not _exists(workdir):
        return False
    workdir = _private_workdir(workdir)
    async with _locked(workdir):
        record = read_host(workdir)
        process = ProcessId.from_json(record)
        if process is None:
            return False
        process.send(signal.SIGTERM)
        patience, end = time.monotonic() + deadline_s / 2, time.monotonic() + deadline_s
        while process.alive():
            if time.monotonic() > patience:
                process.send(signal.SIGKILL)
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    "the embedded host did not end", f"pid {process.pid}", "look at that process"
                )
            await asyncio.sleep(0.02)
        (workdir / "host.json").unlink(missing_ok=True)
    return True


def read_host(workdir: Path) -> dict[str, Any] | None:
    """The record of the running embedded host: pid, start, boot, port, at; None if it does not run."""
    try:
        record = json.loads((workdir / "host.json").read_bytes())
    except (OSError, ValueError):
        return None
    process = ProcessId.from_json(record)
    if process is None or not isinstance(record.get("port"), int) or not process.alive():
        return None
    assert isinstance(record, dict)
    return record


def host_address(workdir: Path, port: int) -> HostAddress:
    """How to reach the embedded host of ``workdir`` on ``port``."""
    keys = workdir / "keys"
    return HostAddress("127.0.0.1", port, USER, keys / "client_ed25519", keys / "known_hosts")


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _private_workdir(path: Path) -> Path:
    """The absolute path of the work directory, made if absent; Refused unless only we can write in it."""
    workdir = path.absolute()
    other = "choose another folder with --workdir"
    try:
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = workdir.stat()
    except OSError as error:
        raise Refused(f"the work directory {workdir} cannot be made", str(error.strerror), other) from error
    if status.st_uid != os.getuid():
        raise Refused(
            f"the work directory {workdir} is not ours", f"it belongs to user {status.st_uid}", other
        )
    if status.st_mode & 0o022:
        raise Refused(f"the work directory {workdir} is not private", "others may write in it", other)
    return workdir


@asynccontextmanager
async def _locked(workdir: Path) -> AsyncIterator[None]:
    try:
        fd = os.open(workdir / ".host.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Refused(
            f"the work directory {workdir} cannot be written",
            str(error.strerror),
            "choose another with --workdir",
        ) from error
    try:
        end = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"another console holds {workdir / '.host.lock'}", "", "end the other console"
                    ) from error
                await asyncio.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _start(workdir: Path) -> None:
    """Run the host's module: it returns once the host listens, detached; its stdout carries an error or
    nothing."""
    argv = [sys.executable, "-P", "-m", "hsx_tui.deploy.embedded_host", "--detach", str(workdir)]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            f"the embedded host did not start within {START_DEADLINE_S} s",
            f"see {workdir / 'host.log'}",
            "try again",
        ) from error
    if done.returncode == 0:
        return
    try:
        raise from_json(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:] or ["no message"]
        raise HsxError("the embedded host cannot start", last[0], f"see {workdir / 'host.log'}") from None
