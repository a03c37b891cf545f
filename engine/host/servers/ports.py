"""Who listens on a port of this host, read from /proc/net: no connection is made."""

from __future__ import annotations

import os
from pathlib import Path

from engine.host.processes import ServerProcess, find_servers

_LISTEN = "0A"


def parse_listeners(table: str, port: int) -> set[str]:
    """Socket inodes that listen on ``port``, of /proc/net/tcp or tcp6."""
    found = set()
    for line in table.splitlines()[1:]:
        cells = line.split()
        if len(cells) > 9 and cells[3] == _LISTEN and int(cells[1].rpartition(":")[2], 16) == port:
            found.add(cells[9])
    return found


def listeners(port: int) -> set[str]:
    """The inodes of sockets that listen on ``port``; empty when it is free."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            found |= parse_listeners(Path("/proc/net", name).read_text(), port)
        except OSError:
            continue  # a host without IPv6
    return found


def _holds(pid: int, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in wanted:
                return True
        except OSError:
            continue
    return False


def server_at(port: int) -> ServerProcess | None:
    """The server that listens on ``port``, or was told to and is still loading."""
    servers, inodes = find_servers(), listeners(port)
    if inodes:
        for server in servers:
            if any(_holds(pid, inodes) for pid in (server.id.pid, *server.children)):
                return server
    return next((s for s in servers if s.port == port), None)
