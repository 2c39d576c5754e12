"""The exceptions that speak to the user: what is wrong, where, and what to do.

The command line prints its text alone (no traceback) and leaves with exit code 2. Parts, which must
work in anybody's loop, raise plain ValueError instead.
"""

# Exit codes of the command line beside 0, 1 and 2 (docs/metrics.md).
FAILED = 4
LEFT = 75  # EX_TEMPFAIL of sysexits.h: to be gone on with
INTERRUPTED = 130


class InputError(ValueError):
    """Something the user gave can't be used; the message is one sentence of advice."""


class SameOnAllRanksError(InputError):
    """The same on every rank, so that the first one says it for all."""


class StoppedError(RuntimeError):
    """A run that was ended on purpose, as to go on would be of no use; ``code`` is its exit code.

    The message is one sentence: what was seen, at which step, and what to do.
    """

    code = 1
