"""The body of POST /generate: what is taken, and SGLang's own words for what is not."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.demo.requests import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.demo.packed import Shape

_BODY_KEYS = frozenset({"rid", "input_ids", "sampling_params", "extra_key", "stream"})
_SAMPLING_KEYS = frozenset({
    "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "stop_token_ids", "sampling_seed", "n",
})  # fmt: skip


class BadRequest(Exception):
    """What the client is told, with status 400."""


@dataclass(frozen=True)
class Generate:
    """A checked request."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    extra_key: str | None


def read_generate(body: object, shape: Shape, context_length: int) -> Generate:
    """Check the body of /generate. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    unknown = sorted(set(body) - _BODY_KEYS)
    if unknown:
        raise BadRequest(
            f"This server does not know {', '.join(unknown)}; it takes {', '.join(sorted(_BODY_KEYS))}."
        )
    if body.get("stream"):
        raise BadRequest("This server does not stream.")
    rid = body.get("rid") or uuid.uuid4().hex
    if not isinstance(rid, str) or len(rid) > 512:
        raise BadRequest("rid must be a string of at most 512 characters.")
    extra_key = body.get("extra_key")
    if extra_key is not None and not isinstance(extra_key, str):
        raise BadRequest("extra_key must be a string.")
    ids = _ids(body.get("input_ids"), shape)
    sampling = _sampling(body.get("sampling_params") or {})
    _check_length(len(ids), sampling.max_new_tokens, context_length)
    return Generate(rid, ids, sampling, extra_key)


def _ids(value: object, shape: Shape) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRequest("input_ids cannot be empty: it is a list of token ids, one prompt a request.")
    if not all(type(t) is int for t in value):
        raise BadRequest("input_ids must be whole numbers.")
    if min(value) < 0 or max(value) >= shape.vocab_size:
        raise BadRequest(f"The input_ids contain values outside the vocab size ({shape.vocab_size}).")
    return value


def _sampling(params: object) -> Sampling:
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object.")
    unknown = sorted(set(params) - _SAMPLING_KEYS)
    if unknown:
        raise BadRequest(f"This server does not know the sampling parameters {', '.join(unknown)}.")
    if params.get("n", 1) != 1:
        raise BadRequest("n must be 1: a request with several answers loses its rid.")
    stop = params.get("stop_token_ids") or []
    if not isinstance(stop, list) or not all(type(t) is int for t in stop):
        raise BadRequest("stop_token_ids must be a list of whole numbers.")
    seed = params.get("sampling_seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise BadRequest("sampling_seed must be a whole number from 0.")
    top_k = _number(params, "top_k", -1, whole=True)
    if top_k == 0 or top_k < -1:
        raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    return Sampling(
        max_new_tokens=int(_number(params, "max_new_tokens", 128, whole=True, least=0)),
        temperature=_number(params, "temperature", 1.0, least=0),
        top_k=int(top_k),
        top_p=_number(params, "top_p", 1.0, least=1e-6, most=1.0),
        ignore_eos=bool(params.get("ignore_eos", False)),
        stop_token_ids=tuple(stop),
        seed=seed,
    )


def _number(
    params: Mapping[str, Any], name: str, default: float, *,
    whole: bool = False, least: float = -1e9, most: float = 1e9,
) -> float:  # fmt: skip
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise BadRequest(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}.")
    if not least <= value <= most:  # NaN fails too
        raise BadRequest(f"{name} must be from {least:g} to {most:g}, got {value}.")
    return value


def _check_length(prompt: int, new: int, context_length: int) -> None:
    """SGLang's two checks (managers/tokenizer_manager.py), in its words."""
    if prompt >= context_length:
        raise BadRequest(
            f"The input ({prompt} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if prompt + new > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {prompt + new} tokens: {prompt} tokens from the input messages and "
            f"{new} tokens for the completion. Please reduce the number of tokens in the input messages or "
            "the completion to fit within the limit."
        )
