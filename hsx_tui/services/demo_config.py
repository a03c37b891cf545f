"""The config.toml that the demo writes into its work directory, so that every other verb works on its
host."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine.wire.durable import atomic_bytes
from hsx_tui.deploy.embedded import read_host

if TYPE_CHECKING:
    from pathlib import Path

    from hsx_tui.services.demo_options import DemoOptions


def write_config(o: DemoOptions, url: str, dump_dir: str, model: str, rows: int) -> Path:
    """Write WORKDIR/config.toml atomically; returns its path. ``model``: the folder as the server has it."""
    record = read_host(o.workdir) or {}
    keys = o.workdir.absolute() / "keys"
    tables: dict[str, dict[str, object]] = {
        "hosts.demo": {
            "address": "127.0.0.1",
            "port": int(record.get("port", 0)),
            "user": "demo",
            "identity_file": str(keys / "client_ed25519"),
            "known_hosts": str(keys / "known_hosts"),
            "workdir": str(o.workdir.absolute()),
            "production": False,
        },
        "servers.demo": {
            "host": "demo",
            "kind": "sglang",
            "url": url,
            "dump_dir": dump_dir,
            "dump_mode": o.dump_mode,
        },
        "targets.demo": {"model": model, "taps": list(o.taps), "last": o.last, "dtype": "bfloat16"},
        "datasets.demo": {"path": str(o.dataset), "max_tokens": 2047},
        f"runs.{o.run}": {
            "source": "server",
            "server": "demo",
            "target": "demo",
            "dataset": "demo",
            "rows": [0, rows],
            "store": str(o.store),
            "concurrency": o.concurrency,
        },
    }
    text = "# Written by `hsx-console demo` for its embedded host. It is written again at each start.\n"
    for name, table in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items())
    path = o.workdir / "config.toml"
    atomic_bytes(path, text.encode())
    return path


def _toml(value: object) -> str:
    """A TOML value. JSON strings, numbers, booleans and flat lists are TOML ones."""
    return json.dumps(value)
