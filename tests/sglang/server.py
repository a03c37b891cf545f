"""A real SGLang server as a process of its own, with the capture plugin, on loopback, ended by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from engine.capture import plugin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
LOAD_S = 300.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Server:
    """One server. ``extra``: flags; ``env``: variables; ``isolated``: python -E and the plugin's launcher."""

    model: Path
    dump_dir: Path
    log: Path
    taps: Sequence[int]
    extra: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: str = "hsx_capture,hsx_cpu_shim"
    capture: bool = True
    isolated: bool = False
    context_length: int = 2048
    threads: int = 1
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    shared: set[Path] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Its argv."""
        args = [
            "--model-path", str(self.model), "--device", "cpu", "--attention-backend", "torch_native",
            "--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init", "--dtype", "float32",
            "--context-length", str(self.context_length), "--sleep-on-idle",
            *(plugin.server_flags(self.taps) if self.capture else ()), *self.extra,
        ]  # fmt: skip
        if self.isolated:
            return plugin.isolated_command(str(PYTHON), args)
        return [str(PYTHON), "-m", "sglang.launch_server", *args]

    def environment(self) -> dict[str, str]:
        """A small environment, and the plugin's variables."""
        base = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        base |= {
            "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PLUGINS": self.plugins, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        return base | plugin.server_environment(base, str(self.dump_dir)) | dict(self.env)

    def start(self) -> Server:
        """Start it; ``wait`` waits until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return self

    def wait(self) -> Server:
        """Until /ready says 200."""
        assert self.process is not None
        end = time.monotonic() + LOAD_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                    self.shared |= self.shared_memory()  # a scheduler that is killed cannot be asked
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        tail = self.log.read_text(errors="replace")[-3000:]
        self.stop()
        raise AssertionError(f"the server did not become ready:\n{tail}")

    def pids(self) -> list[int]:
        """Its processes: those of the session that it was started in, also after its first one has died."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                except OSError:
                    continue
                fields = stat.rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def scheduler_pid(self) -> int:
        """The process that computes."""
        for pid in self.pids():
            if _command(pid).startswith(b"sglang::scheduler"):
                return pid
        raise AssertionError("no scheduler process")

    def shared_memory(self) -> set[Path]:
        """The files of /dev/shm that its processes have open or mapped: ours to remove, by name."""
        files = set()
        for pid in self.pids():
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            files |= {line.split(None, 5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
        names = {name.removesuffix(" (deleted)") for name in files}
        return {Path(name) for name in names if Path(name).parent == Path("/dev/shm")}

    def kill(self) -> None:
        """SIGKILL to every process of it, and its shared memory removed."""
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, wait for all of its processes, remove the shared memory that it leaves behind."""
        if self.process is None:
            return
        self.shared |= self.shared_memory()
        try:
            if number != signal.SIGKILL:
                self.process.send_signal(number)
                self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            pass
        # The resource tracker removes named semaphores once all others are gone, if it is let live so long.
        trackers = [pid for pid in self.pids() if b"resource_tracker" in _command(pid)]
        for pid in set(self.pids()) - set(trackers):
            _kill(pid)
        self.process.wait(30.0)
        end = time.monotonic() + 15.0
        while self.pids() and time.monotonic() < end:
            time.sleep(0.05)
        for pid in self.pids():
            _kill(pid)
        self.process = None
        for file in self.shared:
            file.unlink(missing_ok=True)
        self.shared = set()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
