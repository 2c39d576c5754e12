"""Run what has just failed once more: a few tests, by themselves.

    make test || .venv/bin/python scripts/once_more.py

Some tests are about processes, sockets and clocks, on a machine whose cores others use too. At
most three that failed are given a second run, alone; each that passes then is named, so that it is
looked into and not forgotten. More than three, or a run that ended before it had written which, is
a failure at once. A property that was found broken stays so: Hypothesis draws the same again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 3


def main() -> int:
    """0 where all that failed passes now; else 1, or what pytest says."""
    try:
        names = sorted(json.loads(FAILED.read_text(encoding="utf-8")))
    except FileNotFoundError:
        print("once_more: there is no record of what failed, so nothing is run again")
        return 1
    if not 0 < len(names) <= MOST:
        print(f"once_more: {len(names)} failed; only up to {MOST} are run again")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", "--last-failed"], check=False).returncode
    if code == 0:
        for name in names:
            print(f"UNSTEADY, failed once and then passed: {name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
