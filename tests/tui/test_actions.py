"""The registry: what a key may be, and what an action must say."""

from __future__ import annotations

from collections import Counter

from hsx_tui.actions import ACTIONS, BY_ID, Danger, Scope, in_scope, key_name
from hsx_tui.screens.help import help_rows
from hsx_tui.widgets.glyphs import ASCII, UNICODE
from hsx_tui.widgets.line_views import footer_parts
from hsx_tui.widgets.view import Frame

TAKEN_BY_TERMINALS = {f"ctrl+{letter}" for letter in "abghjost"} | {"ctrl+@"}


def test_ids_are_unique() -> None:
    assert len(BY_ID) == len(ACTIONS)


def test_a_key_has_one_meaning_where_it_works() -> None:
    # Menu and dialog are modal: there the keys of the screen below do nothing. The log is part of the screen.
    for scopes in ((Scope.GLOBAL, Scope.LOG), (Scope.RUN_MENU,), (Scope.DIALOG,)):
        counts = Counter(key for scope in scopes for action in in_scope(scope) for key in action.keys)
        assert [key for key, times in counts.items() if times > 1] == []


def test_keys_are_plain() -> None:
    for action in ACTIONS:
        for key in action.keys:
            assert key not in TAKEN_BY_TERMINALS
            assert "+" not in key, f"{action.id} needs a modifier"


def test_what_asks_first_says_what_it_does_and_how_it_is_undone() -> None:
    dangerous = [a for a in ACTIONS if a.danger >= Danger.ASKS]
    assert dangerous
    for action in dangerous:
        assert action.plan
        assert action.undo
        assert action.scope is not Scope.GLOBAL, "no danger is one key away"


def test_labels_and_docs() -> None:
    for action in ACTIONS:
        assert action.label
        assert len(action.label.split()) <= 2
        assert action.doc.endswith(".")
        assert "kill" not in action.label.lower()


def test_the_help_page_holds_every_action_and_fits_80_columns() -> None:
    for g in (UNICODE, ASCII):
        rows = ["".join(text for text, _ in row) for row in help_rows(g)]
        page = "\n".join(rows)
        for action in ACTIONS:
            assert action.doc in page
            assert action.undo in page
            assert action.plan in page
        assert max(map(len, rows)) <= 75, "borders, padding and the scroll bar take five columns"
        assert g is UNICODE or page.isascii()


def test_the_footer_fits_80_columns_and_holds_help_and_quit() -> None:
    for paused in (True, False):
        parts = footer_parts(Frame(80, 1, 0.0, 2.0, UNICODE), paused)
        assert {"app.help", "app.quit", "run.menu"} <= {action.id for action, _, _ in parts}
        assert sum(len(key) + len(label) + 3 for _, key, label in parts) <= 80
        assert ("log.follow" if paused else "log.pause") in {action.id for action, _, _ in parts}


def test_keys_are_written_for_people() -> None:
    assert key_name("question_mark") == "?"
    assert key_name("up") == "↑"
    assert key_name("up", ascii_only=True) == "up"
