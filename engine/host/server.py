"""What an SGLang-compatible server on this host says of itself: is it ready, how loaded, what is it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from engine.wire.errors import SpecError

REQUEST_S = 2.5
MAX_BODY = 4 << 20

# No proxy: the server is on this host, and a proxy variable of the login must not send us elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str) -> tuple[int, bytes]:
    """(status, body). Raises OSError, http.client.HTTPException."""
    try:
        with _OPENER.open(url, timeout=REQUEST_S) as response:
            return response.status, response.read(MAX_BODY)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def _object(url: str) -> dict[str, Any] | None:
    """The JSON object at ``url``; None if the server has none to give."""
    try:
        status, body = _get(url)
        data = json.loads(body) if status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return data if isinstance(data, dict) else None


def server_facts(url: str) -> dict[str, Any]:
    """The ``server`` part of HostFacts. ``/ready`` costs the server nothing; ``/health`` would be a real
    request.

    Raises SpecError if ``url`` is no http address.
    """
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"bad url {url!r}", "it begins with http:// or https://")
    base = url.rstrip("/")
    facts: dict[str, Any] = {"url": url, "ready": False, "loads": None, "info": None, "error": None}
    try:
        status, _ = _get(f"{base}/ready")
    except (OSError, http.client.HTTPException) as error:
        return {**facts, "error": str(getattr(error, "reason", None) or error) or type(error).__name__}
    facts["ready"] = status == 200
    if status != 200:
        facts["error"] = f"/ready answered {status}"
    return {**facts, "loads": _object(f"{base}/v1/loads"), "info": _object(f"{base}/server_info")}
