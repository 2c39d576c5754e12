"""The one exception that speaks to the user: what is wrong, where, and what to do.

The command line prints its text alone (no traceback) and leaves with exit code 2. Parts, which must
work in anybody's loop, raise plain ValueError instead.
"""


class InputError(ValueError):
    """Something the user gave can't be used; the message is one sentence of advice."""
