"""A SGLang server's settings as its schedulers have them: /server_info, and where the two differ. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.run.checklist import Check, error, info, warning

if TYPE_CHECKING:
    from collections.abc import Mapping

EMBEDDED = "hsx-demo-"
"""The embedded server's version begins like this."""

DECIDING = frozenset(
    {
        "allow_auto_truncate", "attention_backend", "aux_hidden_state_capture", "chunked_prefill_size",
        "context_length", "cuda_graph_config", "device", "disable_radix_cache", "dp_size", "dtype",
        "enable_mixed_chunk", "enable_return_aux_hidden_states", "enable_two_batch_overlap", "kv_cache_dtype",
        "model_path", "pp_size", "quantization", "return_aux_hidden_state_layer_ids", "speculative_algorithm",
        "tp_size",
    }
)  # fmt: skip
"""Settings that decide what a capture gives."""

CONTRADICTING = frozenset(
    {
        "allow_auto_truncate", "chunked_prefill_size", "context_length", "disable_radix_cache", "dtype",
        "enable_return_aux_hidden_states", "return_aux_hidden_state_layer_ids", "speculative_algorithm",
    }
)  # fmt: skip
"""Of those, what the run also goes by as the server says it. No scheduler of SGLang 0.5.23 changes them by
itself: where one says otherwise, somebody did, and it is not known since when."""

_SHOWN = 8

_TIMES = frozenset({"startup_time"})
"""Measured, not set."""


@dataclass(frozen=True)
class Settings:
    """One scheduler's settings: the server's, overruled by the scheduler's own copy."""

    flags: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """A setting; None where the server has none of that name."""
        return self.flags.get(name)

    def number(self, name: str) -> int | None:
        """A setting that is a whole number; None where it is none."""
        value = self.flags.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def version(self) -> str:
        """As the server says it."""
        return str(self.flags.get("version") or "")

    @property
    def embedded(self) -> bool:
        """Whether it is the small server of the demo."""
        return self.version.startswith(EMBEDDED)

    @property
    def release(self) -> tuple[int, int, int] | None:
        """(0, 5, 23) of "0.5.23.post1"; None when it is no release number."""
        found = re.match(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})", self.version)
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def chunk(self) -> int | None:
        """Tokens of a prompt in one forward; None when prompts are not cut."""
        size = self.number("chunked_prefill_size")
        return size if size is not None and size > 0 else None

    @property
    def longest_input(self) -> int | None:
        """The longest prompt that is taken (SGLang refuses n >= max_req_input_len); None when not told."""
        most = self.number("max_req_input_len")
        return None if most is None or self.embedded else most - 1


def schedulers(server_info: Mapping[str, Any]) -> list[Settings]:
    """The settings of each scheduler (data-parallel rank) of a server; of one, when it lists none. What a
    scheduler leaves out, or has as null, is as the server says."""
    states = [{k: v for k, v in s.items() if v is not None} for s in _states(server_info) if s]
    top = {k: v for k, v in server_info.items() if k != "internal_states"}
    return [Settings({**top, **state}) for state in states] or [Settings(top)]


def _states(server_info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = server_info.get("internal_states")
    return [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []


def differences(server_info: Mapping[str, Any]) -> list[Check]:
    """Where a scheduler's own copy of the settings is not what the server says; the copy is what counts."""
    states = _states(server_info)
    if not states:
        detail = "the server lists no internal_states: only what was asked of it is known"
        return [warning("settings read back", detail, "a flag may not be what it says", "see its log")]
    wrong: list[str] = []
    deciding: list[str] = []
    others: list[str] = []
    for rank, state in enumerate(states):
        for name in sorted(set(state) & set(server_info)):
            asked, real = server_info[name], state[name]
            if asked == real or real is None or "<redacted>" in (asked, real) or name in _TIMES:
                continue
            whose = f" in scheduler {rank}" if len(states) > 1 else ""
            text = f"{name} {_short(asked)} is {_short(real)}{whose}"
            kind = wrong if name in CONTRADICTING else deciding if name in DECIDING else others
            kind.append(text)
    count = f"{len(states)} scheduler" + ("s" if len(states) > 1 else "")
    if wrong:
        effect = "what is captured would not be what the run was prepared for, in a part of the samples"
        step = "restart the server; change nothing of it while it runs (POST /set_internal_state)"
        return [error("settings read back", f"{count}: {'; '.join(wrong + deciding)}", effect, step)]
    if deciding:
        detail = f"{count}: {'; '.join((deciding + others)[:_SHOWN])}"
        effect = "the schedulers' own settings are what the checks below look at"
        return [warning("settings read back", detail, effect, "see the server's log for why it changed them")]
    said = f"; differing: {'; '.join(others[:_SHOWN])}" if others else ", as the server was asked"
    return [info("settings read back", f"{count}{said}")]


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
