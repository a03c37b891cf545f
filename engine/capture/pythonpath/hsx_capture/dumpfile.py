"""The dump of one request, keyed by its rid: how it is written and read (docs/formats.md).

``<folder>/<rid>.safetensors``   input_ids int64 [S], aux [S, K*H], last [S, H], pre [S, H]; metadata strings
``<folder>/<rid>.error.json``    instead, when nothing could be written
``<folder>/plugin-<pid>.json``   the capture is active in that process

A dump with ``ok`` "false" holds the input_ids only: its error says why the states are not there.
Loaded inside production servers: standard library, torch and safetensors (late), relative imports only.

    DumpError
    ├── DumpMissing      there is no dump and no error of that request (yet)
    ├── DumpUnreadable   what lies there is not a dump, or not private
    └── WriterFailed     the server could not write the dump, and says why
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .packing import pack
from .privatedir import NotPrivate, open_private_dir, read_member, remove_member, write_member

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

FORMAT_VERSION = 1
MAX_DUMP_BYTES = 8 << 30
MAX_HEADER_BYTES = 16 << 20
MAX_JSON_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


class DumpError(Exception):
    """A dump that cannot be had."""


class DumpMissing(DumpError):
    """There is no dump and no error of that request (yet)."""


class DumpUnreadable(DumpError):
    """What lies there is not a dump, or not private."""


class WriterFailed(DumpError):
    """The server could not write the dump. ``marker`` is the whole error file."""

    def __init__(self, message: str, marker: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.marker = dict(marker)


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk: ``rows`` positions from ``start``, with what is known of the forward that computed
    it."""

    start: int
    rows: int
    batch: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**self.batch, "start": self.start, "n": self.rows}


@dataclass(frozen=True)
class DumpMeta:
    """What a dump says about itself.

    Attributes:
        taps: outputs of these 0-based decoder layers, in the order of aux's column blocks.
        engine_layer_ids: the same layers as the server numbers them.
        where: the writing process: ``dump_id`` ("<pid>-<counter>", also in the reply), ranks.
        ids_checked: the ids that the forward saw were compared with the prompt, position by position.
        ok: False when the states are not those of the whole prompt; ``error`` says why.
    """

    rid: str
    num_tokens: int
    ids_sha256: str
    taps: tuple[int, ...]
    engine_layer_ids: tuple[int, ...]
    model: str
    chunks: tuple[Chunk, ...]
    where: Mapping[str, Any]
    ok: bool = True
    error: str = ""
    ids_checked: bool = True
    producer: str = ""

    @property
    def dump_id(self) -> str:
        """Tells this dump from a leftover with the same rid."""
        return str(self.where.get("dump_id", ""))

    def to_strings(self) -> dict[str, str]:
        """As safetensors metadata."""
        return {
            "format_version": str(FORMAT_VERSION), "rid": self.rid, "num_tokens": str(self.num_tokens),
            "ids_sha256": self.ids_sha256, "taps": json.dumps(self.taps),
            "engine_layer_ids": json.dumps(self.engine_layer_ids), "model": self.model,
            "chunks": json.dumps([c.to_json() for c in self.chunks]), "where": json.dumps(dict(self.where)),
            "ok": _bool(self.ok), "error": self.error, "ids_checked": _bool(self.ids_checked),
            "producer": self.producer,
        }  # fmt: skip

    @classmethod
    def from_strings(cls, data: Mapping[str, str]) -> DumpMeta:
        """Read safetensors metadata; raises DumpUnreadable."""
        try:
            version = int(data["format_version"])
            if version > FORMAT_VERSION:
                raise DumpUnreadable(
                    f"format_version {version} is newer than {FORMAT_VERSION}: update the engine"
                )
            chunks = tuple(Chunk(int(c.pop("start")), int(c.pop("n")), c) for c in json.loads(data["chunks"]))
            where = json.loads(data["where"])
            if not isinstance(where, dict):
                raise TypeError("where is not an object")
            return cls(
                rid=data["rid"], num_tokens=int(data["num_tokens"]), ids_sha256=data["ids_sha256"],
                taps=tuple(int(t) for t in json.loads(data["taps"])),
                engine_layer_ids=tuple(int(t) for t in json.loads(data["engine_layer_ids"])),
                model=data["model"], chunks=chunks, where=where, ok=_is_true(data["ok"]), error=data["error"],
                ids_checked=_is_true(data.get("ids_checked", "false")), producer=data.get("producer", ""),
            )  # fmt: skip
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DumpUnreadable(f"the metadata is malformed: {type(error).__name__}: {error}") from error


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _is_true(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


@dataclass(frozen=True)
class Dump:
    """A dump: input_ids int64 [S]; aux [S, K*H], last [S, H] (after the final norm), pre [S, H] (before
    it)."""

    meta: DumpMeta
    input_ids: torch.Tensor
    aux: torch.Tensor | None = None
    last: torch.Tensor | None = None
    pre: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        named = {"input_ids": self.input_ids, "aux": self.aux, "last": self.last, "pre": self.pre}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def ids_sha256(ids: Iterable[int]) -> str:
    """The digest of token ids: over their int64 little-endian bytes."""
    values = list(ids)
    return hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()


def is_name(rid: str) -> bool:
    """Whether ``rid`` can name a dump: one plain component of a path, 1 to 128 of A-Z a-z 0-9 . _ -"""
    return bool(_NAME.match(rid))


def dump_path(folder: Path, rid: str) -> Path:
    """Where the dump of ``rid`` lies."""
    return folder / f"{rid}.safetensors"


def temporary_name() -> str:
    """A name for a file that is being written; the pid tells whose it is when it was left behind."""
    return f".tmp-{os.getpid()}-{secrets.token_hex(6)}"


def write_dump(folder: Path, dump: Dump) -> int:
    """Write a dump in one step (0600 in a 0700 folder); an error file of the same rid is removed.

    Returns: the bytes written. Raises OSError (nothing is left behind) and NotPrivate.
    """
    data = pack(dump.tensors(), dump.meta.to_strings())
    rid = dump.meta.rid
    fd = open_private_dir(folder, create=True)
    try:
        write_member(fd, f"{rid}.safetensors", temporary_name(), *data)
        remove_member(fd, f"{rid}.error.json")
    finally:
        os.close(fd)
    return sum(len(part) for part in data)


def write_error(folder: Path, rid: str, dump_id: str, error: str) -> None:
    """Say that there will be no dump of ``rid``; a leftover dump of the same rid is removed. Raises
    OSError."""
    marker = {"format_version": FORMAT_VERSION, "rid": rid, "dump_id": dump_id, "error": error}
    fd = open_private_dir(folder, create=True)
    try:
        remove_member(fd, f"{rid}.safetensors")
        write_member(fd, f"{rid}.error.json", temporary_name(), json.dumps(marker).encode() + b"\n")
    finally:
        os.close(fd)


def read_dump(folder: Path, rid: str, max_bytes: int = MAX_DUMP_BYTES) -> Dump:
    """Read the dump of ``rid``, safely (privatedir.py). Its content is not judged here.

    Raises DumpMissing (ask again later), WriterFailed, DumpUnreadable.
    """
    if not is_name(rid):
        raise DumpUnreadable(f"{rid!r} cannot name a dump")
    try:
        fd = open_private_dir(folder)
    except FileNotFoundError as error:
        raise DumpMissing(f"there is no folder {folder}") from error
    except OSError as error:
        raise DumpUnreadable(str(error)) from error
    try:
        return _decode(read_member(fd, f"{rid}.safetensors", max_bytes))
    except FileNotFoundError as error:
        marker = _read_marker(fd, rid)
        if marker is None:
            raise DumpMissing(f"there is no dump of {rid}") from error
        raise WriterFailed(str(marker.get("error", "no reason given")), marker) from error
    except NotPrivate as error:
        raise DumpUnreadable(str(error)) from error
    finally:
        os.close(fd)


def _read_marker(fd: int, rid: str) -> dict[str, Any] | None:
    try:
        marker = json.loads(read_member(fd, f"{rid}.error.json", MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, NotPrivate) as error:
        raise DumpUnreadable(f"the error file of {rid} cannot be read: {error}") from error
    if not isinstance(marker, dict):
        raise DumpUnreadable(f"the error file of {rid} is not an object")
    return marker


def _decode(data: bytes) -> Dump:
    from safetensors import SafetensorError
    from safetensors.torch import load

    meta = DumpMeta.from_strings(_metadata(data))
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DumpUnreadable(f"not a safetensors file: {error}") from error
    if "input_ids" not in tensors:
        raise DumpUnreadable("it has no input_ids")
    return Dump(meta, tensors["input_ids"], tensors.get("aux"), tensors.get("last"), tensors.get("pre"))


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata strings of a safetensors file: 8 bytes of header length, then the header as JSON."""
    if len(data) < 8:
        raise DumpUnreadable(f"the file has {len(data)} bytes: it is cut short")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise DumpUnreadable(
            f"its header claims {length} bytes of {len(data)}: it is cut short or not safetensors"
        )
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DumpUnreadable(f"its header is not JSON: {error}") from error
    meta = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(meta, dict):
        raise DumpUnreadable("it has no metadata: another program wrote it")
    return meta


def remove_dump(folder: Path, rid: str) -> None:
    """Remove the dump and the error file of ``rid``, as far as they are there. Raises OSError."""
    fd = open_private_dir(folder)
    try:
        for name in (f"{rid}.safetensors", f"{rid}.error.json"):
            remove_member(fd, name)
    finally:
        os.close(fd)
