"""The SGLang servers that run on this host, read from /proc: who they are, how they were started, by whom.

Nothing is asked over HTTP and nothing is changed. A server in a container is seen from the host only by its
processes: its interpreter, /dev/shm and plugin path are out of reach (docs/servers.md has the way round).
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.host.servers.command import allowed_env, is_launch, masked, model_of, port_of
from engine.wire.procid import ProcessId, boot_id

MAX_BYTES = 1 << 20
"""Of one file of /proc."""

_UNIT = re.compile(r"/([A-Za-z0-9:_.@\\-]+\.service)(?:/|\Z)")


@dataclass(frozen=True)
class ServerProcess:
    """One server: its launcher process.

    Attributes:
        uid, user: whose it is; ``user`` is the number where it has no name here.
        argv: as typed, secrets and all: show ``to_json`` instead. Empty when it may not be read.
        env: the allow-list of its environment; None when it may not be read.
        interpreter: argv[0] made absolute, the link of a virtual environment left as it is.
        started_at: seconds since the epoch.
        parents: pids from its parent up to 1. children: pids of its workers.
        unit: the systemd service that it belongs to. user_unit: one of its user's own manager.
        container: it has a mount namespace of its own, with another root or another /dev/shm than ours.
    """

    id: ProcessId
    uid: int
    user: str
    argv: tuple[str, ...]
    env: dict[str, str] | None
    cwd: str | None
    interpreter: str | None
    port: int
    model: str | None
    started_at: float | None
    parents: tuple[int, ...]
    children: tuple[int, ...]
    unit: str | None
    container: bool
    user_unit: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; argv is masked."""
        return {
            **self.id.to_json(),
            "uid": self.uid,
            "user": self.user,
            "argv": masked(self.argv),
            "env": self.env,
            "cwd": self.cwd,
            "interpreter": self.interpreter,
            "port": self.port,
            "model": self.model,
            "started_at": self.started_at,
            "parents": list(self.parents),
            "children": list(self.children),
            "unit": self.unit,
            "container": self.container,
            "user_unit": self.user_unit,
        }


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says: state letter, parent, start (clock ticks since boot)."""

    state: str
    parent: int
    start: int


def parse_stat(data: bytes) -> Stat | None:
    """/proc/PID/stat. The name in parentheses may hold anything, also parentheses."""
    end = data.rfind(b")")
    fields = data[end + 2 :].split()
    if end < 0 or len(fields) < 20:
        return None
    return Stat(fields[0].decode("ascii", "replace"), int(fields[1]), int(fields[19]))


def parse_argv(data: bytes) -> tuple[str, ...]:
    """/proc/PID/cmdline."""
    text = data.decode("utf-8", "surrogateescape")
    return tuple(text.removesuffix("\0").split("\0")) if text.strip("\0") else ()


def parse_environ(data: bytes) -> dict[str, str]:
    """/proc/PID/environ."""
    pairs = (item.partition("=") for item in data.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def parse_unit(cgroup: str) -> str | None:
    """The innermost service of /proc/PID/cgroup (v1 and v2); the user's own manager is none."""
    units = [name for line in cgroup.splitlines() for name in _UNIT.findall(line.split(":", 2)[-1])]
    services = [name for name in units if not name.startswith("user@")]
    return services[-1] if services else None


def _bytes(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return None


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _stats(proc: Path) -> dict[int, Stat]:
    """Every process that is no zombie."""
    found = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            stat = parse_stat(_bytes(entry / "stat") or b"")
            if stat is not None and stat.state not in "ZX":
                found[int(entry.name)] = stat
    return found


def _parents(pid: int, stats: dict[int, Stat]) -> tuple[int, ...]:
    chain: list[int] = []
    at = stats.get(pid)
    while at is not None and at.parent > 0 and at.parent not in chain:
        chain.append(at.parent)
        at = stats.get(at.parent)
    return tuple(chain)


def _absolute(argv: tuple[str, ...], cwd: str | None, env: dict[str, str] | None) -> str | None:
    """argv[0] as a path; a bare name is looked for in the process's own PATH."""
    first = argv[0] if argv else ""
    if first.startswith("/") or not first:
        return first or None
    if "/" in first:
        return os.path.normpath(os.path.join(cwd, first)) if cwd else None
    for folder in (env or {}).get("PATH", "").split(":"):
        if folder.startswith("/") and os.access(os.path.join(folder, first), os.X_OK):
            return os.path.join(folder, first)
    return None


def _started_at(start: int, proc: Path) -> float | None:
    for line in (_bytes(proc / "stat") or b"").splitlines():
        if line.startswith(b"btime "):
            return int(line.split()[1]) + start / os.sysconf("SC_CLK_TCK")
    return None


def _out_of_reach(place: Path, proc: Path) -> bool:
    """Whether it sees another root or another /dev/shm than we: a container. A mount namespace alone is none;
    systemd gives one to a service with PrivateTmp."""
    mine, theirs = _link(proc / "self/ns/mnt"), _link(place / "ns/mnt")
    if mine is None or theirs is None or mine == theirs:
        return False
    try:
        return not all(os.path.samefile(place / "root" / name, Path("/", name)) for name in (".", "dev/shm"))
    except OSError:
        return True


def _server(pid: int, argv: tuple[str, ...], stats: dict[int, Stat], proc: Path) -> ServerProcess | None:
    place, stat = proc / str(pid), stats[pid]
    raw = _bytes(place / "environ")
    whole = parse_environ(raw) if raw is not None else None
    cwd, cgroup = _link(place / "cwd"), (_bytes(place / "cgroup") or b"").decode("ascii", "replace")
    try:
        uid = place.stat().st_uid
    except OSError:
        return None  # it has ended meanwhile
    return ServerProcess(
        ProcessId(pid, stat.start, boot_id()),
        uid,
        _user(uid),
        argv,
        allowed_env(whole) if whole is not None else None,
        cwd,
        _absolute(argv, cwd, whole),
        port_of(argv),
        model_of(argv),
        _started_at(stat.start, proc),
        _parents(pid, stats),
        tuple(sorted(p for p in stats if pid in _parents(p, stats))),
        parse_unit(cgroup),
        _out_of_reach(place, proc),
        "/user@" in cgroup,
    )


def find_servers(proc: Path = Path("/proc")) -> list[ServerProcess]:
    """Every server whose argv can be read, of any user, by pid; workers are with their launcher.

    Args:
        proc: where procfs is.
    """
    stats = _stats(proc)
    argvs = {pid: parse_argv(_bytes(proc / str(pid) / "cmdline") or b"") for pid in stats}
    launches = {pid for pid, argv in argvs.items() if is_launch(argv)}
    heads = [pid for pid in sorted(launches) if not launches & set(_parents(pid, stats))]
    found = (_server(pid, argvs[pid], stats, proc) for pid in heads)
    return [server for server in found if server is not None]


def server_process(pid: int, proc: Path = Path("/proc")) -> ServerProcess | None:
    """The server whose launcher is ``pid``, now."""
    return next((server for server in find_servers(proc) if server.id.pid == pid), None)
