"""How long work tells its caller how far it is, without printing anything.

A function that takes a while accepts a `Progress` and reports to it; what becomes of the reports is
the caller's affair. This module knows no terminal, and nothing of what is being done.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives one piece of work after the other: start, any number of advances, done."""

    def start(self, what: str, total: int) -> None:
        """Work named `what` begins; it takes `total` units (0: not known)."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """`n` more units are finished; `note` is the latest figure worth seeing."""

    def done(self) -> None:
        """The work is finished; without it the work was cut short."""


class Silent:
    """A Progress that nobody watches."""

    def start(self, what: str, total: int) -> None:
        pass

    def advance(self, n: int = 1, note: str = "") -> None:
        pass

    def done(self) -> None:
        pass
