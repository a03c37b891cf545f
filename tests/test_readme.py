"""The README says what is true: its keys are the registry's, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from hsx_tui.keytable import with_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_keys_is_the_registry() -> None:
    assert with_table(README) == README


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []
