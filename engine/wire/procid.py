"""Which process a record means: pid, start time and boot id, so that a reused pid is never taken for the old
one.

This is the form of sup.json, child.json and host.json. Linux: it reads /proc.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When ``pid`` was started, in clock ticks since boot; None if it is gone.

    A zombie counts as gone: in containers nobody may ever reap it, and ``kill(pid, 0)`` would call it alive.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The parent of ``pid``, zombies included; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


@dataclass(frozen=True)
class ProcessId:
    """One process of one boot. ``start``: field 22 of /proc/PID/stat."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has ``pid`` now; None if there is none."""
        start = start_time(pid)
        return None if start is None else cls(pid, start, boot_id())

    @classmethod
    def from_json(cls, data: object) -> ProcessId | None:
        """Read a record; None if it is not one."""
        if not isinstance(data, dict):
            return None
        pid, start, boot = data.get("pid"), data.get("start"), data.get("boot")
        if not isinstance(pid, int) or not isinstance(start, int) or not isinstance(boot, str) or pid <= 0:
            return None
        return cls(pid, start, boot)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"pid": self.pid, "start": self.start, "boot": self.boot}

    def alive(self) -> bool:
        """Whether this very process runs."""
        return self.boot == boot_id() and start_time(self.pid) == self.start

    def send(self, signum: signal.Signals) -> bool:
        """Signal this very process; False if it is gone.

        The pid is pinned by a pidfd before its start time is compared, so that it cannot be reused in
        between.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            return self._send_old(signum)
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def send_group(self, signum: signal.Signals) -> bool:
        """Signal the process group that this process leads; False if it is gone."""
        if not self.alive():
            return False
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def _send_old(self, signum: signal.Signals) -> bool:
        """Kernels before 5.3 have no pidfd: a small race remains between look and kill."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True
