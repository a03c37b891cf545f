"""Reading a request's arguments: each is checked here, and a wrong one is a SpecError that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.wire.errors import SpecError

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)


def text(args: Mapping[str, Any], name: str) -> str:
    """A non-empty string without NUL."""
    value = args.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise SpecError(f"bad {name} {value!r}", "it is a non-empty string")
    return value


def path(args: Mapping[str, Any], name: str) -> str:
    """An absolute path."""
    value = text(args, name)
    if not value.startswith("/"):
        raise SpecError(f"bad {name} {value!r}", "it is an absolute path")
    return value


def texts(args: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings without NUL; empty if it is not given."""
    value = args.get(name) or []
    if not isinstance(value, list) or any(not isinstance(v, str) or "\0" in v for v in value):
        raise SpecError(f"bad {name}", "it is a list of strings")
    return value


def integer(args: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    """A whole number of at least ``least``."""
    value = args.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"bad {name} {value!r}", f"it is a whole number of at least {least}")
    return value


def seconds(value: object, name: str) -> float:
    """A number of seconds, 0 to one day."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 86400:
        raise SpecError(f"bad {name} {value!r}", "it is a number of seconds, 0 to 86400")
    return float(value)


def grace(args: Mapping[str, Any], default: tuple[float, float] = (60.0, 15.0)) -> tuple[float, float]:
    """[seconds from TERM to INT, seconds from INT to KILL]."""
    value = args.get("grace")
    if value is None:
        return default
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise SpecError(f"bad grace {value!r}", "it is two numbers of seconds")
    return seconds(value[0], "grace"), seconds(value[1], "grace")


def key_env(args: Mapping[str, Any]) -> str | None:
    """The name of the login's variable with the server's key, as the run specification has it; None if it
    has none. Only the name is ever written."""
    spec = args.get("spec")
    source = spec.get("source") if isinstance(spec, Mapping) else None
    name = source.get("api_key_env") if isinstance(source, Mapping) else None
    if name is not None and (not isinstance(name, str) or not _ENV_NAME.match(name)):
        raise SpecError(
            "bad source.api_key_env",  # what is there may be the key itself
            "it is the name of an environment variable: letters, digits and _",
            "put the key into a variable of the login and give its name",
        )
    return name


def env(args: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables to set. They are written to spec.json, so secrets are refused."""
    value = args.get("env") or {}
    if not isinstance(value, Mapping):
        raise SpecError("bad env", "it is an object of strings")
    for key, content in value.items():
        if not isinstance(key, str) or not _ENV_NAME.match(key) or not isinstance(content, str):
            raise SpecError(f"bad env {key!r}", "names are letters, digits and _; values are strings")
        if "\0" in content:
            raise SpecError(f"bad env {key!r}", "its value contains NUL")
        if _SECRET.search(key):
            raise SpecError(
                f"env {key} looks like a secret", "it would be written to spec.json", "leave it out"
            )
    return dict(value)
