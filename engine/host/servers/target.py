"""Which server is meant, as the configuration has it, and the folder where this host keeps what it knows
of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.host import args as arg
from engine.host.files import private_folder
from engine.host.rundir import state_root
from engine.wire.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]{0,200}\Z")


@dataclass(frozen=True)
class Target:
    """A server by its name and address.

    Attributes:
        launch: the argv that starts it, where the configuration has one.
        unit: the systemd service that starts it.
        dump_dir: where it dumps as a capture server.
        log: its log file, for one that was not started by us.
    """

    name: str
    url: str
    launch: tuple[str, ...] = ()
    unit: str | None = None
    dump_dir: str | None = None
    log: str | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def run(self) -> str:
        """The run that it is started as."""
        return f"server-{self._slug}"

    @property
    def job_run(self) -> str:
        """The run of its jobs, an attempt each."""
        return f"job-{self._slug}"

    @property
    def _slug(self) -> str:
        plain = re.sub(r"[^a-z0-9-]", "-", self.name.lower())[:20]
        same = plain == self.name
        return plain if same else f"{plain}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def folder(self) -> Path:
        """Its private folder. Raises Refused."""
        return private_folder(private_folder(state_root() / "servers") / self._slug)


def target_from(args: object) -> Target:
    """Read the ``server`` object of a request. Raises SpecError."""
    if not isinstance(args, Mapping):
        raise SpecError("bad server", "it is an object with name and url")
    name, url = arg.text(args, "name"), arg.text(args, "url")
    if not _NAME.match(name):
        raise SpecError(f"bad server name {name!r}", "letters, digits, '.', '_' and '-'")
    try:
        good = urlsplit(url).scheme in ("http", "https") and urlsplit(url).port != 0
    except ValueError:
        good = False
    if not good:
        raise SpecError(f"bad url {url!r}", "it begins with http:// or https:// and has a port")
    unit = _optional(args, "unit")
    if unit is not None and not _UNIT.match(unit):
        raise SpecError(f"bad unit {unit!r}", "it is the name of a systemd service")
    return Target(
        name, url, tuple(arg.texts(args, "launch")), unit, _path(args, "dump_dir"), _path(args, "log")
    )


def _optional(args: Mapping[str, Any], name: str) -> str | None:
    return None if args.get(name) is None else arg.text(args, name)


def _path(args: Mapping[str, Any], name: str) -> str | None:
    return None if args.get(name) is None else arg.path(args, name)
