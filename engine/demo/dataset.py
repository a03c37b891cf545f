"""The demo's dataset: the ten coding prompts with the server's own answers, written conversations, raw token
rows.

Its order mixes the kinds, so that any first N rows hold short and long, chat, code, unicode and raw ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.wire.durable import atomic_bytes
from engine.wire.errors import DatasetError

DATA = Path(__file__).parent / "data"
PROMPTS = DATA / "coding_prompts.jsonl"
CONVERSATIONS = DATA / "conversations.jsonl"

RAW_LENGTHS = (1, 2, 63, 64, 65)


def raw_rows() -> list[dict[str, Any]]:
    """Rows of token ids that no template made: ordinary ids of the vocabulary by a fixed congruence."""
    rows = []
    for n in RAW_LENGTHS:
        state, ids = 1 + n, []
        for _ in range(n):
            state = (state * 1103515245 + 12345) % 2**31
            ids.append(20 + state % 49000)
        rows.append({"id": f"raw-{n}", "input_ids": ids})
    return rows


def assemble(answered: Path, out: Path) -> int:
    """Write the dataset atomically; returns the number of rows."""
    kinds = [_lines(answered), _lines(CONVERSATIONS), raw_rows()]
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = interleave(kinds)
    atomic_bytes(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
    return len(rows)


def interleave(kinds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One list in which each kind is spread evenly; the order within a kind stays."""
    placed = [((i + 0.5) / len(kind), k, row) for k, kind in enumerate(kinds) for i, row in enumerate(kind)]
    return [row for _, _, row in sorted(placed, key=lambda p: p[:2])]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot read {path}", str(error), "remove it and start again") from error
