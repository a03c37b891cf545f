"""The embedded host: an SSH server on the loopback, a process of its own, with a private HOME. Not a security
boundary.

    python -m hsx_tui.deploy.embedded_host [--detach] WORKDIR

SIGTERM ends it; SIGUSR1 drops every live connection, as a failing network would. What it was asked to run in
a session of its own goes on in both cases, as on a real host.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path

import asyncssh

from engine.wire.errors import HsxError, Refused
from engine.wire.events import now_iso
from engine.wire.procid import ProcessId
from hsx_tui.deploy.embedded import USER
from hsx_tui.deploy.embedded_exec import run_command


class _Server(asyncssh.SSHServer):
    """Public keys only; no forwarding, no SFTP, no shell: asyncssh refuses what is not overridden here."""

    live: set[asyncssh.SSHServerConnection] = set()  # noqa: RUF012  (one process is one server)

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._conn = conn
        self.live.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self.live.discard(self._conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True


def write_private(path: Path, data: bytes) -> None:
    """Write ``path`` (0600) atomically."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise


def load_or_make_key(path: Path) -> asyncssh.SSHKey:
    """The ed25519 key at ``path``, made on first use, with its public half beside it."""
    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment=f"hsx-console {path.stem}")
        write_private(path.with_name(path.name + ".pub"), key.export_public_key())
        write_private(path, key.export_private_key())
    return asyncssh.read_private_key(path)


async def listen(workdir: Path) -> asyncssh.SSHAcceptor:
    """Bind the port of last time if it is free, else any; write known_hosts and host.json."""
    keys, home = workdir / "keys", workdir / "home"
    for folder in (keys, home):
        folder.mkdir(mode=0o700, exist_ok=True)
    host_key = load_or_make_key(keys / "host_ed25519")
    load_or_make_key(keys / "client_ed25519")

    async def on_exec(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await run_command(process, home)

    async def bind(port: int) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            port,
            server_factory=_Server,
            server_host_keys=[host_key],
            authorized_client_keys=str(keys / "client_ed25519.pub"),
            process_factory=on_exec,
            encoding=None,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            password_auth=False,
            kbdint_auth=False,
            gss_host=None,
            login_timeout=10,
            keepalive_interval=5,
            keepalive_count_max=3,
        )

    try:
        acceptor = await bind(_last_port(workdir))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        acceptor = await bind(0)
    port = acceptor.get_port()
    public = host_key.export_public_key().decode().split()[:2]
    write_private(keys / "known_hosts", f"[127.0.0.1]:{port} {' '.join(public)}\n".encode())
    me = ProcessId.of(os.getpid())
    assert me is not None
    write_private(workdir / "port", str(port).encode())
    write_private(
        workdir / "host.json",
        json.dumps({**me.to_json(), "port": port, "user": USER, "at": now_iso()}).encode(),
    )
    return acceptor


def _last_port(workdir: Path) -> int:
    """The port of the last start: a written configuration keeps its meaning."""
    try:
        port = int((workdir / "port").read_text())
    except (OSError, ValueError):
        return 0
    return port if 1024 <= port < 65536 else 0


async def serve(workdir: Path, ready: int | None) -> None:
    """Listen until SIGTERM. ``ready``: a pipe that is closed once the host can be reached."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    loop.add_signal_handler(signal.SIGINT, end.set)
    loop.add_signal_handler(signal.SIGUSR1, drop_all)
    acceptor = await listen(workdir)
    if ready is not None:
        os.close(ready)
    await end.wait()
    acceptor.close()
    drop_all()
    (workdir / "host.json").unlink(missing_ok=True)


def drop_all() -> None:
    """Abort every live connection."""
    for conn in list(_Server.live):
        conn.abort()


def _detach(workdir: Path) -> int:
    """Become a daemon; returns the write end of the pipe on which the parent waits. The parent never
    returns."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()
        sys.stdout.buffer.write(message)
        sys.stdout.flush()
        os._exit(1 if message else 0)
    os.close(read_end)
    os.setsid()
    if os.fork():
        os._exit(0)
    log = os.open(workdir / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, fd)
    os.close(log)
    os.close(null)
    return write_end


def _explain(workdir: Path, error: OSError) -> HsxError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(
            f"no space in the work directory {workdir}", str(error.strerror), "make room or choose another"
        )
    return Refused(f"the embedded host cannot use {workdir}", str(error), "choose another work directory")


def main(argv: list[str]) -> int:
    """Run the host in the foreground, or with --detach return once it listens. Errors are JSON on stdout."""
    os.umask(0o077)
    workdir = Path(argv[-1]).absolute()
    ready = _detach(workdir) if argv[:-1] == ["--detach"] else None
    try:
        asyncio.run(serve(workdir, ready))
    except OSError as error:
        message = json.dumps(_explain(workdir, error).to_json()).encode()
        os.write(1 if ready is None else ready, message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
