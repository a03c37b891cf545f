"""What a server is to be started as: as it was, as the configuration says, or so that it captures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.host import args as arg
from engine.host.servers.command import allowed_env, flag, model_of, port_of
from engine.host.servers.description import ORIGINAL, SAVED, Description, read_description
from engine.host.servers.program import plugin_of
from engine.host.servers.target import Target, target_from
from engine.wire.errors import Refused, SpecError

ACTIONS = ("start", "stop", "restart")


@dataclass(frozen=True)
class Order:
    """What a job is asked to do.

    Attributes:
        taps: of a restart as a capture server; None for any other.
        restore: put the ordinary server back.
        expected: the identity {"pid", "start", "boot"} that the plan showed; None when it showed none.
        deadline_s: how long a load may take.
        grace: seconds from TERM to INT and from INT to KILL.
    """

    target: Target
    action: str
    taps: tuple[int, ...] | None = None
    restore: bool = False
    expected: Mapping[str, Any] | None = None
    deadline_s: float = 1500.0
    grace: tuple[float, float] = (60.0, 15.0)

    @property
    def key(self) -> str:
        """Equal for orders that a repeated call would give again."""
        taps = "" if self.taps is None else f" capture {' '.join(map(str, self.taps))}"
        return f"{self.action}{taps}{' restore' if self.restore else ''}"


def order_from(args: Mapping[str, Any]) -> Order:
    """Read an order. Raises SpecError."""
    action = arg.text(args, "action")
    if action not in ACTIONS:
        raise SpecError(f"bad action {action!r}", f"it is one of {', '.join(ACTIONS)}")
    taps = args.get("taps")
    if taps is not None and (
        not isinstance(taps, list) or not taps or any(type(t) is not int or t < 0 for t in taps)
    ):
        raise SpecError(f"bad taps {taps!r}", "they are 0-based layer numbers")
    expected = args.get("expected")
    if expected is not None and not isinstance(expected, Mapping):
        raise SpecError("bad expected", "it is the identity of a process")
    restore = args.get("restore") is True
    if (action != "restart" and (restore or taps is not None)) or (restore and taps is not None):
        raise SpecError("capture and restore are two ways of a restart", "", "give one of them")
    return Order(
        target_from(args.get("server")),
        action,
        None if taps is None else tuple(taps),
        restore,
        expected,
        arg.seconds(args.get("deadline_s", 1500.0), "deadline_s"),
        arg.grace(args),
    )


def configured(target: Target) -> Description | None:
    """As the configuration's ``launch`` has it, with the login's environment."""
    if not target.launch:
        return None
    env, home = allowed_env(os.environ), os.environ.get("HOME", "/")
    return Description(target.launch, env, home, port_of(target.launch), model_of(target.launch))


def wanted(order: Order, running: Description | None) -> Description:
    """What the server will be started as. ``running``: as it is now or was before the stop.

    Raises Refused when that is not known.
    """
    target, folder = order.target, order.target.folder
    if order.restore:
        original = read_description(folder / ORIGINAL)
        if original is None:
            raise Refused(f"server {target.name} has nothing to be put back to", "it was not changed by us")
        return original
    saved = read_description(folder / ORIGINAL) if order.action == "start" else None
    base = running or saved or configured(target) or read_description(folder / SAVED)
    if order.action == "start" and saved is None and configured(target) is not None:
        base = configured(target)
    if base is None:
        raise Refused(
            f"server {target.name} does not run and nobody saw how it was started",
            "the configuration has no launch",
            f"add launch = [...] to [servers.{target.name}]",
        )
    if order.taps is None:
        return _at_port(base, target)
    return _at_port(capturing(read_description(folder / ORIGINAL) or base, target, order.taps), target)


def _at_port(server: Description, target: Target) -> Description:
    """The server where the configuration expects it: one that was told to take any port gets that one.

    Raises Refused for any other port.
    """
    if flag(server.argv, "--port") == "0":
        argv = (*server.argv, "--port", str(target.port))
        return replace(server, argv=argv, port=target.port)
    if server.port != target.port:
        raise Refused(
            f"server {target.name} would listen at port {server.port}",
            f"its url says {target.port}",
            f"correct url or launch of [servers.{target.name}]",
        )
    return server


def capturing(base: Description, target: Target, taps: tuple[int, ...]) -> Description:
    """``base`` with the plugin's variables and flags. Raises Refused where it cannot capture so."""
    if target.dump_dir is None:
        raise Refused(
            f"server {target.name} has no dump_dir",
            "a capture server needs a folder to dump into",
            "add a private one in /dev/shm to the configuration",
        )
    if flag(base.argv, "--speculative-algorithm") is not None:
        raise Refused(
            f"server {target.name} speculates",
            "its --speculative-algorithm and the capture exclude each other",
            "start one without a drafter for the job",
        )
    added = plugin_of(base.env, target.dump_dir, taps)
    environment, flags = dict(added["environment"]), list(added["flags"])
    argv = list(base.argv)
    if "--enable-return-aux-hidden-states" in argv:
        raise Refused(f"server {target.name} captures already", "its argv has the flags", "use it as it is")
    at = argv.index("-m") if "-m" in argv[:4] else 0
    if at and argv[at + 1] == "sglang.launch_server" and {"-E", "-I"} & set(argv[1:at]):
        plugin = environment["PYTHONPATH"].split(":")[0]
        argv[at : at + 2] = [str(Path(plugin) / "hsx_capture" / "launch.py")]
    return replace(base, argv=(*argv, *flags), env={**base.env, **environment}, id=None, info={}, at=base.at)
