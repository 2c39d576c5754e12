"""Run the test suite: what can run side by side, then what must run alone.

    python scripts/run_tests.py            # make test
    python scripts/run_tests.py --long     # make test-long: full counts, too
    python scripts/run_tests.py --data     # only tests of the files that HASTEN_TEST_DATA names and
                                           # of the articles' code that HASTEN_TEST_ARTICLES names

Some tests are about processes, sockets and clocks, on a machine whose cores others use too. Up to
three that failed run once more, alone, and each that passes then is named. The end names each
failure with its reason, and the time beside its bound. Exit code: 0, or pytest's.
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
MOST_AGAIN = 3
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
    before = failed()
    if 0 < len(before) <= MOST_AGAIN:
        code = pytest("-m", chosen, *sorted(before))
        for name in sorted(before - failed()):
            print(f"UNSTEADY, failed once and then passed: {name}")
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


def failed() -> set[str]:
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def print_reasons() -> None:
    """What failed and why, last, where it is seen."""
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = [f"failed: {name}: {reasons.get(name, 'see above')}" for name in sorted(failed())]
    for line in lines[:REASON_LINES]:
        print(line[:400])
    if len(lines) > REASON_LINES:
        print(f"and {len(lines) - REASON_LINES} more")


if __name__ == "__main__":
    sys.exit(main())
