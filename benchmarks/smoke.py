"""``--smoke``, the same in every benchmark: all that it does, with tiny sizes, in seconds.

    asked = arguments(parser, rounds=1, VOCABULARIES=(64,))

Small letters are options, whose defaults the values replace; capitals are constants of the script.
Relative paths are those of a temporary folder then, so that nothing stays behind.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from typing import Any


def arguments(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """What was asked of a benchmark; with ``--smoke`` the small values stand for the usual ones."""
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, to see that all of it runs"
    )
    if "--smoke" in sys.argv:
        constants = vars(sys.modules["__main__"])
        known = {*constants, *(action.dest for action in parser._actions)}
        assert known.issuperset(small), f"no such names here: {small.keys() - known}"
        constants.update({name: value for name, value in small.items() if name.isupper()})
        parser.set_defaults(**{name: value for name, value in small.items() if name.islower()})
        folder = tempfile.TemporaryDirectory()
        os.chdir(folder.name)
        atexit.register(folder.cleanup)
    return parser.parse_args()
