"""The command lines of the verbs without a screen. argparse only: help and usage errors load nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engine.wire.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

LATER = {
    "preflight": "check a run before anything is asked for",
    "window": "a production server's pause for a job",
    "score": "acceptance of a drafter on a store",
    "audit": "a drafter's files against the rules",
    "parity": "two backends' hidden states compared",
    "journal": "what was done from this console",
    "serve": "the console in a browser",
    "support": "one redacted archive for a bug report",
}
"""Verbs of cli.md that are named here and refused until they are there."""


def add_shared(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """The options that may stand before or after the verb."""

    def option(name: str, default: Any, text: str, **more: Any) -> None:
        shown = text if top else argparse.SUPPRESS
        parser.add_argument(name, default=default if top else argparse.SUPPRESS, help=shown, **more)

    option("--config", None, "the configuration (default: ./config.toml, $HSX_CONFIG, ...)", type=Path)
    option("--host", None, "a host of the configuration", metavar="NAME")
    option("--read-only", False, "start, abort and resume nothing", action="store_true")
    option("--read-write", False, "act although the configuration says read-only", action="store_true")


def add_verbs(verbs: Any) -> None:
    """Add every verb of cli.md but demo."""

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
        add_shared(parser, top=False)
        return parser

    def json_option(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout")

    json_option(verb("status", "every configured host, its servers and runs"))
    watch = verb("watch", "a run's events until it has ended")
    watch.add_argument("run", metavar="RUN")
    watch.add_argument("--jsonl", action="store_true", help="a JSON line an event")
    watch.add_argument("--after", type=_count, default=0, metavar="SEQ", help="only events after this number")
    deploy = verb(
        "deploy",
        "install or verify the engine on a host (on a read-only one too: it lies in the user's cache folder)",
    )
    deploy.add_argument("name", metavar="HOST")
    json_option(deploy)
    pull = verb("pull", "bring a store of a host, or the shards of some of its rows, to this machine")
    pull.add_argument("name", metavar="HOST")
    pull.add_argument("store", metavar="STORE", help="an absolute path on the host, or the name of a run")
    pull.add_argument("dest", metavar="DIR", type=Path, help="a new folder, or one of an earlier pull")
    pull.add_argument("--rows", metavar="FIRST:LAST", help="only the shards with these rows")
    json_option(pull)
    run = verb("run", "start, abort, resume, list, show")
    run.add_argument("what", choices=("start", "abort", "resume", "list", "show"))
    run.add_argument("run", metavar="RUN", nargs="?")
    run.add_argument("--yes", action="store_true", help="do what the plan says")
    json_option(run)
    server = verb("server", "status, start, stop, restart of a host's server")
    server.add_argument("what", choices=("status", "start", "stop", "restart"))
    server.add_argument("name", metavar="HOST")
    server.add_argument("--server", metavar="NAME", help="which, when the host has several")
    server.add_argument("--capture", metavar="RUN", help="restart: as a capture server for that run's layers")
    server.add_argument("--restore", action="store_true", help="restart: put back as it was before --capture")
    server.add_argument("--yes", action="store_true", help="do what the plan says")
    json_option(server)
    for name, text in LATER.items():
        # No prefix for options: whatever follows the verb is taken, and the verb is refused by its name.
        later = verbs.add_parser(
            name, help=f"{text} (comes with a later version)", add_help=False, prefix_chars="\0"
        )
        later.add_argument("rest", nargs="*")


def refuse_later(verb: str) -> None:
    """UsageError for a verb that is not there yet."""
    if verb in LATER:
        raise UsageError(
            f"hsx-console {verb}", "it comes with a later version", "see --help for what is there"
        )


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("it is a whole number from 0 on")
    return number
