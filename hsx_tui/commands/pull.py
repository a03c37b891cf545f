"""`hsx-console pull HOST STORE DIR`: a store's named files, proved by their hashes, going on where it was."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.wire.errors import ExitCode, UsageError
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.output import json_object, line
from hsx_tui.deploy.pull import Pull, check_rows
from hsx_tui.text import clean
from hsx_tui.widgets.numbers import size as size_text

if TYPE_CHECKING:
    import argparse

    from hsx_tui.deploy.pull import Rate


async def pull(args: argparse.Namespace) -> ExitCode:
    """Bring it here. The same command again brings only what is new."""
    fleet = Fleet.of(args)
    store = _store(fleet, args.name, args.store)
    rows = check_rows(args.rows) if args.rows is not None else None
    screen = sys.stderr.isatty()

    def told(rate: Rate) -> None:
        if screen or rate.waiting:
            end = "\r" if screen and not rate.waiting else "\n"
            sys.stderr.write(_said(rate).ljust(78) + end)
            sys.stderr.flush()

    async with fleet.runs(args.name) as runs:
        work = Pull(runs.link, store, args.dest.absolute(), source=args.name, rows=rows, told=told)
        done = await work.run()
    if screen:
        sys.stderr.write("\n")
    if args.json:
        json_object({"host": args.name, "store": store, "dir": str(args.dest.absolute()), **vars(done)})
    else:
        rate = size_text(done.transferred / max(done.seconds, 1e-6))
        line(f"{done.files} files, {size_text(done.bytes)}, {done.samples} samples in {args.dest}")
        line(f"{size_text(done.transferred)} came over the link in {done.seconds:.1f} s, {rate}/s")
    return ExitCode.OK


def _said(rate: Rate) -> str:
    if rate.waiting:
        return clean(f"waiting for the link: {rate.waiting}")
    left = (rate.total - rate.done) / rate.per_s if rate.per_s else 0
    return f"{size_text(rate.done)} of {size_text(rate.total)}  {size_text(rate.per_s)}/s  {left:.0f} s left"


def _store(fleet: Fleet, host: str, store: str) -> str:
    """The absolute path on the host that STORE means. Raises UsageError."""
    if store in fleet.config.runs:
        return fleet.remote_path(host, fleet.config.runs[store].store, f"runs.{store}.store")
    if not store.startswith("/"):
        raise UsageError(
            f"{store!r} is no run of {fleet.configured.path}", "nor an absolute path", "name one of both"
        )
    fleet.host(host)
    return store
