"""The tables of config.toml as types (formats.md). Values are data: paths, numbers, names, argv arrays.

The tables of later verbs (drafters, scores, windows) are taken as plain data and are checked by those verbs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

_TEXT = r"^[^\x00-\x1f\x7f]+$"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_RUN = r"^[a-z0-9][a-z0-9-]{0,39}$"
_REMOTE_PATH = r"^/[^\x00-\x1f\x7f]*$"
_URL = r"^https?://[^\s\x00-\x1f\x7f]+$"
_ENV = r"^[A-Za-z_][A-Za-z0-9_]*$"

MEANING = {
    _TEXT: "one line of text without control characters",
    _NAME: "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    _RUN: "1 to 40 of a-z, 0-9 and '-', not beginning with '-'",
    _REMOTE_PATH: "an absolute path on the host",
    _URL: "an address that begins with http:// or https://",
    _ENV: "the name of an environment variable, never a secret itself",
}
"""What each pattern asks for, in words."""

Text = Annotated[str, StringConstraints(pattern=_TEXT)]
Name = Annotated[str, StringConstraints(pattern=_NAME)]
RunName = Annotated[str, StringConstraints(pattern=_RUN)]
RemotePath = Annotated[str, StringConstraints(pattern=_REMOTE_PATH)]
Count = Annotated[int, Field(ge=1)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Plain = dict[str, Any]


class Table(BaseModel):
    """A table of known keys: any other is an error, and nothing is converted (no "22" for 22)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Console(Table):
    """``read_only``: no verb acts unless --read-write is given."""

    read_only: bool = False


class Host(Table):
    """A machine reached over SSH.

    Attributes:
        user: None = the user of this console.
        jump: another host of this file to go through.
        python: the interpreter that runs the engine; None = python3 of the login.
        workdir: the folder that relative paths of runs and datasets begin at.
        read_only: None = as ``production`` and [console] say.
        identity_file, known_hosts: on this machine; relative ones begin at the configuration's folder.
    """

    address: Text
    user: Text | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    jump: Name | None = None
    python: RemotePath | None = None
    workdir: RemotePath | None = None
    production: bool = False
    read_only: bool | None = None
    identity_file: Text = "~/.ssh/id_ed25519"
    known_hosts: Text = "~/.ssh/known_hosts"


class Replica(Table):
    """A further server of the same model, for the same runs: each has a dump folder of its own."""

    url: Annotated[str, StringConstraints(pattern=_URL)]
    dump_dir: RemotePath
    log: RemotePath | None = None


class Server(Table):
    """An inference server on a host; ``url`` as seen from that host. Started by ``launch`` or by ``unit``."""

    host: Name
    kind: Literal["sglang"] = "sglang"
    url: Annotated[str, StringConstraints(pattern=_URL)]
    api_key_env: Annotated[str, StringConstraints(pattern=_ENV)] | None = None
    launch: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = None
    unit: Text | None = None
    dump_dir: RemotePath | None = None
    dump_mode: Literal["rid", "counter"] = "rid"
    log: RemotePath | None = None
    replicas: Annotated[tuple[Replica, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _one_way_to_start(self) -> Server:
        if self.launch is not None and self.unit is not None:
            raise ValueError("launch and unit exclude each other: keep one")
        return self


class Target(Table):
    """The model whose hidden states are taken.

    Attributes:
        taps: layer numbers, ascending, each once, in ``layer_ids_convention``.
        layer_ids_convention: "output": k is the output of 0-based decoder layer k; "input": k is what goes
            into layer k (transformers' hidden_states[k], vLLM's ids), the output of layer k - 1.
    """

    model: Text
    taps: Layers
    last: Literal["pre", "post", "none"] = "pre"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    layer_ids_convention: Literal["output", "input"] = "output"

    @model_validator(mode="after")
    def _ascending(self) -> Target:
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps are {list(self.taps)}: list them ascending, each once")
        if self.layer_ids_convention == "input" and self.taps[0] == 0:
            raise ValueError("tap 0 as an input is the embedding, no layer's output: begin at 1")
        return self

    @property
    def output_taps(self) -> tuple[int, ...]:
        """The taps as outputs of 0-based decoder layers, as the engine wants them."""
        step = 1 if self.layer_ids_convention == "input" else 0
        return tuple(tap - step for tap in self.taps)


class Dataset(Table):
    """A file of samples on the host."""

    path: Text
    format: Literal["jsonl"] = "jsonl"
    max_tokens: Count = 8192
    over_long: Literal["refuse", "quarantine"] = "refuse"
    thinking: bool = False


class Run(Table):
    """An extraction. ``server`` and ``target`` may be left out where the file has just one; ``rows`` is
    [first, last), left out for all."""

    source: Literal["server", "target"] = "server"
    server: Name | None = None
    target: Name | None = None
    dataset: Name
    store: Text
    concurrency: Count = 8
    rows: Annotated[tuple[int, int], Field(strict=False)] | None = None

    @field_validator("rows")
    @classmethod
    def _range(cls, rows: tuple[int, int] | None) -> tuple[int, int] | None:
        if rows is not None and not 0 <= rows[0] < rows[1]:
            raise ValueError(f"rows are [first, last) with 0 <= first < last, not {list(rows)}")
        return rows


class Config(Table):
    """All of config.toml."""

    console: Console = Console()
    hosts: dict[Name, Host] = {}
    servers: dict[Name, Server] = {}
    targets: dict[Name, Target] = {}
    datasets: dict[Name, Dataset] = {}
    runs: dict[RunName, Run] = {}
    drafters: dict[Name, Plain] = {}
    scores: dict[Name, Plain] = {}
    windows: dict[Name, Plain] = {}

    def server_of(self, run: str) -> str | None:
        """The server that a run asks: its own, or the only one; None if it asks none."""
        table = self.runs[run]
        if table.source != "server":
            return None
        return table.server or (next(iter(self.servers)) if len(self.servers) == 1 else None)

    def target_of(self, run: str) -> str | None:
        """The target of a run: its own, or the only one."""
        return self.runs[run].target or (next(iter(self.targets)) if len(self.targets) == 1 else None)

    def read_only(self, host: str) -> str | None:
        """Why nothing is done on ``host`` unless it is asked for; None if it may be done."""
        table = self.hosts[host]
        if table.read_only is not None:
            return f"[hosts.{host}] read_only is true" if table.read_only else None
        if self.console.read_only:
            return "[console] read_only is true"
        return f"{host} is tagged production" if table.production else None
