"""Opening a connection: the options that are never left to a user's ssh_config, and what each failure
means."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncssh

from engine.wire.errors import ConnectionFailed, DeadlineExceeded, HostKeyError, HsxError, UsageError
from hsx_tui.text import clean

if TYPE_CHECKING:
    from hsx_tui.deploy.address import HostAddress

CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com")


class _KeyWitness(asyncssh.SSHClient):
    """Remembers the key that the host showed and nobody vouched for."""

    shown: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key
        return False


def _known_hosts(address: HostAddress) -> asyncssh.SSHKnownHosts:
    """The known hosts as an object: a path or an empty value would let asyncssh fall back on others."""
    try:
        text = address.known_hosts.read_text()
    except OSError as error:
        raise HostKeyError(
            f"the key of {address} is not known",
            f"{address.known_hosts}: {error.strerror}",
            "add the host's key to that file after comparing its fingerprint",
        ) from error
    try:
        return asyncssh.import_known_hosts(text)
    except ValueError as error:
        raise UsageError(
            f"{address.known_hosts} is malformed", clean(str(error)), "correct that file"
        ) from error


def _client_key(address: HostAddress) -> asyncssh.SSHKey:
    try:
        return asyncssh.read_private_key(address.client_key)
    except OSError as error:
        raise UsageError(f"the key {address.client_key} cannot be read", str(error.strerror)) from error
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise UsageError(
            f"the key {address.client_key} cannot be used",
            clean(str(error)),
            "name an unencrypted OpenSSH key",
        ) from error


def _key_error(
    address: HostAddress, known: asyncssh.SSHKnownHosts, shown: asyncssh.SSHKey | None
) -> HostKeyError:
    print_ = f"it shows {shown.get_fingerprint()}" if shown else "it shows no key that could be checked"
    expected = known.match(address.address, address.address, address.port)[0]
    if expected:
        return HostKeyError(
            f"the key of {address} has CHANGED",
            f"{print_}, expected {expected[0].get_fingerprint()}",
            f"ask its administrator; only if the change is right, replace its line in {address.known_hosts}",
        )
    return HostKeyError(
        f"the key of {address} is not known",
        print_,
        f"compare the fingerprint, then add the key to {address.known_hosts}",
    )


async def open_connection(address: HostAddress, deadline_s: float) -> asyncssh.SSHClientConnection:
    """Connect and log in; every failure as the HsxError that says what to do."""
    known, key = _known_hosts(address), _client_key(address)
    witness = _KeyWitness()
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncssh.connect(
                address.address,
                address.port,
                username=address.user,
                client_factory=lambda: witness,
                config=None,  # a user's ssh_config can run local commands and switch off the key check
                known_hosts=known,
                client_keys=[key],
                agent_path=None,
                preferred_auth=["publickey"],
                gss_host=None,
                encryption_algs=list(CIPHERS),
                connect_timeout=min(10, deadline_s),
                login_timeout=min(15, deadline_s),
                keepalive_interval=5,
                keepalive_count_max=3,
            )
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{address} did not let us in within {deadline_s:g} s", "", "check the address and the network"
        ) from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise _key_error(address, known, witness.shown) from error
    except (asyncssh.Error, OSError) as error:
        raise _failure(address, error) from error


def _failure(address: HostAddress, error: Exception) -> HsxError:
    why = clean(str(error)) or type(error).__name__
    if isinstance(error, asyncssh.PermissionDenied):
        return ConnectionFailed(
            f"{address} refused the login",
            why,
            f"add the public half of {address.client_key} to its authorized keys",
        )
    if isinstance(error, asyncssh.ConnectionLost) and "timeout" in why.lower():
        return DeadlineExceeded(f"{address} did not finish the login in time", why, "try again")
    if isinstance(error, asyncssh.DisconnectError):
        return ConnectionFailed(
            f"{address} ended the connection", why, "check that an SSH server listens there"
        )
    return ConnectionFailed(
        f"{address} cannot be reached", why, "check the address, the port and the network"
    )
