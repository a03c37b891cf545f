"""The command line of the small real server."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine.demo.counter_dumps import parse_layout
from engine.demo.sabotage_kinds import KINDS
from engine.wire.errors import UsageError

SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Flags:
    """Resolved flags. ``model`` is a folder, or None for SmolLM2; ``port`` 0 = any free one."""

    model: Path | None
    model_cache: Path
    host: str
    port: int
    port_file: Path | None
    dump_dir: Path | None
    taps: tuple[int, ...]
    threads: int
    chunked_prefill_size: int
    max_running_requests: int
    context_length: int
    prefix_cache: bool
    mixed_chunk: bool
    capture: bool
    dump_mode: str
    dump_ids: bool
    dump_layout: str
    dump_late_s: float
    sabotage: str | None
    sabotage_always: bool
    sabotage_seed: int
    sabotage_log: Path | None
    launch_command: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", "", f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m engine demo serve", description="A small real model behind SGLang's interface."
    )
    p.add_argument("--model", default=SMOLLM2, help="a model folder, or smollm2 (default)")
    p.add_argument(
        "--model-cache", type=Path, default=Path("~/.cache/hsx-console").expanduser(), metavar="DIR"
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0: any free port")
    p.add_argument("--port-file", type=Path, metavar="FILE", help="the chosen port is written there")
    p.add_argument("--dump-dir", type=Path, metavar="DIR")
    p.add_argument("--taps", default="1 14 26", help='post-layer, 0-based, for example "1 14 26"')
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--chunked-prefill-size", type=int, default=256, help="tokens in a forward")
    p.add_argument("--max-running-requests", type=int, default=16)
    p.add_argument("--context-length", type=int, default=2048)
    p.add_argument("--enable-prefix-cache", action="store_true")
    p.add_argument("--disable-mixed-chunk", action="store_true", help="decode steps in forwards of their own")
    p.add_argument(
        "--dump-mode", choices=("rid", "counter"), default="rid",
        help="rid: our requests by their id (default); counter: req_<n>/ for everything, as patches do",
    )  # fmt: skip
    p.add_argument("--dump-ids", action="store_true", help="counter: token ids in the meta")
    p.add_argument("--dump-layout", default="pt", metavar="WORDS", help="counter: docs/formats.md")
    p.add_argument("--dump-late", type=float, default=0.0, metavar="S", help="counter: how late some land")
    p.add_argument("--no-capture", action="store_true", help="the bare server")
    p.add_argument("--sabotage", metavar="KIND[:always]", help=f"one of {', '.join(KINDS)}")
    p.add_argument("--sabotage-seed", type=int, default=0)
    p.add_argument("--sabotage-log", type=Path, metavar="FILE")
    return p


def parse_flags(argv: list[str]) -> Flags:
    """Read the command line. Raises UsageError; exits 0 after --help."""
    a = _parser().parse_args(argv)
    if a.host != "127.0.0.1":
        raise UsageError(f"--host {a.host}", "the server has no passwords and binds 127.0.0.1 only")
    for name, value, least, most in (
        ("--port", a.port, 0, 65535),
        ("--threads", a.threads, 1, 256),
        ("--chunked-prefill-size", a.chunked_prefill_size, 1, 1 << 20),
        ("--max-running-requests", a.max_running_requests, 1, 4096),
        ("--context-length", a.context_length, 2, 1 << 20),
    ):
        if not least <= value <= most:
            raise UsageError(f"{name} {value}", f"it must be from {least} to {most}")
    capture = not a.no_capture
    if capture and a.dump_dir is None:
        raise UsageError(
            "--dump-dir is missing", "captured states need a folder", "or start with --no-capture"
        )
    parse_layout(a.dump_layout, a.dump_ids)
    if not 0 <= a.dump_late <= 600:  # NaN fails too
        raise UsageError(f"--dump-late {a.dump_late}", "it must be from 0 to 600 seconds")
    kind, always = _sabotage(a.sabotage)
    if kind and not capture:
        raise UsageError("--sabotage with --no-capture", "there would be nothing to corrupt")
    model = None if a.model == SMOLLM2 else Path(a.model).expanduser().absolute()
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(
            f"--model {a.model}", "there is no config.json in it", "give a model folder, or smollm2"
        )
    dump_dir = a.dump_dir.absolute() if a.dump_dir is not None else None
    log = a.sabotage_log
    if kind and log is None and dump_dir is not None:
        log = dump_dir.parent / "sabotage.jsonl"
    return Flags(
        model=model, model_cache=a.model_cache.absolute(), host=a.host, port=a.port, port_file=a.port_file,
        dump_dir=dump_dir, taps=_taps(a.taps), threads=a.threads, chunked_prefill_size=a.chunked_prefill_size,
        max_running_requests=a.max_running_requests, context_length=a.context_length,
        prefix_cache=a.enable_prefix_cache, mixed_chunk=not a.disable_mixed_chunk, capture=capture,
        dump_mode=a.dump_mode, dump_ids=a.dump_ids, dump_layout=a.dump_layout, dump_late_s=a.dump_late,
        sabotage=kind, sabotage_always=always, sabotage_seed=a.sabotage_seed, sabotage_log=log,
        launch_command=shlex.join(["python", "-m", "engine", "demo", "serve", *argv]),
    )  # fmt: skip


def _taps(text: str) -> tuple[int, ...]:
    try:
        taps = tuple(int(t) for t in text.replace(",", " ").split())
    except ValueError:
        taps = ()
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise UsageError(
            f"--taps {text!r}", "taps are 0-based layers, ascending, each once", 'for example "1 14 26"'
        )
    return taps


def _sabotage(text: str | None) -> tuple[str | None, bool]:
    if text is None:
        return None, False
    kind, colon, rest = text.partition(":")
    if kind not in KINDS or (colon and rest != "always"):
        raise UsageError(f"--sabotage {text}", f"it is one of {', '.join(KINDS)}, with :always or without")
    return kind, bool(colon)
