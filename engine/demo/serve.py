"""``python -m engine demo serve``: loads the model, then binds the port, warms up, and serves until it is
told to stop.

The order is SGLang's: a port that is open means that the weights are loaded; /ready means that it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from engine.demo.flags import Flags, parse_flags
from engine.wire.errors import ExitCode, HsxError, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.demo.info import About
    from engine.demo.service import Service

log = logging.getLogger("hsx.demo")

GRACE_S = 10.0
"""How long requests may go on after SIGTERM."""


def main(argv: list[str]) -> int:
    """Run the server until SIGTERM or SIGINT; returns the exit code. Raises HsxError."""
    flags = parse_flags(argv)
    from engine.demo.loading import check_dump_dir, check_taps, load
    from engine.demo.logs import set_up

    _bind(flags).close()  # a taken port is known before minutes of loading
    if flags.dump_dir is not None:
        check_dump_dir(flags.dump_dir)
    set_up()
    model_path = flags.model or _smollm2(flags.model_cache)
    check_taps(flags, model_path)
    about, recorder = load(flags, model_path)
    try:
        return asyncio.run(_run(about))
    finally:
        about.scheduler.stop(0)
        if recorder is not None and not recorder.close():
            log.error("some dumps could not be written before the end")


def _smollm2(cache: Path) -> Path:
    from engine.demo.convert import ensure_smollm2

    return ensure_smollm2(cache)


def _bind(flags: Flags) -> socket.socket:
    """A listening socket on loopback. Raises Refused."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((flags.host, flags.port))
    except OSError as error:
        sock.close()
        raise Refused(
            f"port {flags.port} cannot be used", str(error.strerror), "stop what holds it, or take --port 0"
        ) from error
    return sock


def _write_port(file: Path, port: int) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n", encoding="ascii")
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Refused(f"the port file {file} cannot be written", str(error.strerror)) from error


async def _run(about: About) -> int:
    import uvicorn

    from engine.demo.http import build_app
    from engine.demo.logs import logging_config
    from engine.demo.service import Service

    class Server(uvicorn.Server):
        """Without uvicorn's own signal handling, which ends by raising the signal again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            opened.set()

    opened = asyncio.Event()
    sock = _bind(about.flags)
    port = int(sock.getsockname()[1])
    about.flags = dataclasses.replace(about.flags, port=port)
    service = Service(about.scheduler)
    app = build_app(service, about.scheduler, about)
    config = uvicorn.Config(
        app, log_config=logging_config(), lifespan="on", host=about.flags.host, port=port,
        timeout_graceful_shutdown=int(GRACE_S) + 5, server_header=False,
    )  # fmt: skip
    server = Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sock.listen(128)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    ending = asyncio.create_task(_until_end(about, stop))
    warming = asyncio.create_task(_warm_up(about, service, opened))
    warming.add_done_callback(lambda task: _stop_on_error(task, stop))
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    service.ready = False
    log.info("Shutting down: %d requests are finished first", about.scheduler.load().running)
    await asyncio.to_thread(about.scheduler.stop, GRACE_S)
    server.should_exit = True
    await serving
    if not warming.done():
        warming.cancel()
    (trouble,) = await asyncio.gather(warming, return_exceptions=True)
    if isinstance(trouble, HsxError):
        raise trouble
    if isinstance(trouble, Exception) and about.scheduler.error is None:
        raise HsxError("the warm-up failed", f"{type(trouble).__name__}: {trouble}") from trouble
    return int(ExitCode.OK if about.scheduler.error is None else ExitCode.FINDING)


def _stop_on_error(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    if not task.cancelled() and task.exception() is not None:
        stop.set()


async def _until_end(about: About, stop: asyncio.Event) -> None:
    """Until a signal comes, or the scheduler has died."""
    while not stop.is_set() and about.scheduler.error is None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)


async def _warm_up(about: About, service: Service, opened: asyncio.Event) -> None:
    """Say where the server is, ask it over HTTP, as SGLang does, then say that it is ready."""
    import httpx

    await opened.wait()
    url = f"http://{about.flags.host}:{about.flags.port}"
    # uvicorn leaves this line to whoever made the socket.
    logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", url)
    if about.flags.port_file is not None:
        _write_port(about.flags.port_file, about.flags.port)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        (await client.get("/model_info")).raise_for_status()
        body = {
            "rid": service.warm_up_rid, "input_ids": [10, 11, 12],
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        (await client.post("/generate", json=body)).raise_for_status()
    service.ready = True
    log.info("The server is fired up and ready to roll!")
