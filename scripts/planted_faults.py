"""Plants small faults in the package, one at a time, and tells which of them the tests catch.

    python scripts/planted_faults.py --clean                   # which tests fail without a fault
    python scripts/planted_faults.py --jobs 2                  # every fault against its tests
    python scripts/planted_faults.py --compare OLD.jsonl NEW.jsonl

This is a mutation test with chosen mutants (DeMillo, Lipton and Sayward, Hints on Test Data
Selection, Computer 11, 1978). It measures the test suite, so that a rebuilt suite can be shown to
catch whatever an old one caught. The faults are listed at the end of this file.

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


CORE: tuple[Fault, ...] = (
    Fault(
        name="loss-per-any-token",
        kind="wrong reduction",
        file="core/step.py",
        old="loss=total / (counts.trained_tokens or 1),",
        new="loss=total / (counts.tokens or 1),",
        tests=("tests/core/test_step.py",),
    ),
    Fault(
        name="gradient-of-ranks-too-small",
        kind="wrong reduction",
        file="core/step.py",
        old="setup.loss_factor * setup.layout.averages / (denominator or 1.0)",
        new="setup.loss_factor / (denominator or 1.0)",
        tests=(
            "tests/measure/quality/test_proofs_on_ranks.py",
            "tests/techniques/test_layout_sharded.py",
        ),
    ),
    Fault(
        name="clipping-enlarges",
        kind="missing bound",
        file="core/step.py",
        old="divisor = ((self._norm + 1e-6) / self.max_norm).clamp_min(1.0)",
        new="divisor = (self._norm + 1e-6) / self.max_norm",
        tests=("tests/techniques/test_optimizer.py", "tests/core/test_step.py"),
    ),
    Fault(
        name="clip-by-scaled-norm",
        kind="wrong order",
        file="core/step.py",
        old=(
            "            setup.loss_scale.unscale(gradients_of(parameters))\n"
            "        self._norm = setup.layout.norm(parameters)\n"
        ),
        new=(
            "            self._norm = setup.layout.norm(parameters)\n"
            "            setup.loss_scale.unscale(gradients_of(parameters))\n"
        ),
        tests=("tests/techniques/test_precision.py",),
    ),
    Fault(
        name="overflow-stays-on-its-rank",
        kind="missing agreement",
        file="core/step.py",
        old="return not rank_sync.sum(wrong).item()",
        new="return not wrong.item()",
        tests=("tests/core/test_step_checks.py", "tests/techniques/test_precision.py"),
    ),
    Fault(
        name="skipped-step-loads-experts",
        kind="forgotten reset",
        file="core/step.py",
        old="            self.setup.routing.discard()\n",
        new="            pass\n",
        tests=("tests/techniques/test_routing.py", "tests/parts/nn/test_routing.py"),
    ),
    Fault(
        name="same-order-every-epoch",
        kind="ignored seed",
        file="core/job.py",
        old="(seed * 1_000_003 + epoch) % 2**63",
        new="(seed * 1_000_003) % 2**63",
        tests=("tests/core/test_schedule_and_order.py",),
    ),
    Fault(
        name="warm-up-begins-at-zero",
        kind="off-by-one",
        file="core/job.py",
        old="return (step + 1) / (self.warmup_steps + 1)",
        new="return step / self.warmup_steps",
        tests=("tests/core/test_schedule_and_order.py",),
    ),
    Fault(
        name="floor-after-the-last-step",
        kind="off-by-one",
        file="core/job.py",
        old="length = max(total - 1 - start, 1)",
        new="length = max(total - start, 1)",
        tests=("tests/core/test_schedule_and_order.py", "tests/core/test_step.py"),
    ),
    Fault(
        name="spike-count-goes-back-too",
        kind="forgotten state",
        file="core/health.py",
        old="        self.times, self.rate = times, rate\n",
        new="",
        tests=("tests/core/test_spikes.py",),
    ),
    Fault(
        name="random-state-not-resumed",
        kind="forgotten state",
        file="core/state.py",
        old="        set_random_state(ranks[rank])\n",
        new="        pass\n",
        tests=("tests/core/test_trainer.py", "tests/techniques/test_checkpoint.py"),
    ),
    Fault(
        name="saved-state-shares-memory",
        kind="missing copy",
        file="core/state.py",
        old='tensor.to("cpu", copy=True)',
        new='tensor.to("cpu")',
        tests=("tests/core/test_state.py",),
    ),
    Fault(
        name="patience-of-one-more",
        kind="off-by-one",
        file="core/loop.py",
        old=">= watch.patience",
        new="> watch.patience",
        tests=("tests/core/test_trainer.py",),
    ),
    Fault(
        name="held-out-mean-of-means",
        kind="wrong reduction",
        file="core/loop.py",
        old="torch.tensor([float(loss), batch.counts.trained_tokens], dtype=torch.float64)",
        new="torch.tensor([float(loss) / (batch.counts.trained_tokens or 1), 1.0])",
        tests=("tests/core/test_trainer.py",),
    ),
    Fault(
        name="model-stays-in-evaluation",
        kind="forgotten reset",
        file="core/loop.py",
        old="        module.train(was_training)\n",
        new="        module.eval()\n",
        tests=("tests/core/test_trainer.py",),
    ),
    Fault(
        name="skipped-steps-never-forgotten",
        kind="forgotten reset",
        file="core/health.py",
        old="        else:\n            self.in_a_row = 0\n",
        new="",
        tests=("tests/core/test_step_checks.py", "tests/core/test_step.py"),
    ),
    Fault(
        name="quarantine-names-the-next-step",
        kind="off-by-one",
        file="core/health.py",
        old="setup.layout, progress.step_in_epoch - 1",
        new="setup.layout, progress.step_in_epoch",
        tests=("tests/core/test_step_checks.py",),
    ),
    Fault(
        name="waiting-counted-twice",
        kind="wrong sum",
        file="core/timing.py",
        old="    parts[part] = parts.get(part, 0.0) - seconds\n",
        new="    parts[part] = parts.get(part, 0.0)\n",
        tests=("tests/core/test_clock.py",),
    ),
    Fault(
        name="ranks-share-dropout",
        kind="ignored seed",
        file="core/session.py",
        old="torch.manual_seed(job.seed + 1 + setup.layout.data_rank)",
        new="torch.manual_seed(job.seed + 1)",
        tests=("tests/techniques/test_layout_sharded.py", "tests/techniques/test_feed.py"),
    ),
    Fault(
        name="notice-whatever-the-exit-code",
        kind="dropped error",
        file="core/loop.py",
        old="        return done.returncode == 0\n",
        new="        return done is not None\n",
        tests=("tests/core/test_leaving.py",),
    ),
)

PARTS: tuple[Fault, ...] = (
    Fault(
        name="rows-filled-with-other-examples",
        kind="wrong index",
        file="parts/data/packing.py",
        old="order[_sorted_by(sizes[order])]",
        new="order[_sorted_by(sizes)]",
        tests=("tests/parts/data/test_packing.py",),
    ),
    Fault(
        name="loss-mask-shifted",
        kind="off-by-one",
        file="parts/data/collate.py",
        old="np.where(example.trained[1:], example.input_ids[1:], IGNORED)",
        new="np.where(example.trained[:-1], example.input_ids[1:], IGNORED)",
        tests=("tests/parts/data/test_collate.py",),
    ),
    Fault(
        name="positions-run-on-in-a-row",
        kind="forgotten reset",
        file="parts/data/collate.py",
        old="torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)",
        new="torch.arange(sum(lengths)).unsqueeze(0)",
        tests=("tests/parts/data/test_collate.py",),
    ),
    Fault(
        name="mean-loss-not-weighted",
        kind="wrong reduction",
        file="parts/nn/losses.py",
        old="return loss * weight, torch.tensor(weight)",
        new="return loss, torch.tensor(weight)",
        tests=("tests/parts/nn/test_losses.py",),
    ),
    Fault(
        name="held-out-loss-is-smoothed",
        kind="wrong mode",
        file="parts/nn/losses.py",
        old="        terms = self.terms if self.training else self.terms.measured()\n",
        new="        terms = self.terms\n",
        tests=("tests/parts/nn/test_losses.py",),
    ),
    Fault(
        name="z-loss-gradient-halved",
        kind="wrong factor",
        file="parts/nn/losses.py",
        old="        grad *= 1 + 2 * terms.z_loss * log_sum\n",
        new="        grad *= 1 + terms.z_loss * log_sum\n",
        tests=("tests/parts/nn/test_cross_entropy.py",),
    ),
    Fault(
        name="filler-rows-get-a-gradient",
        kind="forgotten mask",
        file="parts/nn/losses.py",
        old="grad -= counted * (terms.label_smoothing / logits.shape[1])",
        new="grad -= terms.label_smoothing / logits.shape[1]",
        tests=("tests/parts/nn/test_cross_entropy.py",),
    ),
    Fault(
        name="folder-renamed-before-it-is-durable",
        kind="missing barrier",
        file="parts/checkpoint/commit.py",
        old="        disk.sync(temporary)\n",
        new="",
        tests=("tests/faults/test_power_cut.py",),
    ),
    Fault(
        name="damaged-base-verifies",
        kind="missing check",
        file="parts/checkpoint/verify.py",
        old=(
            '    if manifest.get("base"):\n        _verify_base(path, manifest["base"], thorough)\n'
        ),
        new="",
        tests=("tests/faults/test_damage.py", "tests/faults/test_strangers.py"),
    ),
    Fault(
        name="one-checkpoint-too-many-stays",
        kind="off-by-one",
        file="parts/checkpoint/commit.py",
        old="spare = len(good) >= keep and",
        new="spare = len(good) > keep and",
        tests=("tests/parts/checkpoint/test_retention.py",),
    ),
    Fault(
        name="error-of-the-writer-is-lost",
        kind="dropped error",
        file="parts/checkpoint/saver.py",
        old="        elif error is not None:\n            raise error\n",
        new="",
        tests=(
            "tests/parts/checkpoint/test_smart_checkpointer.py",
            "tests/techniques/test_checkpoint.py",
        ),
    ),
    Fault(
        name="staging-without-copies",
        kind="missing copy",
        file="parts/checkpoint/saver.py",
        old="        return dict(self._kept)\n",
        new="        return dict(tensors)\n",
        tests=("tests/parts/checkpoint/test_smart_checkpointer.py",),
    ),
    Fault(
        name="every-rank-draws-as-the-first",
        kind="wrong index",
        file="parts/checkpoint/smart_checkpointer.py",
        old="set_random_state(ranks[_rank()])",
        new="set_random_state(ranks[0])",
        tests=("tests/parts/checkpoint/test_smart_checkpointer.py",),
    ),
    Fault(
        name="each-rank-decides-when-to-save",
        kind="missing agreement",
        file="parts/checkpoint/smart_checkpointer.py",
        old=(
            "        due, following = self._agree(\n"
            "            [float(number) for number in"
            " self.rhythm.decide(step, self.saver.busy)]\n"
            "        )\n"
        ),
        new="        due, following = self.rhythm.decide(step, self.saver.busy)\n",
        tests=(
            "tests/parts/checkpoint/test_smart_checkpointer.py",
            "tests/techniques/test_checkpoint.py",
        ),
    ),
    Fault(
        name="recovery-shortens-the-risk",
        kind="swapped sign",
        file="parts/checkpoint/smart_checkpointer.py",
        old="2 * (between_failures + recovery) * cost",
        new="2 * (between_failures - recovery) * cost",
        tests=("tests/parts/checkpoint/test_interval.py",),
    ),
    Fault(
        name="skipped-step-is-remembered",
        kind="forgotten condition",
        file="parts/comm/methods.py",
        old="        if counted:\n            self._kept |= self._pending\n",
        new="        self._kept |= self._pending\n",
        tests=("tests/parts/comm/test_gradient_compressor.py",),
    ),
    Fault(
        name="memory-of-an-unused-layer-is-lost",
        kind="forgotten state",
        file="parts/comm/buckets.py",
        old="                give_back(new_residual, withheld)\n",
        new="",
        tests=("tests/parts/comm/test_gradient_compressor.py",),
    ),
    Fault(
        name="residual-of-one-rank-s-share",
        kind="wrong factor",
        file="parts/comm/methods.py",
        old="(matrix - basis @ local_factor.float().T * world)",
        new="(matrix - basis @ local_factor.float().T)",
        tests=("tests/parts/comm/test_gradient_compressor.py",),
    ),
    Fault(
        name="owner-owes-one-share",
        kind="wrong factor",
        file="parts/comm/methods.py",
        old="new_residual[low:high].add_(mean - result[low:high], alpha=ranks.world)",
        new="new_residual[low:high].add_(mean - result[low:high])",
        tests=("tests/parts/comm/test_gradient_compressor.py",),
    ),
    Fault(
        name="velocity-keeps-what-was-sent",
        kind="forgotten mask",
        file="parts/comm/methods.py",
        old="self._velocity.leave_bucket(pieces, flat.masked_fill(sent, 0.0))",
        new="self._velocity.leave_bucket(pieces, flat)",
        tests=("tests/parts/comm/test_gradient_compressor.py",),
    ),
    Fault(
        name="scale-rounded-down",
        kind="wrong rounding",
        file="parts/kernels/codec_reference.py",
        old="((share + 0xFFFF) >> 16)",
        new="((share + 0x7FFF) >> 16)",
        tests=("tests/parts/kernels/test_codec_kernels.py", "tests/parts/comm/test_codecs.py"),
    ),
    Fault(
        name="head-counted-on-the-first-stage",
        kind="wrong index",
        file="parts/distributed/pipeline/stages.py",
        old="(first if index == 0 else 0.0) + (last if index == stages - 1 else 0.0)",
        new="(last if index == 0 else 0.0) + (first if index == stages - 1 else 0.0)",
        tests=("tests/parts/distributed/test_partition.py",),
    ),
    Fault(
        name="norm-counts-every-copy",
        kind="wrong reduction",
        file="parts/distributed/local_shards.py",
        old="shares = torch.tensor([1 / h for h in holders],",
        new="shares = torch.tensor([1.0 for _ in holders],",
        tests=("tests/techniques/test_layout_tensor.py",),
    ),
    Fault(
        name="hidden-gradient-of-one-rank",
        kind="missing reduction",
        file="parts/distributed/vocabulary_parallel.py",
        old=(
            "        if grad_hidden is not None:\n"
            "            dist.all_reduce(grad_hidden, group=group)\n"
        ),
        new="",
        tests=("tests/techniques/test_layout_tensor.py",),
    ),
    Fault(
        name="one-forward-pass-too-early",
        kind="off-by-one",
        file="parts/distributed/pipeline/schedules.py",
        old="ahead = min(ranks - 1 - rank, micro_batches)",
        new="ahead = min(ranks - rank, micro_batches)",
        tests=("tests/parts/distributed/test_pipeline_schedules.py",),
    ),
    Fault(
        name="filler-is-trained",
        kind="wrong default",
        file="parts/distributed/pipeline/runtime.py",
        old='"labels": IGNORED,',
        new='"labels": 0,',
        tests=("tests/parts/distributed/test_pipeline.py",),
    ),
    Fault(
        name="expert-gradients-not-averaged",
        kind="wrong reduction",
        file="parts/distributed/expert_parallel.py",
        old="        weight.grad.div_(self._divisor)  # before the sum: fp16 can't hold all\n",
        new="",
        tests=("tests/parts/distributed/test_expert_parallel.py",),
    ),
    Fault(
        name="bits-taken-for-bytes",
        kind="wrong unit",
        file="parts/comm/topology.py",
        old="megabits * 1e6 / 8 if megabits > 0",
        new="megabits * 1e6 if megabits > 0",
        tests=("tests/parts/comm/test_topology.py",),
    ),
    Fault(
        name="ring-is-not-closed",
        kind="wrong index",
        file="parts/comm/topology.py",
        old="(*order[1:], order[0])",
        new="(*order[1:], order[-1])",
        tests=("tests/parts/comm/test_topology.py",),
    ),
    Fault(
        name="mean-divided-twice",
        kind="forgotten condition",
        file="parts/comm/collectives.py",
        old='if op == "mean" and not early:\n            reduced.div_',
        new='if op == "mean":\n            reduced.div_',
        tests=("tests/parts/comm/test_collectives.py",),
    ),
    Fault(
        name="bias-feeds-the-busy-expert",
        kind="swapped sign",
        file="parts/nn/router_balance.py",
        old="torch.sign(self.last.mean(dim=1, keepdim=True) - self.last)",
        new="torch.sign(self.last - self.last.mean(dim=1, keepdim=True))",
        tests=("tests/parts/nn/test_routing.py",),
    ),
    Fault(
        name="filler-counts-as-load",
        kind="forgotten mask",
        file="parts/nn/router_balance.py",
        old="real = (heard.sequences != FILLER).to(self._loads)",
        new="real = torch.ones_like(heard.sequences).to(self._loads)",
        tests=("tests/parts/nn/test_routing.py",),
    ),
    Fault(
        name="momentum-the-wrong-way-round",
        kind="wrong factor",
        file="parts/optim/muon.py",
        old="moment.lerp_(grad, 1 - self.momentum)",
        new="moment.lerp_(grad, self.momentum)",
        tests=("tests/parts/optim/test_muon.py",),
    ),
    Fault(
        name="same-rounding-every-step",
        kind="ignored seed",
        file="parts/optim/compact_adamw.py",
        old="* 0x9E3779B97F4A7C15 + step",
        new="* 0x9E3779B97F4A7C15",
        tests=("tests/parts/optim/test_compact_adamw.py",),
    ),
    Fault(
        name="norms-and-biases-decay",
        kind="wrong comparison",
        file="parts/optim/weight_average.py",
        old='parameter.ndim >= 2 and not name.endswith("bias")',
        new="parameter.ndim >= 1",
        tests=("tests/parts/optim/test_parameter_groups.py",),
    ),
    Fault(
        name="scale-grows-soon-after-an-overflow",
        kind="forgotten reset",
        file="parts/optim/master_weights.py",
        old="self.value, self._good = max(self.value * self.backoff, 1.0), 0",
        new="self.value = max(self.value * self.backoff, 1.0)",
        tests=("tests/parts/optim/test_loss_scale.py",),
    ),
    Fault(
        name="micro-batches-counted-again",
        kind="forgotten reset",
        file="parts/optim/master_weights.py",
        old=(
            "                master.grad = _sum(master.grad, working.grad)\n"
            "            working.grad = None\n"
        ),
        new="                master.grad = _sum(master.grad, working.grad)\n",
        tests=("tests/parts/optim/test_master_weights.py", "tests/core/test_step.py"),
    ),
    Fault(
        name="averaged-weights-stay",
        kind="missing copy",
        file="parts/optim/weight_average.py",
        old='before = [p.detach().to("cpu", copy=True) for p in parameters]',
        new='before = [p.detach().to("cpu") for p in parameters]',
        tests=("tests/parts/optim/test_weight_average.py",),
    ),
    Fault(
        name="new-epoch-begins-in-its-middle",
        kind="forgotten reset",
        file="parts/data/dynamic_batch.py",
        old="self.epoch, self._done, self._start = epoch, 0, 0",
        new="self.epoch = epoch",
        tests=("tests/parts/data/test_dynamic_sampler.py",),
    ),
    Fault(
        name="batch-counted-after-its-step",
        kind="off-by-one",
        file="parts/data/prefetch.py",
        old=(
            "            self.batch += 1\n"
            "            yield sent if copies is None else copies.receive(sent)\n"
        ),
        new=(
            "            yield sent if copies is None else copies.receive(sent)\n"
            "            self.batch += 1\n"
        ),
        tests=("tests/parts/data/test_prefetcher.py",),
    ),
    Fault(
        name="error-of-the-loader-is-lost",
        kind="dropped error",
        file="parts/data/prefetch.py",
        old="        error = caught\n",
        new="        error = None\n",
        tests=("tests/parts/data/test_reading_thread.py",),
    ),
    Fault(
        name="rows-keep-their-company",
        kind="ignored seed",
        file="parts/data/epoch_order.py",
        old="examples = _generator(self.seed, epoch, RECORDS_DRAWN)",
        new="examples = _generator(self.seed, 0, RECORDS_DRAWN)",
        tests=("tests/parts/data/test_row_order.py",),
    ),
    Fault(
        name="last-piece-weighs-too-much",
        kind="wrong reduction",
        file="parts/data/dynamic_batch.py",
        old="step(micro_batch, example_count(micro_batch) / batch_size)",
        new="step(micro_batch, size / batch_size)",
        tests=("tests/parts/data/test_dynamic_batcher.py",),
    ),
    Fault(
        name="a-size-too-large-stays-good",
        kind="forgotten reset",
        file="machine/memory.py",
        old=(
            "        if self.good >= self.ceiling:"
            "  # it was good by chance: its batches were smaller\n"
            "            self.good = 0\n"
        ),
        new="",
        tests=("tests/machine/test_headroom.py", "tests/parts/data/test_dynamic_batcher.py"),
    ),
    Fault(
        name="anchor-of-before-the-resume",
        kind="forgotten reset",
        file="parts/comm/local_sgd.py",
        old=(
            '        self.steps, self.exchanges = state["steps"], state["exchanges"]\n'
            "        self.drift.reset()\n"
        ),
        new='        self.steps, self.exchanges = state["steps"], state["exchanges"]\n',
        tests=(
            "tests/parts/comm/test_local_steps.py",
            "tests/techniques/test_communication_local_life.py",
        ),
    ),
    Fault(
        name="ranks-count-alike-whatever-they-trained",
        kind="wrong reduction",
        file="parts/comm/local_sgd.py",
        old="[tokens / total if total else 1 / len(headers) for tokens, _ in headers]",
        new="[1 / len(headers) for _ in headers]",
        tests=("tests/parts/comm/test_local_steps.py",),
    ),
    Fault(
        name="tokens-ahead-cross-documents",
        kind="forgotten mask",
        file="parts/nn/multi_token.py",
        old="return inside & (number == number.roll(-distance, dims=1))",
        new="return inside",
        tests=("tests/parts/nn/test_multi_token.py",),
    ),
)

EVIDENCE: tuple[Fault, ...] = (
    Fault(
        name="one-degree-of-freedom-too-many",
        kind="off-by-one",
        file="measure/statistics.py",
        old="student_quantile((1 + confidence) / 2, rounds - 1) * error",
        new="student_quantile((1 + confidence) / 2, rounds) * error",
        tests=("tests/measure/test_statistics.py",),
    ),
    Fault(
        name="gain-by-the-upper-end",
        kind="wrong comparison",
        file="measure/statistics.py",
        old="if ratio.low > 1 + noise_floor:",
        new="if ratio.high > 1 + noise_floor:",
        tests=("tests/measure/test_statistics.py",),
    ),
    Fault(
        name="holm-never-steps-down",
        kind="forgotten step",
        file="measure/significance.py",
        old="        remaining -= 1\n",
        new="",
        tests=("tests/measure/test_significance.py",),
    ),
    Fault(
        name="processes-need-not-agree",
        kind="wrong comparison",
        file="measure/significance.py",
        old="max(by_rounds, process_variance.chance(mean - edge))",
        new="min(by_rounds, process_variance.chance(mean - edge))",
        tests=("tests/measure/test_luck.py",),
    ),
    Fault(
        name="a-lower-loss-is-worse",
        kind="swapped sign",
        file="report/judgement.py",
        old="change = ours / theirs - 1",
        new="change = theirs / ours - 1",
        tests=("tests/report/test_judgement.py",),
    ),
    Fault(
        name="no-look-after-the-last-round",
        kind="off-by-one",
        file="measure/ablation.py",
        old="for look in range(1, self.evaluations + 1)",
        new="for look in range(self.evaluations)",
        tests=("tests/measure/test_ablation.py",),
    ),
    Fault(
        name="rung-without-its-own-technique",
        kind="off-by-one",
        file="measure/ablation.py",
        old="Plan(plan.techniques[: index + 1])",
        new="Plan(plan.techniques[:index])",
        tests=("tests/measure/test_ablation.py",),
    ),
    Fault(
        name="turns-always-in-one-order",
        kind="ignored seed",
        file="measure/schedule.py",
        old="order = draw.sample(list(variants), len(variants))",
        new="order = list(variants)",
        tests=("tests/measure/test_cohorts.py",),
    ),
    Fault(
        name="every-pass-in-the-same-order",
        kind="forgotten step",
        file="measure/schedule.py",
        old="            yield name, outcome\n        order.reverse()\n",
        new="            yield name, outcome\n",
        tests=("tests/tune/test_abreast.py",),
    ),
    Fault(
        name="who-is-cut-off-has-failed",
        kind="forgotten condition",
        file="measure/schedule.py",
        old="            if self._left() > 0:  # else",
        new="            if True:  # else",
        tests=("tests/tune/test_bench.py",),
    ),
    Fault(
        name="a-slow-variant-has-the-slices-of-a-fast-one",
        kind="wrong factor",
        file="measure/schedule.py",
        old="{name: share * variant.pace for name, variant in variants.items()}",
        new="dict.fromkeys(variants, SLICE_SECONDS)",
        tests=("tests/measure/test_slices.py",),
    ),
    Fault(
        name="disturbed-rounds-count-as-calm",
        kind="forgotten condition",
        file="measure/rounds.py",
        old="calm = sum(self.load(key) <= self.limit for key in keys)",
        new="calm = len(keys)",
        tests=("tests/measure/test_cohorts.py",),
    ),
    Fault(
        name="not-a-number-passes-the-verification",
        kind="missing check",
        file="measure/quality/requirements.py",
        old="return math.inf if any(math.isnan(s) for s in shares) else max(shares)",
        new="return max(shares)",
        tests=("tests/measure/quality/test_verification.py",),
    ),
    Fault(
        name="verification-compares-losses-alone",
        kind="missing check",
        file="measure/quality/requirements.py",
        old='parts = ("losses", "weights")',
        new='parts = ("losses",)',
        tests=("tests/measure/quality/test_verification.py",),
    ),
    Fault(
        name="verification-hears-the-first-rank-alone",
        kind="wrong reduction",
        file="measure/workers.py",
        old="first | max(judged, key=_error_of)",
        new="first | judged[0]",
        tests=(
            "tests/measure/quality/test_verification_process.py",
            "tests/measure/quality/test_verification_ranks.py",
        ),
    ),
    Fault(
        name="more-of-a-measure-is-worse",
        kind="swapped sign",
        file="measure/quality/requirements.py",
        old="([1 / value for value in values] for values in (self.without, self.with_))",
        new="(list(values) for values in (self.without, self.with_))",
        tests=("tests/measure/quality/test_verification.py",),
    ),
    Fault(
        name="ledger-of-the-warm-up",
        kind="wrong index",
        file="measure/profile.py",
        old="steps = every[warmup:] or every",
        new="steps = every[:warmup] or every",
        tests=("tests/measure/test_ledger.py",),
    ),
    Fault(
        name="half-a-line-stays-in-the-record",
        kind="forgotten step",
        file="measure/record.py",
        old=("    if len(complete) < len(content):\n        os.truncate(path, len(complete))\n"),
        new="",
        tests=("tests/measure/test_record.py",),
    ),
    Fault(
        name="margin-held-by-the-mean",
        kind="wrong comparison",
        file="measure/significance.py",
        old="if mean + half < allowed:",
        new="if mean < allowed:",
        tests=("tests/report/test_non_inferiority.py",),
    ),
    Fault(
        name="each-decision-has-all-the-doubt",
        kind="wrong factor",
        file="report/speedup.py",
        old="doubt=DOUBT / len(techniques)",
        new="doubt=DOUBT",
        tests=("tests/report/test_climb.py",),
    ),
    Fault(
        name="energy-of-a-turnover-is-lost",
        kind="forgotten condition",
        file="measure/energy.py",
        old="self._sum += step if step >= 0 else step + self._range",
        new="self._sum += max(step, 0)",
        tests=("tests/measure/test_energy.py",),
    ),
    Fault(
        name="exit-code-lost",
        kind="dropped error",
        file="measure/workers.py",
        old="        code = self._group.wait(rank, LEAVE_SECONDS)\n",
        new="        self._group.wait(rank, LEAVE_SECONDS)\n        code: int | None = 0\n",
        tests=("tests/measure/test_workers.py",),
    ),
    Fault(
        name="workers-run-on-between-requests",
        kind="forgotten condition",
        file="measure/workers.py",
        old="        self._stop()\n        heard,",
        new="        heard,",
        tests=("tests/measure/test_workers.py",),
    ),
    Fault(
        name="forked-workers-outlive-their-server",
        kind="forgotten condition",
        file="measure/worker.py",
        old="    end_with_parent()\n    if os.getppid() != server:",
        new="    if os.getppid() != server:",
        tests=("tests/measure/test_workers.py",),
    ),
    Fault(
        name="one-fork-server-for-all-environments",
        kind="forgotten condition",
        file="measure/workers.py",
        old="key = frozenset(environ.items())\n        fork_server",
        new="key = frozenset()\n        fork_server",
        tests=("tests/measure/test_workers.py",),
    ),
    Fault(
        name="regression-upside-down",
        kind="swapped sign",
        file="report/bundle.py",
        old="unpaired_ratio(before.ratios, now.ratios)",
        new="unpaired_ratio(now.ratios, before.ratios)",
        tests=("tests/report/test_regress.py",),
    ),
)

DATA: tuple[Fault, ...] = (
    Fault(
        name="pieces-do-not-overlap",
        kind="off-by-one",
        file="data/chat_template.py",
        old="range(0, max(example.length - 1, 1), cutoff_len - 1)",
        new="range(0, max(example.length - 1, 1), cutoff_len)",
        tests=("tests/data/test_templates.py",),
    ),
    Fault(
        name="answers-before-the-last-untrained",
        kind="forgotten step",
        file="data/chat_template.py",
        old="            spans.append((first, end))\n",
        new="",
        tests=("tests/data/test_prompt_formats.py",),
    ),
    Fault(
        name="first-token-of-an-answer-untrained",
        kind="off-by-one",
        file="data/chat_template.py",
        old="trained[begin : bisect_left(",
        new="trained[begin + 1 : bisect_left(",
        tests=("tests/data/test_masks.py", "tests/data/test_templates.py"),
    ),
    Fault(
        name="what-nothing-predicts-is-counted",
        kind="forgotten mask",
        file="data/token_store.py",
        old="    marks[firsts[firsts < lasts]] = False\n",
        new="",
        tests=("tests/data/test_store.py",),
    ),
    Fault(
        name="a-held-out-example-is-trained",
        kind="leak",
        file="data/token_store.py",
        old="return np.sort(order[count:]), np.sort(order[:count])",
        new="return np.sort(order[max(count - 1, 0) :]), np.sort(order[:count])",
        tests=("tests/data/test_store.py",),
    ),
    Fault(
        name="cache-knows-no-template",
        kind="missing check",
        file="data/token_store.py",
        old="backend, tokenizer.chat_template, borders]",
        new="backend, borders]",
        tests=("tests/data/test_store.py",),
    ),
    Fault(
        name="boundary-token-trained",
        kind="leak",
        file="data/packed_file.py",
        old="        trained[0] = False  # nothing of the example stands before it\n",
        new="",
        tests=("tests/data/test_packed_file.py",),
    ),
    Fault(
        name="digest-not-compared",
        kind="missing check",
        file="data/arrow_file.py",
        old="if end < _SIZE_BYTES or _digest(file, end) != file.read(_DIGEST_BYTES):",
        new="if end < _SIZE_BYTES:",
        tests=("tests/data/test_store.py",),
    ),
    Fault(
        name="steps-of-all-examples-add-up",
        kind="forgotten reset",
        file="data/template_sandbox.py",
        old="        environment.left = STEPS\n",
        new="",
        tests=("tests/data/test_render.py", "tests/data/test_templates.py"),
    ),
    Fault(
        name="weights-draw-without-the-seed",
        kind="ignored seed",
        file="data/sources.py",
        old="np.random.default_rng([seed, number])",
        new="np.random.default_rng([number])",
        tests=("tests/data/test_columns.py", "tests/data/test_spool.py"),
    ),
    Fault(
        name="spool-overwrites-what-was-read",
        kind="forgotten step",
        file="data/spool.py",
        old="            self._file.seek(0, os.SEEK_END)\n",
        new="",
        tests=("tests/data/test_spool.py",),
    ),
    Fault(
        name="one-tool-shown-is-enough",
        kind="wrong comparison",
        file="data/chat_template.py",
        old="not all(name in text for name in names)",
        new="not any(name in text for name in names)",
        tests=("tests/data/test_toolturns.py",),
    ),
    Fault(
        name="one-reject-taken-for-all",
        kind="wrong comparison",
        file="data/readers.py",
        old="if max_rejected < 1 else max_rejected",
        new="if max_rejected <= 1 else max_rejected",
        tests=("tests/data/test_formats.py",),
    ),
)

RECIPE: tuple[Fault, ...] = (
    Fault(
        name="schedule-ends-a-step-early",
        kind="wrong rounding",
        file="recipe/build.py",
        old="limits.append(-(-job.stop.tokens * len(sizes) // sum(sizes)))",
        new="limits.append(job.stop.tokens * len(sizes) // sum(sizes))",
        tests=("tests/training/test_run.py",),
    ),
    Fault(
        name="second-moment-too-slow",
        kind="wrong default",
        file="recipe/build.py",
        old="betas=recipe.adam_betas",
        new="betas=(0.9, 0.999)",
        tests=("tests/recipe/test_recipe.py", "tests/recipe/test_deepspeed_key.py"),
    ),
    Fault(
        name="spot-hours-paid-twice",
        kind="wrong sum",
        file="recipe/price.py",
        old="return self.per_device_hour * (1 - self.spot_share) + spot",
        new="return self.per_device_hour + spot",
        tests=("tests/recipe/test_price.py",),
    ),
    Fault(
        name="each-rank-has-all-the-memory",
        kind="wrong reduction",
        file="recipe/memory_check.py",
        old="return hardware.memory_limit_bytes / ranks_here(context.world)",
        new="return float(hardware.memory_limit_bytes)",
        tests=("tests/recipe/test_memory_budget.py",),
    ),
    Fault(
        name="copies-overlap-once",
        kind="wrong sum",
        file="recipe/prepared_data.py",
        old="Overlap(sum(digest in shared for digest in wanted), len(eval_data))",
        new="Overlap(len(shared), len(eval_data))",
        tests=("tests/recipe/test_overlap.py",),
    ),
    Fault(
        name="files-of-equal-size-are-the-same",
        kind="missing check",
        file="recipe/prepared_data.py",
        old="times = (stat.st_mtime_ns, stat.st_ctime_ns)",
        new="times = ()",
        tests=("tests/recipe/test_stamps.py", "tests/recipe/test_reading.py"),
    ),
    Fault(
        name="folder-drops-the-settings-beside-it",
        kind="forgotten state",
        file="recipe/shorthands.py",
        old='{NAME: {**_settings(plan[index]), "folder": folder}},',
        new='{NAME: {"folder": folder}},',
        tests=("tests/recipe/test_checkpoint_keys.py",),
    ),
    Fault(
        name="stage-two-shards-weights",
        kind="wrong comparison",
        file="recipe/shorthands.py",
        old='"reshard": mapped_config.stage == 3',
        new='"reshard": mapped_config.stage >= 2',
        tests=("tests/recipe/test_deepspeed_key.py",),
    ),
    Fault(
        name="imported-batch-of-one-rank",
        kind="wrong factor",
        file="recipe/importers/training.py",
        old="count = each * passes * ranks",
        new="count = each * passes",
        tests=("tests/recipe/test_foreign_configs.py",),
    ),
    Fault(
        name="ceiling-of-one-device",
        kind="wrong factor",
        file="recipe/peak_flops.py",
        old="ceiling=devices * ceiling.rate",
        new="ceiling=ceiling.rate",
        tests=("tests/recipe/test_ceiling.py",),
    ),
    Fault(
        name="the-file-wins-over-overrides",
        kind="wrong order",
        file="recipe/schema.py",
        old="{**contents, **read_overrides(overrides)}",
        new="{**read_overrides(overrides), **contents}",
        tests=("tests/recipe/test_recipe.py",),
    ),
    Fault(
        name="examples-drawn-without-the-seed",
        kind="ignored seed",
        file="recipe/prepared_data.py",
        old="np.random.default_rng(seed).choice(",
        new="np.random.default_rng().choice(",
        tests=("tests/recipe/test_reading.py", "tests/recipe/test_importing.py"),
    ),
    Fault(
        name="limits-exchanged",
        kind="wrong order",
        file="recipe/build.py",
        old="RankTimeouts(recipe.hang_seconds, recipe.start_seconds)",
        new="RankTimeouts(recipe.start_seconds, recipe.hang_seconds)",
        tests=("tests/recipe/test_faults.py",),
    ),
    Fault(
        name="evaluation-of-the-resumed-step-is-lost",
        kind="wrong comparison",
        file="recipe/prepare.py",
        old="rows += [row] if row[0] <= last else []",
        new="rows += [row] if row[0] < last else []",
        tests=("tests/recipe/test_faults.py",),
    ),
)

# What only a GPU would show: each waits for the device, or computes on another rank's.
DEVICE: tuple[Fault, ...] = (
    Fault(
        name="a-rank-stays-on-the-first-gpu",
        kind="missing call",
        file="launch/ranks.py",
        old="        torch.cuda.set_device(device)\n",
        new="        pass\n",
        tests=("tests/measure/test_gpu_simulation.py",),
    ),
    Fault(
        name="the-loss-looks-at-its-labels",
        kind="hidden wait",
        file="parts/nn/losses.py",
        old="        count = (labels != IGNORED).sum()\n",
        new="        count = (labels != IGNORED).sum()\n        count.item()\n",
        tests=("tests/measure/test_gpu_simulation.py",),
    ),
    Fault(
        name="a-batch-blocks-the-host",
        kind="hidden wait",
        file="core/job.py",
        old="value.to(device, non_blocking=True)",
        new="value.to(device)",
        tests=("tests/measure/test_gpu_simulation.py",),
    ),
)

FAULTS: tuple[Fault, ...] = (*CORE, *PARTS, *EVIDENCE, *DATA, *RECIPE, *DEVICE)

if __name__ == "__main__":
    sys.exit(main())
