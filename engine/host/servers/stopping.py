"""Ending a server: its launcher is asked, then pressed; done when its port and its GPUs are free again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

from engine.host.processes import ServerProcess, server_process
from engine.host.servers.ports import listeners
from engine.wire.errors import DeadlineExceeded, Refused
from engine.wire.procid import ProcessId

POLL_S = 0.1
KILLED_S = 10.0
PORT_S = 30.0
GPU_S = 120.0
SMI_S = 5.0

Say = Callable[[str], None]


def check_identity(before: ServerProcess, now: ServerProcess | None) -> None:
    """Refused, with both identities, when the process is not the one that the plan was about."""
    if now is not None and (now.id, now.model) == (before.id, before.model):
        return
    found = "no process" if now is None else f"pid {now.id.pid} start {now.id.start} model {now.model}"
    raise Refused(
        f"the server changed: expected pid {before.id.pid} start {before.id.start} model {before.model}",
        f"found {found}",
        "look at it again with server status",
    )


def tree_of(server: ServerProcess) -> list[ProcessId]:
    """The launcher and its workers, by identity."""
    workers = (ProcessId.of(pid) for pid in server.children)
    return [server.id, *(w for w in workers if w is not None)]


def stop_server(
    server: ServerProcess, tree: Iterable[ProcessId], grace: tuple[float, float], say: Say
) -> None:
    """TERM to the launcher (it drains), INT after grace[0] s, KILL to the tree after grace[1] s more.

    The identity is read again just before the first signal, and each signal goes through a pidfd.
    Raises Refused when it changed, DeadlineExceeded when it outlives a KILL.
    """
    check_identity(server, server_process(server.id.pid))
    processes = [server.id, *tree]
    for signum, wait_s in ((signal.SIGTERM, grace[0]), (signal.SIGINT, grace[1])):
        say(f"{signum.name} to pid {server.id.pid}, up to {wait_s:g} s")
        server.id.send(signum)
        if _wait(lambda: not server.id.alive(), wait_s):
            break
    # What the launcher left behind, or what did not heed it.
    for process in processes:
        if process.alive():
            say(f"SIGKILL to pid {process.pid}")
            process.send(signal.SIGKILL)
    if not _wait(lambda: not any(p.alive() for p in processes), KILLED_S):
        left = [p.pid for p in processes if p.alive()]
        raise DeadlineExceeded(
            f"processes {left} outlive a SIGKILL", "the kernel holds them, most likely in a driver",
            "look at dmesg and nvidia-smi on the host",
        )  # fmt: skip


def wait_released(port: int, pids: set[int], say: Say) -> None:
    """Until nobody listens on ``port`` and no GPU names one of ``pids``. Raises DeadlineExceeded."""
    if not _wait(lambda: not listeners(port), PORT_S):
        raise DeadlineExceeded(f"port {port} is still in use", "another process listens there", "stop it")
    if shutil.which("nvidia-smi") is None:
        say("port free; no nvidia-smi here, so nothing is known of GPU memory")
        return
    if not _wait(lambda: not pids & _gpu_pids(), GPU_S, 1.0):
        raise DeadlineExceeded(
            "GPU memory is not released", f"nvidia-smi still names {sorted(pids & _gpu_pids())}", "end them"
        )
    say("port and GPU memory free")


def _gpu_pids() -> set[int]:
    """Processes that hold GPU memory; empty when nvidia-smi does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            capture_output=True, timeout=SMI_S, check=False, env=os.environ,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return set()
    return {int(line) for line in done.stdout.split() if line.isdigit()}


def _wait(done: Callable[[], bool], limit_s: float, poll_s: float = POLL_S) -> bool:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
