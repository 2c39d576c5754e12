"""Plants small faults in the package, one at a time, and prints which of them the tests catch.

    python scripts/planted_faults.py --jobs 2      # every fault of planted_faults.yaml: hours
    python scripts/planted_faults.py NAME...       # these faults alone

This is a mutation test with chosen mutants (DeMillo, Lipton and Sayward, Hints on Test Data
Selection, Computer 11, 1978). It measures the tests of the commit at HEAD.

    (1) Every fault's text must be in the commit's sources once.
    (2) Each fault gets a copy of the commit, in which its tests run until the first one fails.
    (3) The test that failed must pass in a copy without the fault, or it proves nothing.

A fault is "caught" if a test fails, the tests hang, or a test module can't be imported any more. It
"survived" if all tests pass. Exit codes: 0, all were caught; 1, some weren't; 2, nothing was run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/hasten")
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # pytest's exit codes; a collection error interrupts
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One small fault: `old` is in `file` once and becomes `new`.

    Args:
        name: unique.
        kind: the sort of slip, in a few words.
        file: relative to the package.
        old: exact source text.
        new: its replacement.
        tests: files or folders of tests that exercise the code, nearest first.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, checkout: Path) -> None:
        """Puts the fault into the sources."""
        path = checkout / PACKAGE / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new))


def read_faults() -> tuple[Fault, ...]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, yaml.CSafeLoader)  # ten times as fast as the loader in Python
    return tuple(Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def refusals(faults: Sequence[Fault], checkout: Path) -> list[str]:
    """Why faults can't be planted in these sources, one sentence for each reason."""
    sentences = []
    for fault in faults:
        path = checkout / PACKAGE / fault.file
        places = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if places != 1:
            sentences.append(f"{fault.name}: its text stands in {places} places of {fault.file}.")
        absent = [test for test in fault.tests if not (checkout / test).exists()]
        sentences += [f"{fault.name}: {test} isn't in the checkout." for test in absent]
    return sentences


def attempt(fault: Fault, original: Path, seconds: float) -> tuple[str, str]:
    """Plants a fault in a copy and runs its tests: the outcome, and the test or the reason."""
    with copied(original) as copy:
        fault.plant(copy)
        code, failed, output = run_tests(copy, [*fault.tests, "-x"], seconds)
    if code is None:
        return "caught", "hangs"
    if code == PASSED:
        return "survived", "all pass"
    if code not in (FAILED, INTERRUPTED) or not failed:
        return "error", f"pytest ended with code {code}: {output[-300:]}"
    with copied(original) as copy:
        more = ["--collect-only"] if code == INTERRUPTED else []
        clean, _, _ = run_tests(copy, [failed, *more], seconds)
    return ("caught", failed) if clean == PASSED else ("error", f"fails without it: {failed}")


def run_tests(
    checkout: Path, arguments: Sequence[str], seconds: float
) -> tuple[int | None, str, str]:
    """pytest's exit code, or None after the time limit; the first failed test; the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider"]
    command += [f"--basetemp={checkout.parent / 'tmp'}", *arguments]
    # Options of a pytest around this script are no options of those that it starts.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(checkout / "src")
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open with a grandchild
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    failed = FAILED_LINE.search(text)
    return code, failed[1] if failed else "", text


@contextlib.contextmanager
def copied(original: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        yield Path(shutil.copytree(original, Path(folder) / "copy", symlinks=True))


def main() -> int:
    faults = {fault.name: fault for fault in read_faults()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults [default: all]")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a fault's tests")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in faults]:
        parser.error(f"unknown faults: {', '.join(unknown)}")
    chosen = [faults[name] for name in options.names or faults]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        original = Path(folder) / "original"
        original.mkdir()
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "--extract", "--directory", original], input=packed, check=True)
        if reasons := refusals(chosen, original):
            print("\n".join(reasons), file=sys.stderr)
            return 2
        outcomes: Counter[str] = Counter()
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda each: attempt(each, original, options.seconds), chosen)
            for fault, (outcome, reason) in zip(chosen, results, strict=True):
                outcomes[outcome] += 1
                print(f"{outcome:8}  {fault.name} ({fault.kind}): {reason}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))
    return int(outcomes["caught"] != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
