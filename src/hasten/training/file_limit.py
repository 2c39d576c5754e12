"""Limits the size of the files that a command writes, as a full disk does.

``python -m hasten.training.file_limit BYTES COMMAND ...``, started by ``hasten check --faults``. A
write beyond the size fails with EFBIG (setrlimit(2), RLIMIT_FSIZE): Python ignores the signal.
"""

from __future__ import annotations

import resource
import runpy
import sys


def main() -> None:
    """Runs ``hasten COMMAND ...`` under the limit."""
    size = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.argv = ["hasten", *sys.argv[2:]]
    runpy.run_module("hasten", run_name="__main__")


if __name__ == "__main__":
    main()
