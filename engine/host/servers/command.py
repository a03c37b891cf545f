"""What a server's argv and environment say: whether it is one, its port and model; secrets never shown."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_PORT = 30000
"""SGLang's, when --port is not given."""
MASK = "********"

_MODULES = frozenset({"sglang.launch_server", "sglang.cli.main"})
_SECRET_FLAG = re.compile(r"--?[a-z0-9_-]*(?:key|token|secret|password|passwd|credential)s?\Z", re.IGNORECASE)
_NO_SECRET = frozenset({"--skip-tokenizer-init", "--max-total-token", "--max-total-tokens"})
_SECRET_TEXT = re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9_-]{6,}|Bearer\s+\S+")
_ENV = re.compile(r"(?:CUDA_|NCCL_|SGLANG_|HF_|HSX_|OMP_|TORCH|TRITON_|VLLM_|LC_|XDG_)[A-Z0-9_]*\Z")
_ENV_NAMES = frozenset(
    {"LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONUNBUFFERED", "TRANSFORMERS_CACHE"}
    | {"HOME", "USER", "LOGNAME", "PATH", "LANG", "TZ", "TMPDIR", "SHELL"}
)
_ENV_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)


def is_launch(argv: Sequence[str]) -> bool:
    """Whether ``argv`` starts a server: SGLang by module or console script, the capture's own launcher, or
    the demo's server. A shell whose script names one is none."""
    for i, word in enumerate(argv[:12]):
        path, after = PurePosixPath(word), argv[i + 1 : i + 2]
        if word == "-m" and after and after[0] in _MODULES and i > 0:
            return True
        if i <= 3 and path.name == "sglang" and list(after) == ["serve"]:
            return True
        if path.name == "launch.py" and path.parent.name == "hsx_capture":
            return True
        if list(argv[i : i + 2]) == ["demo", "serve"] and i > 1:
            return True
    return False


def flag(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of the flags ``names``, given as two words or with "="."""
    found = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return found


def port_of(argv: Sequence[str]) -> int:
    """The port it was told to listen on; SGLang's default without one."""
    value = flag(argv, "--port") or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 5 else DEFAULT_PORT


def model_of(argv: Sequence[str]) -> str | None:
    """The model it was told to load."""
    return flag(argv, "--model-path", "--model")


def masked(argv: Sequence[str]) -> list[str]:
    """``argv`` as it may be shown: values of keys, tokens and passwords are masked."""
    shown: list[str] = []
    hide = False
    for word in argv:
        if hide and not word.startswith("--"):
            shown.append(MASK)
            hide = False
            continue
        name, equals, _ = word.partition("=")
        secret = bool(_SECRET_FLAG.match(name)) and name not in _NO_SECRET
        hide = secret and not equals
        shown.append(f"{name}={MASK}" if secret and equals else _SECRET_TEXT.sub(MASK, word))
    return shown


def allowed_env(env: Mapping[str, str]) -> dict[str, str]:
    """What of a server's environment is kept: a list of names, and never a secret."""
    return {
        name: value
        for name, value in sorted(env.items())
        if (name in _ENV_NAMES or _ENV.match(name))
        and name not in ("HSX_RUN", "HSX_ENGINE_ID")  # of the run that started it, not of the server
        and not _ENV_SECRET.search(name)
        and not _SECRET_TEXT.search(value)
    }
