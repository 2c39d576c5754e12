"""The command ``hasten``: an interrupt ends it without a traceback, even while it is imported.

``python -m hasten`` is the same.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Imports the command line and runs the command of ``sys.argv``."""
    # Imports take a second. Until `run` can catch KeyboardInterrupt, the signal itself ends it.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hasten.cli.main import run

    run(interruptible)


if __name__ == "__main__":
    main()
