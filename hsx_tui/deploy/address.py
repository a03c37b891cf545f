"""Where a host is, how to log in, and which key it must show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class HostAddress:
    """One SSH host.

    Attributes:
        client_key: our private key (OpenSSH format, no passphrase).
        known_hosts: the file that names the host's key; nothing outside it is trusted.
    """

    address: str
    port: int
    user: str
    client_key: Path
    known_hosts: Path

    def __str__(self) -> str:
        return f"{self.user}@{self.address}:{self.port}"


@dataclass(frozen=True)
class EngineInstall:
    """The engine as it lies on a host.

    Attributes:
        id: sha256 of its manifest: the same id means the same bytes.
        dir: the folder that holds the package ``engine``, absolute, on the host.
        state: "present" | "installed" | "raced" | "replaced" (it had been changed or was incomplete).
        python: absolute path of the host's interpreter that answered.
    """

    id: str
    dir: str
    state: str
    python: str
    python_version: str
