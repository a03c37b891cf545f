"""manifest.json: what a store was made from. Written first, atomically, never changed (formats.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.store.files import write_atomic
from engine.wire.errors import IdentityError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION = 1
_LOCKS = (".hsx.lock", ".hsx.owner")
Manifest = dict[str, Any]


def build_manifest(
    *,
    target: Mapping[str, Any],
    taps: tuple[int, ...],
    last: str | None,
    dtype: str,
    attribution: str,
    dataset: Mapping[str, Any],
    tokenizer_sha256: str,
    chat_template: Mapping[str, Any],
    linear_attention: str | None = None,
) -> Manifest:
    """The identity of a store, in plain JSON types."""
    return {
        "format_version": FORMAT_VERSION,
        "target": dict(target),
        "taps": list(taps),
        "last": last,
        "dtype": dtype,
        "attribution": attribution,
        "linear_attention": linear_attention,
        "dataset": dict(dataset),
        "tokenizer": {"sha256": tokenizer_sha256},
        "chat_template": dict(chat_template),
    }


def read_manifest(store: Path) -> Manifest | None:
    """The manifest of a store; None when there is none yet."""
    path = store / "manifest.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot read {path}", str(error), "restore it from a copy: it says what the data are"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("format_version"), int):
        raise StoreError(f"{path} is not a manifest", "format_version is missing", "is this folder a store?")
    if data["format_version"] > FORMAT_VERSION:
        raise StoreError(
            f"{store} has format version {data['format_version']}",
            f"this engine reads up to {FORMAT_VERSION}",
            "use a newer engine",
        )
    return data


def check(store: Path, wanted: Manifest) -> bool:
    """Whether the store has its manifest, and it says what ``wanted`` says. Changes nothing.

    Raises IdentityError when they differ (every difference is listed) or when a folder without a manifest
    has files of another's.
    """
    found = read_manifest(store)
    if found is None:
        foreign = [p.name for p in _entries(store) if p.name not in _LOCKS and not _is_leftover(p)]
        if foreign:
            raise IdentityError(
                f"{store} has files but no manifest",
                f"it is not a store, or its manifest was lost (there is {min(foreign)})",
                "choose an empty folder",
            )
        return False
    differ = differences(found, wanted)
    if differ:
        raise IdentityError(
            f"the store {store} was made from something else",
            "; ".join(differ),
            "choose another store, or run with what it was made from",
        )
    return True


def claim(store: Path, wanted: Manifest) -> Manifest:
    """Write the manifest, or compare with the one that is there; gives back what the store has now.

    Raises IdentityError as ``check`` does, and then nothing was changed; StoreError.
    """
    if not check(store, wanted):
        for entry in _entries(store):
            if _is_leftover(entry):
                entry.unlink(missing_ok=True)
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(store / "manifest.json", json.dumps(wanted, indent=1, sort_keys=True).encode() + b"\n")
        return wanted
    found = read_manifest(store)
    assert found is not None
    return found


def _entries(store: Path) -> list[Path]:
    return list(store.iterdir()) if store.exists() else []


def _is_leftover(path: Path) -> bool:
    """A file that a kill in the middle of an atomic write left."""
    return path.name.startswith(".tmp-") and not path.is_symlink() and path.is_file()


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every differing field, as ``path: there ... here ...``."""
    out = []
    for key in sorted(set(found) | set(wanted)):
        name, a, b = f"{prefix}{key}", found.get(key), wanted.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differences(a, b, name + ".")
        elif a != b and key in wanted:  # extra keys of a found manifest are a newer writer's
            out.append(f"{name}: the store has {a!r}, this run has {b!r}")
    return out
