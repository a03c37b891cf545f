"""``python -m engine demo sglang``: the demo's model behind a real SGLang, with the capture plugin.

This process becomes the server: it prepares the model, the environment and the command, then executes
SGLang's own interpreter. Nothing is installed into that; the plugin comes by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.capture import plugin
from engine.wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_VERSION = (0, 5, 23)
"""The first that can capture several layers without a drafter."""


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("engine demo sglang", description="a real SGLang with the capture plugin")
    p.add_argument("--python", type=Path, required=True, help="the interpreter of SGLang's environment")
    p.add_argument("--model", default="smollm2", help="a model folder, or smollm2 (default)")
    p.add_argument("--model-cache", type=Path, required=True)
    p.add_argument("--dump-dir", required=True)
    p.add_argument("--taps", default="1 14 26", help="post-layer, 0-based")
    p.add_argument("--chunked-prefill-size", type=int, default=256)
    p.add_argument("--port", type=int, default=0, help="0: any free port")
    return p


def main(argv: Sequence[str]) -> int:
    """Become SGLang; returns only by an error. Raises Refused when there is no usable SGLang."""
    a = _parser().parse_args(argv)
    version = _version(a.python)
    sys.stdout.write(f"SGLang {version} of {a.python}\n")
    model = str(_smollm2(a.model_cache) if a.model == "smollm2" else a.model)
    environment = dict(os.environ)
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "PYTHONUNBUFFERED": "1"}
    environment |= plugin.server_environment(environment, a.dump_dir)
    taps = [int(tap) for tap in a.taps.split()]
    command = [
        str(a.python), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1",
        "--port", str(a.port or _free_port()), "--device", "cpu", "--attention-backend", "torch_native",
        "--dtype", "float32", "--skip-tokenizer-init", "--sleep-on-idle", "--enable-metrics",
        "--context-length", "2048", "--max-total-tokens", "16384", "--max-running-requests", "16",
        "--chunked-prefill-size", str(a.chunked_prefill_size), *plugin.server_flags(taps),
    ]  # fmt: skip
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def _version(python: Path) -> str:
    """SGLang's version there. Raises Refused."""
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, timeout=60.0, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(
            f"there is no SGLang at {python}",
            type(error).__name__,
            "make its environment with `make sglang`, or name another with --sglang-python",
        ) from error
    version = done.stdout.strip()
    numbers = tuple(int(n) for n in version.split(".")[:3] if n.isdigit())
    if numbers < LEAST_VERSION:
        wanted = ".".join(map(str, LEAST_VERSION))
        raise Refused(f"SGLang {version} cannot capture", f"{wanted} is the first that can", "update it")
    return version


def _smollm2(cache: Path) -> Path:
    from engine.demo.convert import ensure_smollm2

    return ensure_smollm2(cache)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
