"""The hosts of the configuration as a verb speaks to them: found by name, reached, perhaps read-only."""

from __future__ import annotations

import getpass
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from engine.wire.errors import Refused, UsageError
from hsx_tui.config import Configured, load, nearest
from hsx_tui.deploy.address import HostAddress
from hsx_tui.services.runs import Runs

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from hsx_tui.config_model import Config, Host


@dataclass(frozen=True)
class Fleet:
    """The configured hosts and what the command line says about them. ``only``: --host."""

    configured: Configured
    only: str | None = None
    read_only: bool = False
    read_write: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Fleet:
        """Read the configuration. Raises UsageError, also for an unknown --host."""
        fleet = cls(load(args.config), args.host, args.read_only, args.read_write)
        if args.host is not None:
            fleet.host(args.host)
        return fleet

    @property
    def config(self) -> Config:
        """The configuration's tables."""
        return self.configured.config

    @property
    def names(self) -> list[str]:
        """The hosts that are meant: --host, or all."""
        return [self.only] if self.only is not None else list(self.config.hosts)

    def host(self, name: str) -> Host:
        """A host's table. Raises UsageError with the nearest name."""
        try:
            return self.config.hosts[name]
        except KeyError:
            raise UsageError(
                f"unknown host {name!r}",
                f"{self.configured.path} does not name it",
                nearest(name, self.config.hosts),
            ) from None

    def address(self, name: str) -> HostAddress:
        """How to reach a host. Raises Refused for one behind a jump host."""
        host = self.host(name)
        if host.jump is not None:
            raise Refused(
                f"host {name} is behind the jump host {host.jump}",
                "this version connects directly only",
                "take away jump where the host can be reached",
            )
        return HostAddress(
            host.address,
            host.port,
            host.user or getpass.getuser(),
            self.configured.local(host.identity_file),
            self.configured.local(host.known_hosts),
        )

    @asynccontextmanager
    async def runs(self, name: str) -> AsyncIterator[Runs]:
        """The runs of a host, over a link that is closed in the end."""
        from hsx_tui.commands.hostlink import (
            HostLink,  # asyncssh, once the command line and the file are right
        )

        link = HostLink(self.address(name), self.host(name).python)
        try:
            yield Runs(link)
        finally:
            await link.close()

    def host_of(self, run: str) -> str:
        """The host that a run is on: --host, its server's host, or the only host. Raises UsageError."""
        if self.only is not None:
            return self.only
        if run in self.config.runs:
            server = self.config.server_of(run)
            if server is not None:
                return self.config.servers[server].host
        elif len(self.config.hosts) != 1:
            raise self.unknown_run(run, self.config.runs)
        if len(self.config.hosts) == 1:
            return next(iter(self.config.hosts))
        raise UsageError(
            f"which host is run {run} on?", "the configuration does not say", "name it with --host"
        )

    def unknown_run(self, run: str, known: Any) -> UsageError:
        """A run that neither the configuration nor the host knows."""
        hint = "" if self.only is not None else " (a run that only its host knows: name the host with --host)"
        return UsageError(f"unknown run {run!r}", f"it is not known here{hint}", nearest(run, known))

    def check_may_act(self, name: str, what: str) -> None:
        """Refused in read-only: --read-only beats --read-write beats the configuration."""
        if self.read_only:
            raise Refused(what, "--read-only was given", "leave it out")
        why = self.config.read_only(name)
        if why is not None and not self.read_write:
            raise Refused(what, why, "add --read-write if that is meant")

    def remote_path(self, name: str, path: str, key: str) -> str:
        """A path on the host: a relative one begins at the host's workdir. Raises UsageError."""
        workdir = self.host(name).workdir
        if workdir is None and not path.startswith("/"):
            raise UsageError(
                f"{key} = {path!r} is a relative path", f"[hosts.{name}] has no workdir", "make it absolute"
            )
        return str(PurePosixPath(workdir or "/") / path)
