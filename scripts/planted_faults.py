"""Plants small faults in the package, one at a time, and tells which of them the tests catch.

    python scripts/planted_faults.py --clean                   # which tests fail without a fault
    python scripts/planted_faults.py --jobs 2                  # every fault against its tests
    python scripts/planted_faults.py --compare OLD.jsonl NEW.jsonl

This is a mutation test with chosen mutants (DeMillo, Lipton and Sayward, Hints on Test Data
Selection, Computer 11, 1978). It measures the test suite, so that a rebuilt suite can be shown to
catch whatever an old one caught. The faults are listed in `planted_faults.yaml`.

    (1) The commit at HEAD of the checkout is unpacked; every fault's text must stand there once.
    (2) An import in a child process proves that tests will see the copy, not an installed package.
    (3) Each fault gets a copy of its own, in which its tests run until the first one fails.
    (4) The test that failed must pass in a copy without the fault, or it is left out and (3) is
        done again. `--clean` looks at all tests in advance, which also finds unsteady ones.
    (5) Each result is one line of a JSONL file. A second start skips what was caught or survived.

A fault is "caught" where a test fails, the tests hang, or a test module can't be collected any
more; it "survived" where all tests pass. Anything else is an "error" and neither of both.

Exit codes: 0, all is well; 1, a fault wasn't caught or a clean test fails; 2, nothing could be run;
130, interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

log = logging.getLogger("planted_faults")

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/hasten")
RESULTS = ROOT / "build" / "planted_faults.jsonl"
CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # pytest's exit codes; a collection error interrupts
TAIL_LINES = 3  # of pytest's output, for a run that can't be judged
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One small fault: `old` stands once in `file` and becomes `new`.

    Args:
        name: unique; results are compared by it.
        kind: the sort of slip, in a few words.
        file: relative to the package.
        old: exact source text.
        new: what takes its place.
        tests: files or folders of tests that exercise the code, nearest first.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The part of the package that the fault is in."""
        return self.file.partition("/")[0]

    def planted(self, text: str) -> str:
        """The file's text with the fault in it."""
        return text.replace(self.old, self.new)


def read_faults(path: Path) -> tuple[Fault, ...]:
    """The faults of a file, in its order."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows)


FAULTS = read_faults(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True)
class PytestRun:
    """What pytest did: `code` is None where it ran out of time."""

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    tail: str


@dataclass(frozen=True)
class Result:
    """What became of one fault; a line of the results file."""

    fault: str
    kind: str
    package: str
    outcome: str
    seconds: float
    commit: str
    test: str = ""  # the first test that failed
    note: str = ""


@dataclass(frozen=True)
class CleanRun:
    """What the tests of one path do without a fault; a line of the results file."""

    clean: str
    failed: tuple[str, ...]
    seconds: float
    commit: str
    note: str = ""


Entry = Result | CleanRun


@dataclass
class Results:
    """A results file: the last line about a fault, or about a path of clean tests, counts."""

    faults: dict[str, Result] = field(default_factory=dict)
    clean: dict[str, CleanRun] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Keep an entry in place of an earlier one."""
        if isinstance(entry, Result):
            self.faults[entry.fault] = entry
        else:
            self.clean[entry.clean] = entry


class RefusedError(Exception):
    """Nothing can be run; the message says why in one sentence for each reason."""


class StoppedError(Exception):
    """The user has interrupted; what is under way gives no result."""


def read_results(path: Path) -> Results:
    """Read a results file; one that isn't there is empty.

    Raises:
        RefusedError: a line isn't one of ours.
    """
    found = Results()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            if "clean" in entry:
                found.add(CleanRun(**{**entry, "failed": tuple(entry["failed"])}))
            else:
                found.add(Result(**entry))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break  # it was being written when the process ended
            raise RefusedError(f"{path}:{number} is no result of this script: {error}") from error
    return found


class ResultsFile:
    """Appends entries to a results file, whole lines only, from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):  # a line that a killed process began
            os.truncate(path, content.rfind(b"\n") + 1)

    def append(self, entry: Entry) -> None:
        """Write one line."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


class Children:
    """Runs programs, and ends all of them with what they have started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], seconds: float
    ) -> tuple[int | None, str]:
        """The exit code and the output; no code where the time ran out.

        Raises:
            StoppedError: `end_all` was called.
        """
        with tempfile.TemporaryFile() as output:  # a pipe would stay open with a grandchild
            with self._lock:
                if self._ended:
                    raise StoppedError
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                code: int | None = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
                with self._lock:
                    self._running.discard(process)
            if self._ended:
                raise StoppedError
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def end_all(self) -> None:
        """End what runs, and refuse to start more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group, and its descendants in groups of their own."""
    descendants: list[psutil.Process] = []
    if process.poll() is None:  # its number may belong to another process after its end
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()
    process.wait()


def unpack(checkout: Path, folder: Path) -> str:
    """Unpack the commit at HEAD of a checkout into `folder`; its name.

    Raises:
        RefusedError: the checkout isn't one.
    """
    try:
        head = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        packed = subprocess.run(
            ["git", "-C", str(checkout), "archive", "--format=tar", head],
            capture_output=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RefusedError(f"{checkout} is no git checkout with a commit: {error}") from error
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return head


def refusals(faults: Sequence[Fault], checkout: Path) -> list[str]:
    """Why faults can't be planted in these sources, one sentence for each reason."""
    found = []
    for fault in faults:
        path = checkout / PACKAGE / fault.file
        places = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if places != 1:
            found.append(f"{fault.name}: its text stands in {places} places of {fault.file}.")
        absent = [test for test in fault.tests if not (checkout / test).exists()]
        found += [f"{fault.name}: {test} isn't in the checkout." for test in absent]
    return found


def environment(copy: Path) -> dict[str, str]:
    """The variables that let a process and its children import the copy's package.

    Options of a pytest around this script are no options of those that it starts.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(copy / "src"), *filter(None, [found.get("PYTHONPATH")])]
    return {**found, "PYTHONPATH": os.pathsep.join(paths)}


class Bench:
    """Runs tests in throw-away copies of one unpacked commit.

    Args:
        original: the unpacked commit, which no test ever runs in.
        commit: its name.
        seconds: limit of one run.
        known: results so far; tests that fail without a fault are left out.
    """

    def __init__(self, original: Path, commit: str, seconds: float, known: Results) -> None:
        self.original, self.commit, self.seconds = original, commit, seconds
        self.children = Children()
        # Paths whose tests ran to their end without a fault.
        self._looked_at = {path for path, run in known.clean.items() if not run.note}
        self._broken = {test for run in known.clean.values() for test in run.failed}

    def prepare(self) -> None:
        """Compile the package once for all copies, and prove that copies are imported.

        Raises:
            RefusedError: an installed package goes before the copy's.
        """
        source = str(self.original / PACKAGE)
        environ = environment(self.original)
        command = [sys.executable, "-m", "compileall", "-q", source]
        self.children.run(command, self.original, environ, self.seconds)
        command = [sys.executable, "-c", "import hasten; print(hasten.__file__)"]
        _, output = self.children.run(command, self.original, environ, self.seconds)
        imported = output.strip().rpartition("\n")[2]
        log.info("tests import %s", imported)
        if not Path(imported).resolve().is_relative_to(self.original.resolve()):
            raise RefusedError(
                f"PYTHONPATH doesn't win: tests would import {imported} and not the copy in "
                f"{self.original}; take an interpreter whose installed package comes after it."
            )

    def attempt(self, fault: Fault) -> Result:
        """Plant a fault in a copy and run its tests."""
        began = time.monotonic()
        with self._copied() as copy:
            path = copy / PACKAGE / fault.file
            path.write_text(fault.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
            run = self._run(copy, fault.tests, stop_at_first=True)
            while self._is_false_alarm(run):
                self._broken = self._broken | {run.failed[0]}  # other threads read the old set
                run = self._run(copy, fault.tests, stop_at_first=True)
        outcome, note = self._judged(run)
        return Result(
            fault=fault.name,
            kind=fault.kind,
            package=fault.package,
            outcome=outcome,
            seconds=round(time.monotonic() - began, 1),
            commit=self.commit,
            test=run.failed[0] if run.failed else "",
            note=note,
        )

    def clean_run(self, tests: str) -> CleanRun:
        """Run the tests of one path without a fault, all of them."""
        with self._copied() as copy:
            run = self._run(copy, [tests], stop_at_first=False)
        note = "hangs" if run.code is None else "" if run.code in (PASSED, FAILED) else run.tail
        return CleanRun(tests, run.failed, round(run.seconds, 1), self.commit, note)

    def _judged(self, run: PytestRun) -> tuple[str, str]:
        """The outcome and a note."""
        if run.code is None:
            return CAUGHT, "hangs"
        if run.code == PASSED:
            return SURVIVED, ""
        if run.code == FAILED and run.failed and run.failed[0] not in self._broken:
            return CAUGHT, ""
        if run.code == INTERRUPTED and run.failed and self._passes_clean(run.failed[0]):
            return CAUGHT, "at collection"
        return ERROR, f"pytest ended with code {run.code}: {run.tail}"

    def _is_false_alarm(self, run: PytestRun) -> bool:
        """Whether the first test that failed does so without the fault too."""
        if run.code != FAILED or not run.failed or run.failed[0] in self._broken:
            return False
        return not self._passes_clean(run.failed[0])

    def _passes_clean(self, test: str) -> bool:
        """Whether a test passes without a fault, or a module's tests are collected."""
        file = test.partition("::")[0]
        if any(file == path or file.startswith(f"{path}/") for path in self._looked_at):
            return test not in self._broken
        with self._copied() as copy:
            if test == file:
                return self._run(copy, [test, "--collect-only"], stop_at_first=True).code == PASSED
            return self._run(copy, [test], stop_at_first=True).code == PASSED

    def _run(self, copy: Path, tests: Sequence[str], stop_at_first: bool) -> PytestRun:
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--color=no"]
        command += ["-p", "no:cacheprovider", f"--basetemp={copy.parent / 'tmp'}"]
        command += [f"--deselect={test}" for test in sorted(self._broken)]
        command += ["-x"] if stop_at_first else []
        began = time.monotonic()
        code, output = self.children.run([*command, *tests], copy, environment(copy), self.seconds)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return PytestRun(
            code=code,
            failed=tuple(dict.fromkeys(FAILED_LINE.findall(output))),
            seconds=time.monotonic() - began,
            tail=" | ".join(lines[-TAIL_LINES:]),
        )

    @contextlib.contextmanager
    def _copied(self) -> Iterator[Path]:
        """A copy of the original; compiled modules stay valid, since times are copied too."""
        with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as place:
            copy = Path(place) / "copy"
            shutil.copytree(self.original, copy, symlinks=True)
            yield copy


class Progress:
    """Logs each entry with the number that are done and the time that is left."""

    def __init__(self, total: int, jobs: int) -> None:
        self._total, self._jobs = total, jobs
        self._done, self._seconds = 0, 0.0

    def note(self, entry: Entry) -> None:
        """One more is done."""
        self._done += 1
        self._seconds += entry.seconds
        minutes = (self._total - self._done) * self._seconds / self._done / self._jobs / 60
        count = f"{self._done}/{self._total}"
        if isinstance(entry, Result):
            words = f"{entry.outcome} {entry.fault}: {entry.test or entry.note or 'all pass'}"
        else:
            words = f"{entry.clean}: {entry.note or ', '.join(entry.failed) or 'all pass'}"
        log.info("[%s] %s (%.0f s; %.0f min left)", count, words, entry.seconds, minutes)


def run_all(
    bench: Bench, work: Sequence[Fault | str], jobs: int, file: ResultsFile, known: Results
) -> None:
    """Attempt faults, or run paths of clean tests, some at a time; results go into the file.

    Raises:
        KeyboardInterrupt: the user has interrupted; children have been ended.
    """
    progress = Progress(len(work), jobs)

    def do(item: Fault | str) -> Entry:
        return bench.attempt(item) if isinstance(item, Fault) else bench.clean_run(item)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(do, item) for item in work]
        try:
            for done in as_completed(waiting):
                entry = done.result()
                file.append(entry)
                known.add(entry)
                progress.note(entry)
        except BaseException:
            bench.children.end_all()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned plain text; the first one is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def report(faults: Sequence[Fault], known: Results) -> str:
    """A row for each fault that has a result, and the numbers of each package."""
    rows = [("fault", "kind", "package", "outcome", "seconds", "first test that failed, or why")]
    counts: dict[str, Counter[str]] = {}
    for fault in faults:
        result = known.faults.get(fault.name)
        if result is not None:
            said = " ".join(filter(None, [result.test, result.note]))
            seconds = f"{result.seconds:.0f}"
            rows.append((fault.name, fault.kind, fault.package, result.outcome, seconds, said))
            counts.setdefault(fault.package, Counter())[result.outcome] += 1
    words = [
        f"{package}: {', '.join(f'{number} {outcome}' for outcome, number in found.most_common())}"
        for package, found in counts.items()
    ]
    return "\n".join([table(rows), "", *words])


def clean_report(paths: Sequence[str], known: Results) -> str:
    """What fails without a fault."""
    wrong = [known.clean[path] for path in paths if path in known.clean]
    lines = [f"{run.clean}: {run.note}" for run in wrong if run.note]
    lines += [f"fails without a fault: {test}" for run in wrong for test in run.failed]
    return "\n".join(lines) or f"the tests of {len(wrong)} paths pass without a fault"


def compare(old: Path, new: Path) -> int:
    """Print two results files side by side; 1 where a fault that OLD caught isn't caught in NEW.

    Raises:
        RefusedError: a file isn't there, or isn't one of results.
    """
    absent = [f"{path}: there is no such file." for path in (old, new) if not path.is_file()]
    if absent:
        raise RefusedError("\n".join(absent))
    before, after = read_results(old).faults, read_results(new).faults
    rows: list[tuple[str, ...]] = [("fault", "package", "old", "new", "", "old test", "new test")]
    lost = 0
    for name in dict.fromkeys([*before, *after]):
        then, now = before.get(name), after.get(name)
        some = then or now
        assert some is not None  # the name came from one of both
        missed = then is not None and then.outcome == CAUGHT
        missed = missed and (now is None or now.outcome != CAUGHT)
        lost += missed
        rows.append(
            (
                *(name, some.package),
                *(result.outcome if result else "not tried" for result in (then, now)),
                "LOST" if missed else "",
                *(result.test or result.note if result else "" for result in (then, now)),
            )
        )
    print(table(rows))
    print(f"\n{lost} faults that {old} caught aren't caught in {new}")
    return 1 if lost else 0


def chosen_faults(names: Sequence[str] | None) -> list[Fault]:
    """The faults of these names; all without names.

    Raises:
        RefusedError: there is none of a name.
    """
    by_name = {fault.name: fault for fault in FAULTS}
    for name in names or ():
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see --list"
            raise RefusedError(f"there is no fault {name!r}{hint}")
    return [by_name[name] for name in names] if names else list(FAULTS)


def warn_of_other_commits(known: Results, commit: str, path: Path) -> None:
    """Results are kept by name: say so where they are of other sources."""
    entries: list[Entry] = [*known.faults.values(), *known.clean.values()]
    others = Counter(entry.commit for entry in entries if entry.commit != commit)
    for other, number in others.items():
        log.warning(
            f"{number} results in {path} are of commit {other}, not {commit}: they are kept; "
            "name another --results to measure this one"
        )


def measure(given: argparse.Namespace) -> int:
    """Do what the command line asks for in the checkout."""
    faults = chosen_faults(given.only)
    known, path = read_results(given.results), Path(given.results)
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as place:
        original = Path(place) / "original"
        commit = unpack(given.checkout, original)
        refused = refusals(faults, original)
        if refused:
            raise RefusedError("\n".join(refused))
        warn_of_other_commits(known, commit, path)
        bench = Bench(original, commit, given.seconds, known)
        bench.prepare()
        file = ResultsFile(path)
        if given.clean:
            paths = list(dict.fromkeys(test for fault in faults for test in fault.tests))
            left = [test for test in paths if test not in known.clean]
            run_all(bench, left, given.jobs, file, known)
            print(clean_report(paths, known))
            return int(any(known.clean[test].failed or known.clean[test].note for test in paths))
        settled = {n for n, result in known.faults.items() if result.outcome != ERROR}
        run_all(bench, [f for f in faults if f.name not in settled], given.jobs, file, known)
    print(report(faults, known))
    return int(any(known.faults[fault.name].outcome != CAUGHT for fault in faults))


def arguments() -> argparse.Namespace:
    """The command line."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    asked.add_argument(
        "--clean", action="store_true", help="run the faults' tests without any fault, and stop"
    )
    asked.add_argument("--checkout", type=Path, default=ROOT, help="whose HEAD is measured")
    asked.add_argument("--results", type=Path, default=RESULTS, help="a JSONL file, appended to")
    asked.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="limit of one run of tests; well above what --clean took, or slow counts as caught",
    )
    asked.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    asked.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    asked.add_argument("--list", action="store_true", help="print the faults, and stop")
    asked.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two results files"
    )
    return asked.parse_args()


def main() -> int:
    """See the exit codes at the head of this file."""
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # A shell lets what it starts in the background ignore Ctrl-C: SIGTERM then does the same.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if given.compare:
            return compare(*given.compare)
        if given.list:
            rows = [(f.name, f.kind, f.file, " ".join(f.tests)) for f in chosen_faults(given.only)]
            print(table([("fault", "kind", "file", "tests"), *rows]))
            return 0
        return measure(given)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        log.warning("interrupted; what is done is kept in %s", given.results)
        return 130


if __name__ == "__main__":
    sys.exit(main())
