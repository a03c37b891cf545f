"""The one registry of actions: keys, footer, help page and the table in the README are read from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Danger(enum.IntEnum):
    """What an action can cost, and so how it is asked for."""

    NONE = 0
    ACTS = 1  # at once, with a notice that says how to undo it
    ASKS = 2  # after a dialog: plan, undo, exact command; the focus is on Cancel
    TYPED = 3  # after the host's name was typed


class Scope(enum.StrEnum):
    """Where a key works. Within one scope, and against GLOBAL, a key has one meaning."""

    GLOBAL = "everywhere"
    RUN_MENU = "run menu"
    LOG = "log"
    DIALOG = "dialog"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a user can do.

    Attributes:
        id: its name in bindings, keymaps and the journal.
        keys: plain keys; the first is the one that is shown.
        label: two words at most, for the footer.
        doc: one sentence, for the help page.
        plan, undo: for danger 2 and above, what it does and how it is taken back.
        footer: shown there (the help page shows all).
    """

    id: str
    keys: tuple[str, ...]
    label: str
    danger: Danger
    doc: str
    scope: Scope = Scope.GLOBAL
    plan: str = ""
    undo: str = ""
    footer: bool = False

    @property
    def key(self) -> str:
        """The key that is shown."""
        return self.keys[0]


ACTIONS: tuple[Action, ...] = (
    Action("run.menu", ("x",), "Run…", Danger.NONE, "Open the run menu: start, resume, abort.", footer=True),
    Action(
        "log.pause",
        ("p",),
        "Pause",
        Danger.NONE,
        "Hold the log where it is; lines go on coming in.",
        footer=True,
    ),
    Action("log.follow", ("f",), "Follow", Danger.NONE, "Show the newest log line again.", footer=True),
    Action("link.retry", ("r",), "Retry", Danger.NONE, "Connect again now instead of waiting.", footer=True),
    Action("app.dismiss", ("escape",), "Dismiss", Danger.NONE, "Take the error off the screen."),
    Action("app.help", ("question_mark",), "Help", Danger.NONE, "Show all keys.", footer=True),
    Action(
        "app.quit", ("q",), "Quit", Danger.NONE, "Close the console; a run on the host goes on.", footer=True
    ),
    Action(
        "run.start",
        ("s",),
        "Start",
        Danger.ACTS,
        "Begin the run on the host.",
        Scope.RUN_MENU,
        undo="abort it; what is done by then is kept",
    ),
    Action(
        "run.resume",
        ("r",),
        "Resume",
        Danger.ACTS,
        "Go on where the last attempt ended.",
        Scope.RUN_MENU,
        undo="abort it; what is done by then is kept",
    ),
    Action(
        "run.abort",
        ("a",),
        "Abort",
        Danger.ASKS,
        "End the run gracefully; what is done is kept.",
        Scope.RUN_MENU,
        plan="stop asking, write the open shard, end the engine",
        undo="resume it: it goes on with the rows that are not done",
    ),
    Action("log.up", ("up", "k"), "Up", Danger.NONE, "One line up; the log stops following.", Scope.LOG),
    Action("log.down", ("down", "j"), "Down", Danger.NONE, "One line down.", Scope.LOG),
    Action("log.page_up", ("pageup",), "Page up", Danger.NONE, "One page up.", Scope.LOG),
    Action("log.page_down", ("pagedown",), "Page down", Danger.NONE, "One page down.", Scope.LOG),
    Action("log.left", ("left", "h"), "Left", Danger.NONE, "Towards the beginning of long lines.", Scope.LOG),
    Action("log.right", ("right", "l"), "Right", Danger.NONE, "Towards the end of long lines.", Scope.LOG),
    Action("log.top", ("home",), "Oldest", Danger.NONE, "The oldest line that is kept.", Scope.LOG),
    Action("log.end", ("end",), "Newest", Danger.NONE, "The newest line, and follow.", Scope.LOG),
    Action(
        "dialog.cancel",
        ("escape", "n"),
        "Cancel",
        Danger.NONE,
        "Close the dialog; nothing is done.",
        Scope.DIALOG,
    ),
    Action("dialog.accept", ("y",), "Accept", Danger.NONE, "Do what the dialog says.", Scope.DIALOG),
)

BY_ID: dict[str, Action] = {action.id: action for action in ACTIONS}

KEY_NAMES = {
    "question_mark": "?",
    "escape": "esc",
    "pageup": "pgup",
    "pagedown": "pgdn",
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
}


def key_name(key: str, ascii_only: bool = False) -> str:
    """How a key is written for people."""
    if ascii_only and key in ("up", "down", "left", "right"):
        return key
    return KEY_NAMES.get(key, key)


def in_scope(scope: Scope) -> tuple[Action, ...]:
    """The actions of one scope, in the order in which they are shown."""
    return tuple(action for action in ACTIONS if action.scope is scope)


def binding_rows(scope: Scope, method: str) -> list[tuple[str, str, str]]:
    """Bindings of a scope for Textual: keys, a call of ``method`` with the action's id, label."""
    return [(",".join(a.keys), f"{method}('{a.id}')", a.label) for a in in_scope(scope)]
