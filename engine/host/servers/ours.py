"""Whether a server may be stopped by us, and if not, why; how a systemd unit of ours is driven."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.wire.errors import Refused

if TYPE_CHECKING:
    from engine.host.processes import ServerProcess

SUPERVISORS = frozenset(
    {"supervisord", "runsv", "s6-supervise", "circusd", "pm2", "monit", "nomad", "slurmstepd", "raylet"}
    | {"containerd-shim", "conmon", "docker-init", "dumb-init", "kubelet"}
)
"""Parents that would start a stopped server again behind our back."""
_LOGINS = frozenset({"ssh.service", "sshd.service", "cron.service", "crond.service"})
"""Units that a process is only left over in: they do not restart it."""


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def unit_of(server: ServerProcess) -> str | None:
    """The unit that would bring it back; the units that our own runs are wrapped in are none."""
    unit = server.unit
    return None if unit is None or unit in _LOGINS or unit.startswith("hsx-") else unit


def refusal(server: ServerProcess, unit: str | None) -> Refused | None:
    """Why we must leave ``server`` alone; None if it is ours to restart.

    Args:
        unit: the systemd service that the configuration names for it.
    """
    who = f"server pid {server.id.pid}"
    if server.uid != os.geteuid():
        return Refused(f"{who} belongs to user {server.user}", "it is not ours", "log in as that user")
    if server.container:
        return Refused(
            f"{who} runs in a container",
            "its interpreter, its /dev/shm and the plugin's path are out of reach from here",
            "restart it where it was started; see docs/servers.md for the bind mounts",
        )
    if not server.argv or server.cwd is None or server.env is None:
        return Refused(
            f"{who} cannot be described",
            "its argv, folder or environment cannot be read",
            "restart it by hand",
        )
    its_unit = unit_of(server)
    if its_unit is not None and its_unit != _full(unit):
        return Refused(
            f"{who} is under the systemd unit {its_unit}",
            "the unit would start it again",
            f'write unit = "{its_unit}" into its table of the configuration',
        )
    parents = [name for name in map(_comm, server.parents) if name in SUPERVISORS]
    if parents and its_unit is None:
        return Refused(
            f"{who} is under {parents[0]}", "that would start it again", f"use {parents[0]} to do it"
        )
    return None


def _full(unit: str | None) -> str | None:
    return unit if unit is None or unit.endswith(".service") else f"{unit}.service"


def systemctl(verb: str, unit: str, *, user: bool) -> list[str]:
    """The argv that drives a unit; it asks for no password. ``user``: in the user's own manager."""
    scope = ["--user"] if user else []
    return ["systemctl", *scope, "--no-ask-password", verb, "--", _full(unit) or unit]
