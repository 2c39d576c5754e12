"""The command ``hasten``: a signal ends it with a sentence, even while it is imported.

``python -m hasten`` is the same.
"""

from __future__ import annotations

from functools import partial

from hasten.machine.signals import install_exit_handlers, raise_in_command


def main() -> None:
    """Imports the command line and runs the command of ``sys.argv``."""
    interruptible = install_exit_handlers()  # the next import takes a second
    from hasten.cli.main import run

    run(partial(raise_in_command, interruptible))


if __name__ == "__main__":
    main()
