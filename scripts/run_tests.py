"""Run the test suite: what can run side by side, then what must run alone.

    python scripts/run_tests.py            # make test
    python scripts/run_tests.py --long     # make test-long: full counts, too
    python scripts/run_tests.py --data     # only tests of the files that HASTEN_TEST_DATA names and
                                           # of the articles' code that HASTEN_TEST_ARTICLES names

The end names each failure with its reason, and the time with its bound. Exit code: 0, or pytest's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BOUND_SECONDS = 12 * 60  # for make test on two cores
HUNG_SECONDS = 60 * 60  # then the tests are ended, so that what failed in it is still told
MOST_WORKERS = 8  # each needs about 2 GB
CACHE = Path(".pytest_cache/v")
LAST_FAILED = CACHE / "cache/lastfailed"
REASONS = CACHE / "hasten/reasons"  # written by tests/common/suite_report.py
NOTHING_RAN = 5  # pytest's exit code where no test was chosen
REASON_LINES = 30
# Each of hundreds of processes would compile the package anew.
VARIABLES = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the test suite.")
    parser.add_argument("--long", action="store_true", help="with the tests that have full counts")
    parser.add_argument("--data", action="store_true", help="only tests that read the real files")
    options, rest = parser.parse_known_args()
    for path in (LAST_FAILED, REASONS):
        path.unlink(missing_ok=True)
    began = time.monotonic()
    chosen = "(long or not long)" if options.long else "not long"
    chosen = "(data or articles)" if options.data else chosen
    data = [*with_mark("data"), *with_mark("articles")] if options.data else []
    code = pytest(*side_by_side(), "-m", chosen, *data, *rest)
    minutes, bound = (time.monotonic() - began) / 60, BOUND_SECONDS / 60
    print_reasons()
    print(
        f"tests took {minutes:.1f} min"
        + ("" if rest or options.data else f"; make test may take {bound:.0f}")
    )
    return code


def side_by_side() -> list[str]:
    cores = len(os.sched_getaffinity(0))
    # One more than cores: it begins with the files that wait (mark waits).
    return ["--processes", str(min(cores, MOST_WORKERS) + 1)] if cores > 1 else []


def with_mark(name: str) -> list[str]:
    """The files that hold the mark, so that no other has to be imported."""
    files = Path("tests").rglob("test_*.py")
    return sorted(str(file) for file in files if f"mark.{name}" in file.read_text())


def pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    limit: float | None = HUNG_SECONDS
    if "--long" in sys.argv:
        command.append("--hypothesis-profile=thorough")  # of tests/conftest.py
        limit = None
    try:
        code = subprocess.run(command, env=VARIABLES, check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        print(f"HUNG: the tests were ended after {HUNG_SECONDS / 60:.0f} minutes")
        return 1
    return 0 if code == NOTHING_RAN else code


def print_reasons() -> None:
    """What failed and why, last, where it is seen."""
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    lines = [f"failed: {name}: {reasons.get(name, 'see above')}" for name in sorted(failed)]
    for line in lines[:REASON_LINES]:
        print(line[:400])
    if len(lines) > REASON_LINES:
        print(f"and {len(lines) - REASON_LINES} more")


if __name__ == "__main__":
    sys.exit(main())
