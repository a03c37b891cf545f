"""SGLang's HTTP interface, as far as the engine uses it (sglang.md 2): settings, generate, abort."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import httpx

from engine.wire.errors import ConnectionFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Api:
    """A client of one server. Server texts in errors are cut to one line."""

    def __init__(self, url: str, api_key_env: str | None, timeout_s: float, connections: int) -> None:
        headers = {}
        if api_key_env:
            key = os.environ.get(api_key_env)
            if not key:
                raise UsageError(
                    f"the environment variable {api_key_env} is not set",
                    "the server wants an API key",
                    "set it for the engine on the host",
                )
            headers["authorization"] = f"Bearer {key}"
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,  # a proxy from the environment must never see hidden-state traffic
        )

    async def get(self, path: str) -> Mapping[str, Any]:
        """A JSON object, else ConnectionFailed."""
        try:
            response = await self._http.get(path, timeout=30.0)
            response.raise_for_status()
            data = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConnectionFailed(
                f"the server at {self.url} does not answer {path}", _line(error), "is it loaded? see its log"
            ) from error
        if not isinstance(data, dict):
            raise ConnectionFailed(f"{self.url}{path} is not a JSON object", "", "is this an SGLang server?")
        return data

    async def ready(self, timeout_s: float = 10.0) -> bool:
        """GET /ready: no generation (unlike /health)."""
        try:
            return (await self._http.get("/ready", timeout=timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def generate(self, body: Mapping[str, Any]) -> httpx.Response:
        """POST /generate; raises httpx.HTTPError when the link fails."""
        return await self._http.post("/generate", json=body)

    async def abort(self, rid: str) -> None:
        """POST /abort_request (matches by prefix on the server). The link may fail: the request is then
        gone anyway."""
        try:
            await self._http.post("/abort_request", json={"rid": rid}, timeout=10.0)
        except httpx.HTTPError:
            return

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
