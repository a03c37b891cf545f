"""What a SGLang reply says before its dump is looked at: a handshake, a finding, or that nothing is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.capture.states import Finding
from engine.wire.causes import Cause
from engine.wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from engine.sources.protocol import Ask

KEY = "hsx"


class Busy(str):
    """The capture had no room for the dump now: why. The same request may be sent again after a while."""


def read_reply(
    response: httpx.Response, ask: Ask, taps: tuple[int, ...] | None
) -> Mapping[str, Any] | Finding | str:
    """A reply of status 200 -> its handshake; a finding about the row; or a text: nothing is known.

    The order matters: whose reply it is comes before what it says.
    """
    try:
        meta = response.json()["meta_info"]
        shake = meta.get(KEY)
        prompt_tokens = int(meta.get("prompt_tokens", -1))
        cached = int(meta.get("cached_tokens") or 0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        text = response.text[:200]
        return Finding(Cause.UNREADABLE, "an answer that is not SGLang's", None, {"text": text})
    if meta.get("id") != ask.rid:
        return Finding(Cause.FOREIGN, str(meta.get("id"))[:80], ask.rid, {"where": "the reply"})
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return f"the server aborted the request ({str(reason.get('message'))[:80]})"
    n = len(ask.sample.input_ids)
    if cached > 0:
        evidence = {"missing_prefix": cached, "where": "the reply"}
        return Finding(Cause.PREFIX_CACHED, n - cached, n, evidence)
    # SGLang: one element a generated token, and null in the replies of others.
    shake = shake[0] if isinstance(shake, list) and shake else shake
    if not isinstance(shake, dict):
        return Finding(Cause.NO_HANDSHAKE, None, KEY, {"meta_keys": sorted(map(str, meta))[:20]})
    if "error" in shake:
        why = str(shake["error"])[:200]
        return Busy(f"the capture is busy: {why}") if shake.get("busy") else Finding(Cause.WRITER_ERROR, why)
    return _compare(shake, prompt_tokens, n, taps) or shake


def _compare(
    shake: Mapping[str, Any], prompt_tokens: int, n: int, taps: tuple[int, ...] | None
) -> Finding | None:
    for where, tokens in (("the reply", prompt_tokens), ("the handshake", shake.get("num_tokens", n))):
        if tokens != n:
            return Finding(Cause.TRUNCATED_INPUT, tokens, n, {"where": where})
    layers = shake.get("taps")
    if taps is not None and isinstance(layers, list) and layers != list(taps):
        evidence = {"where": "the handshake", "engine_layer_ids": shake.get("engine_layer_ids")}
        return Finding(Cause.WRONG_LAYERS, layers, list(taps), evidence)
    return None


def refusal(response: httpx.Response, n: int, url: str) -> Finding | str:
    """A status other than 200: a finding about this row, or a text: nothing is known, it may be asked again.

    Raises UsageError when the server does not let us in at all.
    """
    code, text = response.status_code, " ".join(response.text[:300].split())
    if code in (401, 403):
        raise UsageError(f"the server at {url} refuses us", f"HTTP {code}: {text}", "set source.api_key_env")
    if code >= 500 or code in (408, 409, 429) or (code == 400 and "Duplicate" in text):
        return f"HTTP {code}: {text}"
    cause = Cause.TRUNCATED_INPUT if "longer than" in text else Cause.MISSING
    return Finding(cause, None, n, {"http": code, "text": text})
