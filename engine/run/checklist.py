"""A preflight check: what was looked at, how bad it is, what it would do to the data, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.wire.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        ok: False refuses the run. detail: what was found. next_step: the flag or the step that mends it.
        effect: what it would do to the data. doubt: it is no reason to refuse, and a person should know.
    """

    name: str
    ok: bool
    detail: str
    next_step: str = ""
    effect: str = ""
    doubt: bool = False

    @property
    def severity(self) -> str:
        """error, warning or info."""
        if not self.ok:
            return "error"
        return "warning" if self.doubt else "info"

    def to_json(self) -> dict[str, Any]:
        """For the preflight event."""
        return {
            "name": self.name,
            "ok": self.ok,
            "severity": self.severity,
            "detail": self.detail,
            "effect": self.effect,
            "next": self.next_step,
        }

    def line(self) -> str:
        """For the run's log: the effect and the remedy only where there is something to mend."""
        mark = {"error": "FAIL", "warning": "WARN", "info": "ok  "}[self.severity]
        text = f"  {mark} {self.name}: {self.detail}"
        if self.severity == "info":
            return text
        return text + "".join(f"; {part}" for part in (self.effect, self.next_step) if part)


def error(name: str, detail: str, effect: str, next_step: str) -> Check:
    """A reason to refuse the run."""
    return Check(name, False, detail, next_step, effect)


def warning(name: str, detail: str, effect: str, next_step: str) -> Check:
    """Something a person should know; the run goes on."""
    return Check(name, True, detail, next_step, effect, doubt=True)


def info(name: str, detail: str) -> Check:
    """It was looked at, and it is well."""
    return Check(name, True, detail)


def refuse_if_failed(checks: Sequence[Check]) -> None:
    """PreflightError that names every failed check."""
    failed = [c for c in checks if not c.ok]
    if failed:
        raise PreflightError(
            f"preflight: {', '.join(dict.fromkeys(c.name for c in failed))}",
            "; ".join(f"{c.detail} ({c.effect})" if c.effect else c.detail for c in failed),
            "; ".join(dict.fromkeys(c.next_step for c in failed if c.next_step)),
        )


def merge(by_server: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """Checks of several servers as one list: what all have in common once, the rest with whose it is."""
    everywhere = set.intersection(*(set(checks) for _, checks in by_server)) if by_server else set()
    merged: list[Check] = []
    for whose, checks in by_server:
        for check in checks:
            if check in everywhere:
                if check not in merged:
                    merged.append(check)
                continue
            detail = f"{whose}: {check.detail}"
            merged.append(
                Check(check.name, check.ok, detail, check.next_step, check.effect, doubt=check.doubt)
            )
    return merged
