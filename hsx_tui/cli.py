"""hsx-console: the commands (cli.md). stdout is data, stderr is talk; each exit status is an ExitCode.

Nothing heavy is imported before it is needed: --help and a usage error load neither textual nor asyncssh.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from engine.wire.errors import ExitCode, HsxError, UsageError
from hsx_tui.commands import parsers
from hsx_tui.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", "", "see --help")


def _parser() -> argparse.ArgumentParser:
    p = _Parser("hsx-console", description="A terminal operations console for hidden-state extraction.")
    p.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    p.add_argument("--replay", type=Path, metavar="FILE", help="play a recorded session on the screen")
    parsers.add_shared(p, top=True)
    verbs = p.add_subparsers(dest="verb", metavar="VERB")
    d = verbs.add_parser("demo", help="the main job on the embedded host; with the screen unless --headless")
    d.add_argument("--headless", action="store_true", help="no screen: lines on stderr")
    d.add_argument(
        "--samples", type=int, metavar="N", help="take only the first N rows of the demo's dataset"
    )
    d.add_argument("--server", choices=("embedded", "sglang"), default="embedded")
    d.add_argument("--dump-mode", choices=("rid", "counter"), default="rid")
    d.add_argument(
        "--foreign-traffic", action="store_true", help="another client uses the same server meanwhile"
    )
    d.add_argument(
        "--sabotage",
        metavar="KIND[:always]",
        help="swap, shift, neighbour or stale: corrupt states "
        "inside the server's forward pass, to see them refused",
    )
    d.add_argument(
        "--abort-at", type=float, metavar="PERCENT", help="abort the run there; the same command resumes it"
    )
    d.add_argument("--stop", action="store_true", help="end the demo's host and its server")
    d.add_argument("--workdir", type=Path, metavar="DIR", help="where the demo's host lives")
    d.add_argument("--json", action="store_true", help="one JSON object on stdout at the end")
    d.add_argument("--ascii", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag, kind in (
        ("--model", str),
        ("--model-cache", Path),
        ("--sglang-python", Path),
        ("--shard-bytes", int),
        ("--concurrency", int),
        ("--taps", _taps),
    ):
        d.add_argument(flag, type=kind, help=argparse.SUPPRESS)  # docs/demo.md
    parsers.add_verbs(verbs)
    return p


def _taps(text: str) -> tuple[int, ...]:
    return tuple(int(t) for t in text.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        args = _parser().parse_args(argv)
        return int(_dispatch(args))
    except HsxError as error:
        sys.stderr.write(f"hsx-console: {clean(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("hsx-console: interrupted; a run on the host goes on\n")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our data has left; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FINDING
    except Exception:
        return _defect()


def _dispatch(args: argparse.Namespace) -> ExitCode | int:
    if args.verb == "demo":
        return _demo(args)
    if args.replay is not None:
        return _replay(args.replay, args.ascii)
    if args.verb is None:
        raise UsageError(
            "no verb", "this version has a screen for the demo only", "run hsx-console demo, or see --help"
        )
    parsers.refuse_later(args.verb)
    return _run(_verb(args.verb)(args))


def _verb(name: str) -> Callable[[argparse.Namespace], Coroutine[Any, Any, ExitCode]]:
    """The coroutine of a verb without a screen, loaded when it is asked for."""
    if name == "watch":
        from hsx_tui.commands.watch import watch

        return watch
    if name == "run":
        from hsx_tui.commands.runs import run

        return run
    if name == "pull":
        from hsx_tui.commands.pull import pull

        return pull
    if name == "server":
        from hsx_tui.commands.servers import server

        return server
    from hsx_tui.commands import status

    return {"status": status.status, "deploy": status.deploy}[name]


def _demo(args: argparse.Namespace) -> ExitCode | int:
    options = _demo_options(args)
    options.check()
    if args.stop:
        return _demo_stop(options, args.json)
    if args.headless:
        from hsx_tui.services.headless import Headless

        result, code = _run(Headless(options).run())
        _print(result, args.json)
        return code
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("no terminal", "the console's screen needs one", "use demo --headless here")
    from hsx_tui.app import HsxApp
    from hsx_tui.services.demo_driver import DemoDriver

    return _show(HsxApp(DemoDriver(options), ascii=args.ascii))


def _demo_options(args: argparse.Namespace) -> Any:
    from hsx_tui.services.demo import default_model_cache, default_workdir
    from hsx_tui.services.demo_options import DemoOptions

    kind, _, when = (args.sabotage or "").partition(":")
    if when not in ("", "always"):
        raise UsageError(f"--sabotage {args.sabotage}", "after the colon only 'always' is known")
    more = {
        k: getattr(args, k)
        for k in ("model", "shard_bytes", "concurrency", "taps", "sglang_python")
        if getattr(args, k) is not None
    }
    return DemoOptions(
        workdir=(args.workdir or default_workdir()).absolute(),
        model_cache=(args.model_cache or default_model_cache()).absolute(),
        samples=args.samples,
        foreign_traffic=args.foreign_traffic,
        sabotage=kind or None,
        sabotage_always=when == "always",
        abort_at=args.abort_at,
        server=args.server,
        dump_mode=args.dump_mode,
        **more,
    )


def _demo_stop(options: Any, as_json: bool) -> ExitCode:
    from hsx_tui.services.demo import Demo

    stopped = _run(Demo(options, lambda _message: None).stop_all())
    sys.stderr.write(
        "the demo's host and server have ended\n" if stopped else "the demo's host did not run\n"
    )
    _print({"schema_version": 1, "stopped": stopped}, as_json)
    return ExitCode.OK


def _replay(path: Path, ascii_only: bool) -> int:
    from hsx_tui.app import HsxApp
    from hsx_tui.model.replay import ReplayDriver, load

    return _show(HsxApp(ReplayDriver(load(path)), ascii=ascii_only))


def _show(app: Any) -> int:
    app.run()
    return int(app.return_code or 0)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run that ends with 130 on ctrl+c."""
    return asyncio.run(work)


def _print(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()


def _defect() -> ExitCode:
    """A defect of ours: one sentence, with the traceback in a file."""
    kind, value = sys.exc_info()[:2]
    where = "nowhere"
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", prefix="hsx-console-", suffix=".txt", delete=False) as f:
            f.write(traceback.format_exc())
            where = f.name
    name = kind.__name__ if kind else "error"
    said = clean(f"an internal error: {name}: {value}")
    sys.stderr.write(f"hsx-console: {said}. Please report it with {where}\n")
    return ExitCode.FINDING


if __name__ == "__main__":
    sys.exit(main())
