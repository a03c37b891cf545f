"""The engine as one content-addressed bundle, its installation on a host, and the argv that runs it there."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import engine.wire
from engine.wire.errors import HsxError, LinkLost, RemoteError
from hsx_tui.deploy.address import EngineInstall

if TYPE_CHECKING:
    from hsx_tui.deploy.session import Session

SUFFIXES = frozenset({".py", ".json", ".jsonl"})

LAUNCHER = (
    "import sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from engine.__main__ import main\n"
    "sys.exit(main(sys.argv[2:]))"
)
"""Runs the engine from its folder in an interpreter that is otherwise left as it is."""


def engine_argv(python: str, engine_dir: str, *args: str) -> list[str]:
    """The argv that runs ``python -m engine ARGS`` from an installed engine.

    ``-I`` keeps the host's PYTHONPATH and user packages out, ``-B`` leaves no bytecode in the verified
    folder.
    """
    return [python, "-I", "-B", "-c", LAUNCHER, engine_dir, *args]


@dataclass(frozen=True)
class Bundle:
    """A deterministic tar.gz of the package, named by the sha256 of its manifest."""

    id: str
    data: bytes


def _tar(members: list[tuple[str, bytes]]) -> bytes:
    raw = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=6) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(content), 0o644, 0
                tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def make_bundle(package: Path) -> Bundle:
    """Bundle the package at ``package`` (a folder named engine): its code and its data files, sorted.

    Raises HsxError if a file cannot be read.
    """
    try:
        files = {
            f"{package.name}/{path.relative_to(package).as_posix()}": path.read_bytes()
            for path in sorted(package.rglob("*"))
            if (path.suffix in SUFFIXES or path.parent.suffix == ".dist-info")
            and path.is_file()
            and "__pycache__" not in path.parts
        }
    except OSError as error:
        raise HsxError("the engine's files cannot be read", str(error), "reinstall hsx-console") from error
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps(hashes, sort_keys=True, separators=(",", ":")).encode()
    data = _tar([("MANIFEST.json", manifest), *sorted(files.items())])
    return Bundle(hashlib.sha256(manifest).hexdigest(), data)


@cache
def engine_bundle() -> Bundle:
    """The bundle of the engine that belongs to this console."""
    return make_bundle(Path(engine.wire.__file__).parent.parent)


async def install_engine(
    session: Session, bundle: Bundle | None = None, *, deadline_s: float = 120
) -> EngineInstall:
    """Make sure that the engine lies on the host, verified byte by byte, and bind ``session`` to it.

    One exec; one round trip when it is there already. Safe to repeat. Raises Refused, RemoteError, LinkLost,
    DeadlineExceeded.
    """
    bundle = bundle or engine_bundle()
    async with session.open("install", id=bundle.id, size=len(bundle.data), deadline_s=deadline_s) as call:
        answer = await call.answer()
        if answer.get("state") == "send":
            call.send(bundle.data)
            answer = await call.answer()
        await call.finish()
    if answer.get("id") != bundle.id:
        raise RemoteError("the host confirmed another engine than was sent")
    try:
        installed = EngineInstall(
            *(_text(answer, k) for k in ("id", "dir", "state", "python", "python_version"))
        )
    except KeyError as error:
        raise LinkLost("the host's answer to install is malformed", f"no {error}") from error
    session.engine = installed
    return installed


def _text(answer: dict[str, object], key: str) -> str:
    value = answer[key]
    if not isinstance(value, str):
        raise RemoteError("the host's answer to install is malformed", f"{key} is {value!r}")
    return value
