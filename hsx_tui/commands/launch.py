"""A run of the configuration as the launch that the host is given: the same one as the demo's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.wire.errors import SpecError, UsageError
from engine.wire.spec import extract_from_json
from hsx_tui.config import nearest
from hsx_tui.services.runs import Launch

if TYPE_CHECKING:
    from hsx_tui.commands.hosts import Fleet
    from hsx_tui.config_model import Server


def extract_launch(fleet: Fleet, run: str) -> tuple[str, Launch]:
    """(host, launch) of [runs.RUN]. Raises UsageError for what cannot be run."""
    config, path = fleet.config, fleet.configured.path
    if run not in config.runs:
        raise UsageError(
            f"unknown run {run!r}", f"{path} has no [runs.{run}] to take it from", nearest(run, config.runs)
        )
    table = config.runs[run]
    server_name, target_name = config.server_of(run), config.target_of(run)
    if server_name is None:
        raise UsageError(
            f"run {run} has source = {table.source!r}",
            "it comes with a later version",
            'use source = "server"',
        )
    assert target_name is not None  # config.load has checked it
    server, target, dataset = (
        config.servers[server_name],
        config.targets[target_name],
        config.datasets[table.dataset],
    )
    host = server.host
    if fleet.only not in (None, host):
        raise UsageError(
            f"run {run} is not on host {fleet.only}",
            f"its server {server_name} is on {host}",
            "leave --host out, or change the configuration",
        )
    spec = {
        "run": run,
        "store": fleet.remote_path(host, table.store, f"runs.{run}.store"),
        "dataset": {
            "path": fleet.remote_path(host, dataset.path, f"datasets.{table.dataset}.path"),
            "max_tokens": dataset.max_tokens,
            "over_long": dataset.over_long,
            "thinking": dataset.thinking,
            "rows": list(table.rows) if table.rows is not None else None,
        },
        "target": {
            "model": target.model,
            "taps": list(target.output_taps),
            "last": None if target.last == "none" else target.last,
            "dtype": target.dtype,
        },
        "source": _source(server_name, server),
        "concurrency": table.concurrency,
    }
    try:
        extract_from_json(spec)
    except SpecError as error:
        raise UsageError(f"{path}: run {run}: {error.what}", error.why, error.next_step) from error
    return host, Launch(run, "extract", ["extract"], output=str(spec["store"]), spec=spec)


def _source(name: str, server: Server) -> dict[str, Any]:
    if server.dump_dir is None:
        raise UsageError(f"servers.{name} has no dump_dir", "dumps are read from there", "add it")
    return {
        "kind": server.kind,
        "url": server.url,
        "dump_dir": server.dump_dir,
        "dump_mode": server.dump_mode,
        "api_key_env": server.api_key_env,
        "log": server.log,
        "replicas": [replica.model_dump() for replica in server.replicas],
    }
