"""The README's table of keys, from the one registry of actions: ``python -m hsx_tui.keytable`` writes it."""

from __future__ import annotations

from pathlib import Path

from hsx_tui.actions import ACTIONS, Scope, key_name

BEGIN, END = "<!-- keys: written by `python -m hsx_tui.keytable`, checked by a test -->\n", "<!-- /keys -->"


def key_table() -> str:
    """Markdown, a row an action."""
    rows = ["| key | where | what it does |", "|---|---|---|"]
    for scope in Scope:
        for a in ACTIONS:
            if a.scope is scope:
                keys = " ".join(f"`{key_name(k)}`" for k in a.keys)
                rows.append(f"| {keys} | {scope.value} | {a.doc} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str) -> str:
    """The README with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + key_table() + END + after


if __name__ == "__main__":
    path = Path(__file__).parent.parent / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
