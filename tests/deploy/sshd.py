"""A real OpenSSH server on a loopback port, as the user who runs the tests, with a home folder of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

from engine.wire.procid import parent_of
from hsx_tui.deploy.address import HostAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

MISSING = (
    "these tests need OpenSSH's sshd in PATH or /usr/sbin: run 'make system-packages', "
    "or 'apt-get install -y --no-install-recommends openssh-server'"
)

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {dir}/host_ed25519
PidFile none
AuthorizedKeysFile {dir}/authorized
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100:30:200
LoginGraceTime 10
LogLevel ERROR
SetEnv HOME={home} PATH={path}
"""
# MaxSessions stays at its default of 10 on purpose: the product has to live with it.


def write_key(path: Path) -> asyncssh.SSHKey:
    """A new ed25519 key (0600)."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    path.write_bytes(key.export_private_key())
    path.chmod(0o600)
    return key


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@dataclass(frozen=True)
class Sshd:
    """A running server. ``home``: what $HOME is in its sessions."""

    address: HostAddress
    home: Path
    process: subprocess.Popen[bytes]

    def drop(self) -> None:
        """Kill the processes of every session, as a crash or a failing network would."""
        for pid in self._sessions():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _sessions(self) -> list[int]:
        """sshd's own processes below the listener: a session's monitor and its unprivileged half."""
        parents = {int(p): parent_of(int(p)) for p in os.listdir("/proc") if p.isdigit()}
        first = [p for p, parent in parents.items() if parent == self.process.pid]
        second = [p for p, parent in parents.items() if parent in first and _name(p).startswith("sshd")]
        return [*first, *second]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def run_sshd(folder: Path) -> Iterator[Sshd]:
    """Start sshd with its files in ``folder``; ends it after the yield."""
    program = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    assert program, MISSING
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    home = folder / "home"
    home.mkdir(parents=True, mode=0o700)
    host_key = write_key(folder / "host_ed25519")
    (folder / "authorized").write_bytes(write_key(folder / "client_ed25519").export_public_key())
    port, path = free_port(), f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    public = " ".join(host_key.export_public_key().decode().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n")
    (folder / "sshd_config").write_text(CONFIG.format(port=port, dir=folder, home=home, path=path))
    argv = [program, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        _wait_listening(process, port, folder / "sshd.log")
        address = HostAddress(
            "127.0.0.1", port, getpass.getuser(), folder / "client_ed25519", folder / "known_hosts"
        )
        yield Sshd(address, home, process)
    finally:
        process.terminate()
        process.wait(10)


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 10
    while True:
        assert process.poll() is None, f"sshd does not start: {log.read_text()}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end, "sshd does not listen"
            time.sleep(0.02)
