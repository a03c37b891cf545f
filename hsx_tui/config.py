"""The configuration: where it is looked for, how it is read, what is wrong with it and where.

Every error is a UsageError with the file, the line where it can be found, the key's path, and the nearest
valid name for one that is unknown.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from engine.wire.errors import UsageError
from hsx_tui.config_lines import line_in, line_of
from hsx_tui.config_model import MEANING, Config
from hsx_tui.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pydantic_core import ErrorDetails

NAME = "config.toml"
MAX_BYTES = 4 << 20

_WANTED = {
    "tuple_type": "an array",
    "too_short": "an array that is not empty",
    "dict_type": "a table",
    "model_type": "a table",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
}


@dataclass(frozen=True)
class Configured:
    """A configuration and the file that it was read from."""

    path: Path
    config: Config

    def local(self, path: str) -> Path:
        """A path on this machine: ~ is our home, a relative one begins at the configuration's folder."""
        return self.path.parent / Path(path).expanduser()


def load(given: Path | None = None) -> Configured:
    """The configuration from ``given``, or from where it is looked for. Raises UsageError."""
    path = _find(given).absolute()
    return Configured(path, parse(_read(path), path))


def parse(text: str, path: Path) -> Config:
    """Read and check the text of a configuration. Raises UsageError that names the file and the line."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(
            path, line_in(str(error)), "this is not TOML", str(error), "correct that line"
        ) from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise _invalid(error.errors(), text, path) from None
    for where, why, next_step in _bad_references(config):
        raise _wrong(path, line_of(text, where), ".".join(where), why, next_step)
    return config


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say about a name that is not among ``known``."""
    names = sorted(known)
    if not names:
        return "there are none yet"
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if found:
        return f"did you mean {found[0]}?"
    return f"one of {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def _find(given: Path | None) -> Path:
    if given is not None:
        return given
    here = Path(NAME)
    if here.is_file():
        return here
    named = os.environ.get("HSX_CONFIG")
    if named:
        return Path(named)
    import platformdirs

    users = Path(platformdirs.user_config_dir("hsx-console")) / NAME
    if users.is_file():
        return users
    raise UsageError(
        "no configuration found",
        f"looked for ./{NAME}, $HSX_CONFIG (not set) and {users}",
        "name one with --config FILE; `hsx-console demo` writes one into its work directory",
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the configuration {path} cannot be read", str(error.strerror), "name one with --config FILE"
        ) from error
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"the configuration {path} is too large", f"more than {MAX_BYTES} bytes", "is it the right file?"
        )
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _wrong(path, line, "this is not TOML", "it is not UTF-8", "save it as UTF-8") from error


def _wrong(path: Path, line: int | None, what: str, why: str, next_step: str = "") -> UsageError:
    where = f"{path}:{line}" if line else str(path)
    return UsageError(f"{where}: {clean(what)}", clean(why), next_step)


def _invalid(errors: Sequence[ErrorDetails], text: str, path: Path) -> UsageError:
    """The first finding, and how many more there are. A mistyped key comes before the one missing for it."""
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    loc = [str(part) for part in first["loc"] if part != "[key]"]
    why, next_step = _explained(first, loc)
    if len(errors) > 1:
        why += f" (and {len(errors) - 1} more in this file)"
    return _wrong(path, line_of(text, loc), ".".join(loc), why, next_step)


def _explained(error: ErrorDetails, loc: list[str]) -> tuple[str, str]:
    """(why, next step) for one finding of pydantic."""
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return "unknown key", nearest(loc[-1], _keys_at(loc[:-1]))
    if kind == "missing":
        return "this key is missing", "add it"
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, "), ""
    if kind == "literal_error":
        return f"{_short(given)} is not valid", f"it is {error['ctx']['expected']}"
    if kind == "string_pattern_mismatch" and loc[-1] == "api_key_env":
        return "this is no name of a variable", f"it is {MEANING[error['ctx']['pattern']]}"  # may be a key
    if kind == "string_pattern_mismatch":
        return f"{_short(given)} is not valid", f"it is {MEANING[error['ctx']['pattern']]}"
    said = _WANTED.get(kind) or error["msg"].removeprefix("Input should be ")
    return f"{_short(given)} is not valid", f"it should be {said}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys_at(loc: Sequence[str]) -> list[str]:
    """The keys that the table at ``loc`` may have: [], [console] or [hosts.NAME] and its like."""
    if not loc:
        return list(Config.model_fields)
    kind = Config.model_fields[loc[0]].annotation
    table = get_args(kind)[1] if get_args(kind) else kind
    return list(table.model_fields) if isinstance(table, type) and issubclass(table, BaseModel) else []


def _bad_references(config: Config) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(key, why, next step) of every name that leads nowhere."""
    hosts, servers, targets = config.hosts, config.servers, config.targets

    def check(known: Iterable[str], kind: str, value: str | None, *key: str) -> Iterator[Any]:
        if value is not None and value not in known:
            yield key, f"there is no {kind} {value!r}", nearest(value, known)

    for name, host in hosts.items():
        yield from check(hosts, "host", host.jump, "hosts", name, "jump")
    for name, server in servers.items():
        yield from check(hosts, "host", server.host, "servers", name, "host")
    for name, run in config.runs.items():
        yield from check(config.datasets, "dataset", run.dataset, "runs", name, "dataset")
        yield from check(servers, "server", run.server, "runs", name, "server")
        yield from check(targets, "target", run.target, "runs", name, "target")
        if run.source == "server" and config.server_of(name) is None:
            yield ("runs", name), f"which server? there are {len(servers)}", "add the key server"
        if config.target_of(name) is None:
            yield ("runs", name), f"which target? there are {len(targets)}", "add the key target"
