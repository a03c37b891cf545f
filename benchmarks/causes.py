"""``python -m benchmarks.causes``: write docs/causes.md from the table in the code."""

from __future__ import annotations

from pathlib import Path

from engine.wire.cause_table import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "causes.md"


def main() -> None:
    """Write it."""
    DOCUMENT.write_text("".join(f"{line}\n" for line in markdown()))
    print(f"written: {DOCUMENT}")


if __name__ == "__main__":
    main()
