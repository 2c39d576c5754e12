"""How long work is reported: lines that stay, and a state with the share that is done."""

from __future__ import annotations

from typing import Protocol


class Audience(Protocol):
    """Whoever is told how an experiment goes on; `hasten.cli.terminal.Display` is one.

    ``tell``: a line that stays; ``begin``: a new piece of work; ``show``: its state, and which
    share (0 to 1) of it is done.
    """

    def tell(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def show(self, text: str, share: float) -> None: ...


class SilentProgress:
    """Nobody is told."""

    def tell(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def show(self, text: str, share: float) -> None: ...
