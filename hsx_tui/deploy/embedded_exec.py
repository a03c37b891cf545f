"""What the embedded host does with one exec request: a real /bin/sh in a session of its own, and the pumps
around it.

asyncssh's own ``redirect`` breaks under back-pressure, so the pumps are here. As with sshd, a lost connection
closes the pipes and kills nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

if TYPE_CHECKING:
    from collections.abc import Mapping

SHELL = "/bin/sh"
_CHUNK = 64 << 10
_GONE = (BrokenPipeError, ConnectionError, asyncssh.Error)


def login_env(home: Path) -> Mapping[str, str]:
    """The environment of a login: python3 is the interpreter that runs this host."""
    here = str(Path(sys.executable).parent)
    return {
        "HOME": str(home),
        "USER": "demo",
        "LOGNAME": "demo",
        "SHELL": SHELL,
        "LANG": "C.UTF-8",
        "PATH": f"{here}:/usr/local/bin:/usr/bin:/bin",
    }


class _Output:
    """A pipe that a child writes and we pump to the channel. ``close`` gives the child EPIPE."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._transport: asyncio.ReadTransport | None = None

    async def pump(self, writer: asyncssh.SSHWriter[bytes]) -> None:
        reader = asyncio.StreamReader(limit=_CHUNK)
        pipe = os.fdopen(self._read_end, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        except _GONE:
            return
        finally:
            self._transport.close()


async def _pump_input(process: asyncssh.SSHServerProcess[bytes], child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    while True:
        try:
            data = await process.stdin.read(_CHUNK)
            if not data:
                break
            child.stdin.write(data)
            await child.stdin.drain()
        except asyncssh.SignalReceived as request:
            number = getattr(signal, f"SIG{request.signal}", signal.SIGTERM)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        except asyncssh.BreakReceived:
            continue
        except _GONE:
            break
    child.stdin.close()


async def run_command(process: asyncssh.SSHServerProcess[bytes], home: Path) -> None:
    """Serve one exec request until its output has ended."""
    if process.command is None:
        process.stderr.write(b"this host has no interactive shell\n")
        process.exit(1)
        return
    out, err = _Output(), _Output()
    child = await asyncio.create_subprocess_exec(
        SHELL,
        "-c",
        process.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=out.write_end,
        stderr=err.write_end,
        cwd=home,
        env=login_env(home),
        start_new_session=True,
    )
    os.close(out.write_end)
    os.close(err.write_end)
    feeding = asyncio.create_task(_pump_input(process, child))
    await asyncio.gather(out.pump(process.stdout), err.pump(process.stderr))
    # Both outputs are closed, or the connection is gone: in the second case stdin has ended as well.
    status = await child.wait()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    with suppress(OSError, asyncssh.Error):
        if status >= 0:
            process.exit(status)
        else:
            process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
