"""A server's saved description: all it takes to start it again as it was.

The argv is raw here, because it may carry a key: each description is a 0600 file in the server's private
folder, and everything that is shown is masked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine.host.files import atomic_json, read_json
from engine.host.server import server_facts
from engine.host.servers.command import masked
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.host.processes import ServerProcess

SAVED = "saved.json"
"""The server as it was before its last stop."""
ORIGINAL = "original.json"
"""The ordinary server that a capture server stands in for; gone once it is back."""
LAUNCH = "launch.json"
"""What the run of the server executes."""

INFO_KEYS = ("model_path", "served_model_name", "version", "tp_size", "dp_size", "dtype", "context_length")
"""Of /server_info, which also holds the server's key."""


@dataclass(frozen=True)
class Description:
    """How a server was started, and who it was.

    Attributes:
        env: the allow-list of its environment.
        id: pid, start time and boot of the process that it was read from; None without one.
        info: INFO_KEYS of its /server_info, where it answered.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    port: int
    model: str | None = None
    uid: int | None = None
    unit: str | None = None
    id: Mapping[str, Any] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""

    def write(self, path: Path) -> None:
        """Durably, 0600. Raises OSError."""
        atomic_json(path, {"format_version": 1, **asdict(self)})


def read_description(path: Path) -> Description | None:
    """A saved one; None if there is none."""
    data = read_json(path)
    if data is None or not isinstance(data.get("argv"), list) or not isinstance(data.get("env"), dict):
        return None
    data.pop("format_version", None)
    try:
        return Description(**{**data, "argv": tuple(data["argv"])})
    except TypeError:
        return None


def describe(server: ServerProcess, url: str) -> Description:
    """The server as it runs now. Its environment and folder have been found readable."""
    return Description(
        server.argv,
        server.env or {},
        server.cwd or "/",
        server.port,
        server.model,
        server.uid,
        server.unit,
        server.id.to_json(),
        info_of(url),
        now_iso(),
    )


def info_of(url: str) -> dict[str, Any]:
    """INFO_KEYS of /server_info; empty when it does not answer."""
    info = server_facts(url)["info"] or {}
    return {name: info[name] for name in INFO_KEYS if isinstance(info.get(name), (str, int))}


def difference(old: Description, new: Description) -> list[str]:
    """The new argv, environment and folder against the old ones: lines that begin with "- " or "+ "."""
    lines = _changes(_words(old.argv), _words(new.argv))
    lines += _changes(_variables(old.env), _variables(new.env))
    if old.cwd != new.cwd:
        lines += [f"- cwd {old.cwd}", f"+ cwd {new.cwd}"]
    return lines


def _words(argv: tuple[str, ...]) -> list[str]:
    """A flag and its values on one line, masked."""
    lines: list[str] = []
    for word in masked(argv):
        if lines and not word.startswith("-") and lines[-1].startswith("-"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _variables(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(env.items())]


def _changes(old: list[str], new: list[str]) -> list[str]:
    return [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
