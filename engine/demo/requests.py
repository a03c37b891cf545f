"""A request as the small real server holds it, and how it ends (SGLang's field names)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.capture.pythonpath.hsx_capture.traffic import COMPLETE_PREFIX, HEALTH_PREFIX
from engine.wire.ids import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


FinishReason = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; ``stop`` are token ids that end the answer."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(eq=False)
class Request:
    """One request, from its acceptance to its end. Changed by the scheduler thread only.

    Attributes:
        kv: [layers, 2, Hkv, prompt + max_new, D], keys and values of the first ``computed`` tokens.
        cached: how many tokens of the prompt came from the prefix cache.
        done: called once, from the scheduler thread.
    """

    rid: str
    serial: int
    prompt: list[int]
    sampling: Sampling
    done: Callable[[Request], None]
    extra_key: str | None = None
    warm_up: bool = False
    output: list[int] = field(default_factory=list)
    kv: torch.Tensor | None = None
    generator: torch.Generator | None = None
    computed: int = 0
    cached: int = 0
    shared_with_foreign: bool = False
    handshake: dict[str, Any] | None = None
    finish: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def is_ours(self) -> bool:
        """A request whose states are captured."""
        return self.rid.startswith(PREFIX)

    @property
    def is_foreign(self) -> bool:
        """Somebody else's request: neither ours nor a health check nor the warm-up."""
        return not (self.is_ours or self.is_completion or self.is_health or self.warm_up)

    @property
    def is_completion(self) -> bool:
        """A request of ours that wants the answer, not the states."""
        return self.rid.startswith(COMPLETE_PREFIX)

    @property
    def is_health(self) -> bool:
        """A health check: a real request of one token."""
        return self.rid.startswith(HEALTH_PREFIX)

    @property
    def in_prefill(self) -> bool:
        """Whether tokens of the prompt remain to be computed."""
        return self.computed < len(self.prompt)

    @property
    def capacity(self) -> int:
        """Tokens that its K/V buffer holds."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def next_ids(self, rows: int) -> list[int]:
        """The next ``rows`` tokens to be computed."""
        if self.in_prefill:
            return self.prompt[self.computed : self.computed + rows]
        return self.output[-1:]

    def accept(self, token: int, eos: frozenset[int]) -> None:
        """Append a sampled token and see whether it was the last one."""
        self.output.append(token)
        stop = set(self.sampling.stop_token_ids) | (set() if self.sampling.ignore_eos else eos)
        if token in stop:
            self.finish = {"type": "stop", "matched": token}
        elif len(self.output) >= self.sampling.max_new_tokens:
            self.finish = {"type": "length", "length": len(self.output)}

    def abort(self, message: str) -> None:
        """End it from outside."""
        self.finish = {"type": "abort", "message": message}

    def meta_info(self) -> dict[str, Any]:
        """The reply's ``meta_info``. A request aborted before it ran has no counts, as in SGLang."""
        meta: dict[str, Any] = {"id": self.rid, "finish_reason": self.finish, "weight_version": "default"}
        if self.finish and self.finish["type"] == "abort" and self.kv is None:
            return {**meta, "completion_tokens": 0}
        meta |= {
            "prompt_tokens": len(self.prompt), "cached_tokens": self.cached,
            "completion_tokens": len(self.output), "e2e_latency": self.ended - self.arrived,
        }  # fmt: skip
        if self.is_ours and self.handshake is not None:
            meta["hsx"] = self.handshake
        return meta
