"""The HTTP interface: SGLang's routes, field names and error texts, as far as the product uses them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.demo.inputs import BadRequest, read_generate
from engine.demo.scheduler import DuplicateRid, NotAccepting
from engine.demo.service import Disconnected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from engine.demo.info import About
    from engine.demo.scheduler import Scheduler
    from engine.demo.service import Service

MAX_BODY_BYTES = 16 << 20


def build_app(service: Service, scheduler: Scheduler, about: About) -> ASGIApp:
    """The ASGI application."""
    routes = _Routes(service, scheduler, about)
    app = Starlette(
        routes=[
            Route("/generate", routes.generate, methods=["POST"]),
            Route("/ready", routes.ready),
            Route("/health", routes.health),
            Route("/health_generate", routes.health),
            Route("/server_info", routes.server_info),
            Route("/get_server_info", routes.server_info),
            Route("/model_info", routes.model_info),
            Route("/v1/loads", routes.loads),
            Route("/metrics", routes.metrics),
            Route("/flush_cache", routes.flush, methods=["GET", "POST"]),
            Route("/abort_request", routes.abort, methods=["POST"]),
        ]
    )
    return _Counted(app, about)


def _error(message: str, status: int = 400) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


async def _body(request: HttpRequest) -> Any:
    """The JSON body. Raises BadRequest."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise BadRequest(f"The body is longer than {MAX_BODY_BYTES} bytes.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error


def _until_disconnect(request: HttpRequest) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    return wait


class _Routes:
    def __init__(self, service: Service, scheduler: Scheduler, about: About) -> None:
        self._service = service
        self._scheduler = scheduler
        self._about = about

    async def generate(self, request: HttpRequest) -> Response:
        shape, length = self._about.shape, self._about.flags.context_length
        try:
            asked = read_generate(await _body(request), shape, length)
            return JSONResponse(await self._service.generate(asked, _until_disconnect(request)))
        except BadRequest as error:
            return _error(str(error))
        except DuplicateRid as error:
            return _error(f"Duplicate request ID detected: {error}")
        except NotAccepting:
            return _error("The server is shutting down.", 503)
        except Disconnected as error:
            return _error(f"Request is disconnected from the client side. Abort request rid={error}", 499)

    async def ready(self, request: HttpRequest) -> Response:
        return Response(status_code=200 if self._is_ready() else 503)

    def _is_ready(self) -> bool:
        return self._service.ready and self._scheduler.error is None

    async def health(self, request: HttpRequest) -> Response:
        try:
            return Response(status_code=200 if await self._service.health() else 503)
        except NotAccepting:
            return Response(status_code=503)

    async def server_info(self, request: HttpRequest) -> Response:
        return JSONResponse(self._about.server_info(self._is_ready()))

    async def model_info(self, request: HttpRequest) -> Response:
        return JSONResponse(self._about.model_info())

    async def loads(self, request: HttpRequest) -> Response:
        return JSONResponse(self._about.loads())

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self._about.metrics(), media_type="text/plain; version=0.0.4")

    async def flush(self, request: HttpRequest) -> Response:
        if self._scheduler.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", 400)

    async def abort(self, request: HttpRequest) -> Response:
        try:
            body = await _body(request)
        except BadRequest as error:
            return _error(str(error))
        rid = body.get("rid") if isinstance(body, dict) else None
        everything = isinstance(body, dict) and body.get("abort_all") is True
        if everything:
            self._scheduler.abort("")
        elif isinstance(rid, str) and rid:
            self._scheduler.abort(rid)
        else:
            return _error("Give a rid (every live request that begins with it is aborted) or abort_all.")
        return Response(status_code=200)


class _Counted:
    """Counts replies by route and status."""

    def __init__(self, app: ASGIApp, about: About) -> None:
        self._app = app
        self._about = about

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # An unknown path is the client's text: it must not become a label of its own.
                route = scope["path"] if "endpoint" in scope else "other"
                self._about.counts.answered(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
