"""A link to a configured host: the engine is run by the interpreter that the configuration names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hsx_tui.deploy.link import Link

if TYPE_CHECKING:
    from hsx_tui.deploy.address import HostAddress
    from hsx_tui.deploy.session import Session


class HostLink(Link):
    """As ``Link``. ``python``: absolute path on the host of the interpreter for the engine's runs; None = the
    one that answered."""

    def __init__(self, address: HostAddress, python: str | None) -> None:
        super().__init__(address)
        self._python = python

    async def session(self) -> Session:
        """As ``Link.session``."""
        session = await super().session()
        if self._python is not None and session.engine is not None:
            session.engine = dataclasses.replace(session.engine, python=self._python)
        return session
