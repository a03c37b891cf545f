"""The code that the console sends ahead of each request. It runs on the host and is never imported here.

It reads the request line, answers ``install`` by itself (there is no engine yet) and hands every other verb
to the installed engine. It keeps to the Python of 3.7, so that an old interpreter gives an answer, not a
traceback.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

MAX_BUNDLE = 64 << 20


def reply(nonce: str, answer: dict) -> None:  # type: ignore[type-arg]
    out = sys.stdout.buffer
    out.write(json.dumps(answer).encode() + b"\n>>" + nonce.encode() + b"\n")
    out.flush()


def refuse(kind: str, what: str, why: object = "", then: str = "") -> dict:  # type: ignore[type-arg]
    return {"ok": False, "error": {"kind": kind, "what": what, "why": str(why), "next": then}}


def private(path: Path) -> Path:
    """Make ``path`` a folder that only we can write; OSError if it is somebody else's."""
    path.mkdir(0o700, parents=True, exist_ok=True)
    st = path.lstat()
    if path.is_symlink() or st.st_uid != os.getuid() or st.st_mode & 0o022:
        raise OSError(f"{path} is not a private folder of ours")
    return path


def engine_root() -> Path:
    """The folder of installed engines: under the cache folder, else (HOME unwritable) under /var/tmp."""
    given = os.environ.get("XDG_CACHE_HOME")
    cache = Path(given) if given else Path("~/.cache").expanduser()
    try:
        cache.mkdir(0o700, parents=True, exist_ok=True)
        base = private(cache / "hsx")
        if not os.access(base, os.W_OK | os.X_OK):
            raise OSError(f"{base} is not writable")
    except OSError:
        base = private(Path(f"/var/tmp/hsx-{os.getuid()}"))
    return private(base / "engine")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check(folder: Path, want: str) -> str | None:
    """None if ``folder`` holds exactly the bundle ``want``, else what is wrong."""
    if not folder.is_dir():
        return "absent"
    try:
        for cache in list(folder.rglob("__pycache__")):  # some process of ours ran without -B
            shutil.rmtree(str(cache))
        manifest = (folder / "MANIFEST.json").read_bytes()
        if digest(manifest) != want or not (folder / ".ok").exists():
            return "incomplete"
        files = json.loads(manifest)
        for name, sha in files.items():
            if digest((folder / name).read_bytes()) != sha:
                return f"changed: {name}"
        found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    except OSError as error:
        return f"unreadable: {error}"
    extra = sorted(found - set(files) - {"MANIFEST.json", ".ok"})
    return f"extra file: {extra[0]}" if extra else None


def unpack(data: bytes, want: str, folder: Path) -> None:
    """Write a bundle into the new folder ``folder`` and check it; ValueError says what is wrong with it."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        for member in tar:
            parts = member.name.split("/")
            content = tar.extractfile(member) if member.isreg() else None
            if content is None or ".." in parts or "" in parts:
                raise ValueError(f"it has the member {member.name!r}")
            path = folder.joinpath(*parts)
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with path.open("xb") as f:
                f.write(content.read())
    manifest = (folder / "MANIFEST.json").read_bytes()
    if digest(manifest) != want:
        raise ValueError("its manifest has another hash than announced")
    for name, sha in json.loads(manifest).items():
        code = (folder / name).read_bytes()
        if digest(code) != sha:
            raise ValueError(f"{name} has another hash than its manifest says")
        if name.endswith(".py"):
            compile(code, name, "exec", dont_inherit=True)
    os.sync()
    (folder / ".ok").touch(0o600)


def place(folder: Path, final: Path, want: str) -> str:
    """Rename a checked folder to its final name; whoever comes second finds the same bytes there."""
    try:
        folder.rename(final)
        return "installed"
    except OSError:
        if check(final, want) is None:
            return "raced"
    aside = Path(tempfile.mkdtemp(prefix=".bad.", dir=str(final.parent)))
    final.rename(aside / "engine")
    folder.rename(final)
    shutil.rmtree(str(aside), ignore_errors=True)
    return "replaced"


def install(args: dict) -> dict:  # type: ignore[type-arg]
    """Say whether the bundle is there; if not, take it from stdin. One round trip when it is there."""
    want, size = args["id"], args["size"]
    if len(want) != 64 or set(want) - set("0123456789abcdef") or not 0 < size <= MAX_BUNDLE:
        return refuse("SpecError", "bad id or size of the engine bundle")
    root = engine_root()
    final = root / want
    wrong = check(final, want)
    version = ".".join(map(str, sys.version_info[:3]))
    answer = {
        "ok": True, "id": want, "dir": str(final), "state": "present", "found": wrong,
        "python": sys.executable, "python_version": version,
    }  # fmt: skip
    if wrong is None:
        return answer
    sys.stdout.buffer.write(b'{"ok": true, "state": "send"}\n')
    sys.stdout.buffer.flush()
    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        return refuse("RemoteError", "the engine bundle arrived incomplete", f"{len(data)} of {size} bytes")
    tmp = Path(tempfile.mkdtemp(prefix=".tmp.", dir=str(root)))
    try:
        unpack(data, want, tmp)
        answer["state"] = place(tmp, final, want)
    except (ValueError, SyntaxError, EOFError, tarfile.TarError) as error:
        return refuse("RemoteError", "the host refused the engine bundle", error, "try again")
    finally:
        shutil.rmtree(str(tmp), ignore_errors=True)
    return answer


def engine_problem(folder: Path) -> dict | None:  # type: ignore[type-arg]
    """Why the engine in ``folder`` may not be run; None if it may."""
    if not folder.is_absolute() or not (folder / ".ok").exists():
        return refuse("Refused", "the engine is not installed on this host", folder, "install it again")
    st = folder.stat()
    if st.st_uid != os.getuid() or st.st_mode & 0o022:
        return refuse("Refused", "the engine's folder is not ours alone", folder, "remove it")
    return None


def main() -> int:
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    nonce = request["nonce"]
    # The shell's start-up files may have printed anything before this line; what counts begins after it.
    sys.stdout.buffer.write(b"\n<<" + nonce.encode() + b"\n")
    sys.stdout.buffer.flush()
    if tuple(sys.version_info[:2]) < (3, 10):
        found = f"{sys.executable} is {sys.version.split()[0]}"
        reply(
            nonce, refuse("Refused", "the host's python3 is too old", found, "install Python >= 3.10 there")
        )
        return 0
    if request["verb"] == "install":
        try:
            answer = install(request["args"])
        except OSError as error:
            answer = refuse(
                "Refused", "the engine cannot be installed", error, "make room in the home folder"
            )
        reply(nonce, answer)
        return 0
    problem = engine_problem(Path(request["engine"]))
    if problem is not None:
        reply(nonce, problem)
        return 0
    sys.path.insert(0, request["engine"])
    serve = importlib.import_module("engine.host.verbs").main
    return int(serve(request, sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    sys.exit(main())
