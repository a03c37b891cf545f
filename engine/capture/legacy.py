"""One dump of a server that was patched in the field: ``req_<n>/``, read safely, whatever its layout.

docs/formats.md has the layouts. Nothing in a dump is trusted: a member is opened without following a link and
is a regular file of ours or of the server with one name and a bounded size; a ``.pt`` file goes through
``torch.load(weights_only=True)`` only, and only where torch is new enough for that to be safe.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

MAX_FILE_BYTES = 8 << 30
MAX_META_BYTES = 16 << 20
MAX_TOKENS = 1 << 22

META, DONE = "meta.json", "done"
SINGLE = "hidden_states"
_TENSORS = re.compile(r"(aux_\d{1,3}|final|hidden_states)\.(pt|safetensors)\Z")
_AUX = re.compile(r"aux_(\d{1,3})\Z")

SAFE_TORCH = (2, 10)
"""``weights_only`` of older versions has known holes (memory corruption by crafted files)."""


class LegacyUnreadable(Exception):
    """What lies there is no dump, not whole yet, or not safe to read; the message says which."""


@dataclass(frozen=True)
class LegacyMeta:
    """What a dump says about itself. ``mode``: extend, decode or another forward mode, lower case, or None.

    ``input_ids``: the tokens of this forward, or None where the patch does not write them.
    """

    num_tokens: int
    mode: str | None = None
    input_ids: tuple[int, ...] | None = None
    rid: str | None = None


@dataclass(frozen=True)
class LegacyDump:
    """A dump: ``aux`` by its number, [num_tokens, H] each; ``final`` [num_tokens, H] after the final norm."""

    meta: LegacyMeta
    aux: Mapping[int, Tensor]
    final: Tensor | None


def open_dir(name: str, owners: Collection[int], dir_fd: int | None = None) -> int:
    """Open a folder without following a link (descriptor returned, the caller closes it).

    Raises FileNotFoundError, and LegacyUnreadable when others could write into it or it is not of ``owners``.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LegacyUnreadable(f"{name} is a link, no folder, or closed to us: {error.strerror}") from error
    found = os.fstat(fd)
    if (owners and found.st_uid not in owners) or found.st_mode & 0o022:
        os.close(fd)
        raise LegacyUnreadable(
            f"{name} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: "
            "only we and the server may be able to write there"
        )
    return fd


def read_file(dir_fd: int, name: str, owners: Collection[int], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The whole content of a member. Raises LegacyUnreadable, also when it changes while it is read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except OSError as error:
        raise LegacyUnreadable(f"{name} cannot be opened safely: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        for wrong, text in (
            (not stat.S_ISREG(found.st_mode), "is not a regular file"),
            (found.st_uid not in owners, f"belongs to user {found.st_uid}"),
            (found.st_nlink != 1, f"has {found.st_nlink} names"),
            (found.st_size > max_bytes, f"has {found.st_size} bytes, more than {max_bytes}"),
        ):
            if wrong:
                raise LegacyUnreadable(f"{name} {text}")
        data = file.read(found.st_size + 1)
    if len(data) != found.st_size:
        raise LegacyUnreadable(f"{name} changed while it was read")
    return data


def read_meta(dir_fd: int, names: Collection[str], owners: Collection[int]) -> LegacyMeta:
    """The meta of an open dump folder, from meta.json or from the one tensor file. Raises
    LegacyUnreadable."""
    if META in names:
        return _meta(_json(read_file(dir_fd, META, owners, MAX_META_BYTES)))
    singles = [n for n in names if n.startswith(f"{SINGLE}.") and _TENSORS.match(n)]
    if len(singles) != 1:
        raise LegacyUnreadable("there is neither meta.json nor one hidden_states file")
    return _meta(_load(singles[0], read_file(dir_fd, singles[0], owners))[1])


def read_legacy(dir_fd: int, names: Collection[str], owners: Collection[int]) -> LegacyDump:
    """A whole dump from an open folder. Raises LegacyUnreadable."""
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for name in sorted(names):
        if not (known := _TENSORS.match(name)):
            continue  # done, meta.json, and what a patch may put beside them
        loaded, more = _load(name, read_file(dir_fd, name, owners))
        said |= more
        for key, tensor in loaded.items():
            key = key if known[1] == SINGLE else known[1]
            if key in tensors:
                raise LegacyUnreadable(f"{key} is there twice")
            tensors[key] = tensor
    if META in names:
        said = _json(read_file(dir_fd, META, owners, MAX_META_BYTES))
    meta = _meta(said)
    aux = {int(m[1]): t for key, t in tensors.items() if (m := _AUX.match(key))}
    final = tensors.get("final")
    if not aux:
        raise LegacyUnreadable("there is no aux_<k>")
    for key, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[0] != meta.num_tokens or not tensor.is_floating_point():
            shape = list(tensor.shape)
            raise LegacyUnreadable(f"{key} is {tensor.dtype} {shape}, the meta says {meta.num_tokens} tokens")
    return LegacyDump(meta, dict(sorted(aux.items())), final)


def _json(data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LegacyUnreadable(f"the meta is no JSON: {str(error)[:80]}") from error
    if not isinstance(said, dict):
        raise LegacyUnreadable("the meta is not an object")
    return said


def _meta(said: Mapping[str, Any]) -> LegacyMeta:
    n, ids, rid = said.get("num_tokens"), said.get("input_ids"), said.get("rid")
    if isinstance(ids, list) and not all(type(t) is int and 0 <= t < 1 << 31 for t in ids):
        raise LegacyUnreadable("its input_ids are not token ids")
    if n is None and isinstance(ids, list):
        n = len(ids)
    if type(n) is not int or not 0 < n <= MAX_TOKENS:
        raise LegacyUnreadable(f"its num_tokens is {str(n)[:40]}")
    if ids is not None and (not isinstance(ids, list) or len(ids) != n):
        raise LegacyUnreadable(f"its input_ids are not {n} ids")
    return LegacyMeta(
        n, _mode(said.get("forward_mode")), tuple(ids) if ids is not None else None,
        rid if isinstance(rid, str) else None,
    )  # fmt: skip


def _mode(value: object) -> str | None:
    """SGLang's ForwardMode, as its name, its repr ("ForwardMode.EXTEND") or its number."""
    if isinstance(value, int):
        return {1: "extend", 2: "decode", 3: "mixed"}.get(value, "other")
    return value.lower().rpartition(".")[2][:20] if isinstance(value, str) and value else None


def _load(name: str, data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by key, the meta that lies beside them) of one file. A bare tensor has the key ""."""
    return _load_pt(name, data) if name.endswith(".pt") else _load_safetensors(name, data)


def _load_safetensors(name: str, data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
        length = int.from_bytes(data[:8], "little")
        strings = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        said = {k: strings[k] for k in ("forward_mode", "rid") if k in strings}
        said |= {k: json.loads(strings[k]) for k in ("num_tokens", "input_ids") if k in strings}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LegacyUnreadable(f"{name} is no whole safetensors file: {str(error)[:80]}") from error
    if "input_ids" in tensors:
        said["input_ids"] = tensors.pop("input_ids").flatten().tolist()
    return tensors, said


def _load_pt(name: str, data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    import torch

    if torch_version() < SAFE_TORCH:
        raise LegacyUnreadable(
            f"{name}: torch {torch.__version__} is older than {'.'.join(map(str, SAFE_TORCH))}, "
            "so .pt files are not read; let the server write .safetensors"
        )
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted or torn file can raise anything: whatever it is, it is refused
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise LegacyUnreadable(f"{name} is refused by torch.load(weights_only=True): {line[:120]}") from error
    if isinstance(loaded, torch.Tensor):
        loaded = {"": loaded}
    if not isinstance(loaded, dict):
        raise LegacyUnreadable(f"{name} holds a {type(loaded).__name__}, no tensors")
    tensors, said = {}, dict(loaded["meta"]) if isinstance(loaded.get("meta"), dict) else {}
    for key, value in loaded.items():
        if key == "input_ids":
            tensor = _plain(name, value, len(data)) if isinstance(value, torch.Tensor) else None
            said[key] = tensor.flatten().tolist() if tensor is not None else value
        elif isinstance(value, torch.Tensor):
            tensors[str(key)] = _plain(name, value, len(data))
        elif key in ("num_tokens", "forward_mode", "rid"):
            said[key] = value
    return tensors, said


def _plain(name: str, tensor: Tensor, file_bytes: int) -> Tensor:
    """A dense tensor of its own memory. A view may claim to be larger than the file that it came in."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise LegacyUnreadable(f"{name} holds a tensor that is not dense")
    if tensor.numel() * tensor.element_size() > file_bytes:
        raise LegacyUnreadable(f"{name} claims more numbers than it has bytes")
    return tensor.detach().contiguous().clone()


def torch_version() -> tuple[int, ...]:
    """(major, minor) of the torch that is here."""
    import torch

    return tuple(int(re.sub(r"\D.*", "", part) or 0) for part in torch.__version__.split(".")[:2])
