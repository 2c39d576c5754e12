r"""Runs other trainers' own tests, plainly and with hasten's techniques, and compares them.

    python tools/peer_tests.py --transformers DIR --trl DIR --lightning DIR --accelerate DIR \
        -o FOLDER
    python tools/peer_tests.py --trl DIR -o FOLDER --plan document_attention,fused_layers

DIR is a git checkout of the project that publishes the trainer; the packages on the index hold no
tests. What is tested is the installed package, not the checkout: the first lines of the output
name the commit of the tests and the version of the package.

    (1) The tests and the files they read are copied to FOLDER, so the checkout stays as it is.
    (2) They run plainly. What fails or is skipped there is left out: it needs a network, a GPU or
        another version.
    (3) The rest runs again with `hasten.speed_up` applied to each trainer when it begins to train,
        with the usual techniques; then with each --plan, of which a trainer gets what it can carry.
    (4) A test that failed only with techniques runs once more in both modes. If its two plain runs
        or its two runs with techniques differ, it is unsteady, and is named instead of judged.
    (5) Losses that the trainers log are compared too: a test may pass with another training. A
        difference is printed, and is no failure.
    (6) A table counts the tests, and in how many of them each technique effective. What acted is
        counted by calls of its code in training (`technique_counts.py`), not by its message. Rows
        of other trainers that an earlier run left in FOLDER stay in it.

Hub models and data sets have local stand-ins (`peer_stand_ins.py`); no network is used.

Exit codes: 0, no test failed because of techniques; 1, at least one did; 2, nothing could be run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer_plugin import PLAIN, USUAL, Settings
from technique_counts import COUNTED

TOOLS = Path(__file__).resolve().parent
BEGIN, END = "<!-- peer tests: begin -->", "<!-- peer tests: end -->"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
LOSS_BOUND = 2e-3  # relative; what a few steps make of rounding
CAUSAL = ("packed", "document_attention", "labelled_token_loss")  # the column "all three"


@dataclass(frozen=True)
class Peer:
    """Another project's tests.

    Args:
        package: the distribution, and the module with its version.
        copied: files and folders of the checkout that the tests need.
        tests: files to run, as patterns below the checkout.
        left_out: names of tests that need a network, several GPUs or another service.
        path: the folder of the checkout that their modules are imported from.
    """

    package: str
    copied: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    path: str = "."


PEERS = (
    Peer(
        "transformers",
        ("conftest.py", "pyproject.toml", "tests/__init__.py", "tests/trainer", "tests/fixtures"),
        ("tests/trainer/test_trainer*.py",),
        ("Hub", "Ray", "Wandb", "deepspeed", "fsdp", "push_to_hub", "distributed", "Optuna"),
    ),
    Peer(
        "trl",
        ("pyproject.toml", "tests"),
        ("tests/test_sft_trainer.py",),
        ("vlm", "liger", "Slow"),
    ),
    Peer(
        "lightning",
        ("pyproject.toml", "tests/tests_pytorch"),
        (
            "tests/tests_pytorch/loops",
            "tests/tests_pytorch/trainer/optimization",
        ),
        ("tpu", "ddp_spawn"),
        "tests",
    ),
    Peer(
        "accelerate",
        ("pyproject.toml", "tests", "examples"),
        (str(TOOLS / "accelerate_examples.py"),),
    ),
)


@dataclass
class Run:
    """The outcome of each test in one mode: its word, and the last line of its error."""

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def passed(self) -> set[str]:
        return {test for test, (word, _) in self.outcomes.items() if word == PASSED}


@dataclass
class Row:
    """One line of the table: a project's tests in one mode."""

    package: str
    version: str
    commit: str
    mode: str
    tests: int
    plain: int
    passed: int
    trained: int  # tests in which a trainer trained
    causal: int  # tests in which it trained a causal language model
    effective: dict[str, int]  # tests in which a technique effective
    together: int  # tests in which packing, document attention and the loss effective
    failures: dict[str, str]
    unsteady: list[str]
    other_losses: dict[str, str]  # tests whose logged losses aren't those of the plain run


def commit_of(checkout: Path) -> str:
    """The commit of a checkout with its date."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown commit"


def copy_tests(peer: Peer, checkout: Path, folder: Path) -> None:
    """Copies what the tests need.

    Raises:
        FileNotFoundError: the checkout lacks the tests.
    """
    for name in peer.copied:
        source, target = checkout / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    if not files_of(peer, folder):
        raise FileNotFoundError(f"{checkout} has no {' or '.join(peer.tests)}")


def files_of(peer: Peer, folder: Path) -> list[str]:
    """The files and folders of tests that are there."""
    patterns = [Path(pattern) for pattern in peer.tests]
    fixed = [str(pattern) for pattern in patterns if pattern.is_absolute()]
    return fixed + sorted(
        str(path.relative_to(folder))
        for pattern in patterns
        if not pattern.is_absolute()
        for path in folder.glob(str(pattern))
    )


class Runner:
    """Runs one project's tests in one mode after the other."""

    def __init__(self, peer: Peer, options: argparse.Namespace) -> None:
        self._peer, self._options = peer, options
        self.folder: Path = options.output.resolve() / peer.package
        self.copy = self.folder / "checkout"

    def run(self, mode: str, name: str, tests: Sequence[str] = ()) -> Run:
        """Runs all tests, or those with the given names.

        Raises:
            RuntimeError: pytest could not collect them.
        """
        report, entries = self.folder / f"{name}.xml", self.folder / f"{name}.jsonl"
        for old in (report, entries):
            old.unlink(missing_ok=True)
        settings = Settings(
            package=self._peer.package,
            mode=mode,
            entries=str(entries),
            hub=str(self.folder.parent / "hub" / "hub"),
            trl="" if self._options.trl is None else str(self._options.trl.resolve()),
        )
        settings.save(self.folder / f"{name}.json")
        command = [self._options.python, "-P", "-m", "pytest", "-p", "peer_plugin", "-q"]
        command += ["-o", "addopts=", "-p", "no:cacheprovider", "--maxfail=100000"]
        command += [f"--timeout={self._options.timeout}", f"--junitxml={report}"]
        if not tests and (left_out := self._selection()):
            command += ["-k", left_out]
        command += tests or files_of(self._peer, self.copy)
        with (self.folder / f"{name}.log").open("w", encoding="utf-8") as log:
            code = subprocess.run(
                command,
                cwd=self.copy,
                env=self._environment(self.folder / f"{name}.json"),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code not in (0, 1) or not report.exists():
            raise RuntimeError(f"{self._peer.package}: pytest ended with {code}, see {log.name}")
        return read_run(report, entries)

    def _selection(self) -> str:
        chosen = [f"not {name}" for name in self._peer.left_out]
        if self._options.select:
            chosen.append(f"({self._options.select})")
        return " and ".join(chosen)

    def _environment(self, settings: Path) -> dict[str, str]:
        root = self.folder.parent
        paths = [str(TOOLS), str(self.copy / self._peer.path), os.environ.get("PYTHONPATH", "")]
        (root / "home").mkdir(exist_ok=True)
        return {
            **os.environ,
            "PEER_SETTINGS": str(settings),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "HOME": str(root / "home"),  # no choice or figure of this user's decides
            "HF_HOME": str(root / "hub"),
            "HF_HUB_OFFLINE": "1",
            "RUN_SLOW": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


def read_run(report: Path, entries: Path) -> Run:
    """The outcomes in a JUnit file, and the lines of the plugin."""
    run = Run()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        outcome = (PASSED, "")
        for child in case:
            if child.tag in ("failure", "error"):
                lines = (child.get("message") or child.text or "").strip().splitlines()
                outcome = (FAILED, " ".join(lines[:3])[:400])
            elif child.tag == "skipped" and outcome[0] == PASSED:
                outcome = (SKIPPED, child.get("message") or "")
        run.outcomes[test] = outcome
    if entries.exists():
        for line in entries.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            run.entries[_junit_name(entry["test"])] = entry
    return run


def _junit_name(node: str) -> str:
    """The name of a test in a JUnit file, from the one that pytest selects it by."""
    path, _, rest = node.partition("::")
    return "::".join([*_classname(path, rest)])


def _classname(path: str, rest: str) -> tuple[str, str]:
    brackets = rest.find("[")
    head, tail = (rest, "") if brackets < 0 else (rest[:brackets], rest[brackets:])
    *classes, name = head.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    return ".".join([module, *classes]), name + tail


def compare(
    runner: Runner, mode: str, plain: Run, name: str
) -> tuple[Run, dict[str, str], list[str]]:
    """Runs a mode with techniques: its outcomes, the failures that they cause, unsteady tests."""
    changed = runner.run(mode, name)
    lost = sorted(t for t in plain.passed() if changed.outcomes.get(t, (FAILED, ""))[0] != PASSED)
    if not lost:
        return changed, {}, []
    nodes = [changed.entries[t]["test"] for t in lost if t in changed.entries]
    plain_again = runner.run(PLAIN, f"{name}-again-plain", nodes)
    changed_again = runner.run(mode, f"{name}-again", nodes)
    unsteady = [t for t in lost if t not in plain_again.passed() or t in changed_again.passed()]
    failures = {
        t: changed.outcomes.get(t, (FAILED, "it didn't run to its end"))[1]
        for t in lost
        if t not in unsteady
    }
    return changed, failures, unsteady


def row_of(peer: Peer, checkout: Path, version: str, mode: str, plain: Run, changed: Run) -> Row:
    """The counts of one mode."""
    passed = plain.passed()
    entries = [entry for test, entry in changed.entries.items() if test in passed]
    effective = Counter(name for entry in entries for name in entry["effective"])
    return Row(
        package=peer.package,
        version=version,
        commit=commit_of(checkout),
        mode=mode,
        tests=len(plain.outcomes),
        plain=len(passed),
        passed=len(passed & changed.passed()),
        trained=sum(bool(entry["trainers"]) for entry in entries),
        causal=sum(any("causal" in t for t in entry["trainers"]) for entry in entries),
        effective={name: effective[name] for name in COUNTED if effective[name]},
        together=sum(all(name in entry["effective"] for name in CAUSAL) for entry in entries),
        failures={},
        unsteady=[],
        other_losses=other_losses(plain, changed),
    )


def other_losses(plain: Run, changed: Run) -> dict[str, str]:
    """Tests that passed in both runs with different losses in the trainers' logs, and where.

    A difference may be right: dropout draws other numbers on rows of another length.
    """
    found = {}
    for test in sorted(plain.passed() & changed.passed()):
        series = [run.entries.get(test, {}).get("losses", []) for run in (plain, changed)]
        before, after = ([loss for one in trainers for loss in one] for trainers in series)
        pairs = itertools.zip_longest(before, after, fillvalue=math.nan)
        apart = [(a, b) for a, b in pairs if not math.isclose(a, b, rel_tol=LOSS_BOUND)]
        apart = [(a, b) for a, b in apart if not (math.isnan(a) and math.isnan(b))]
        if apart:
            found[test] = f"{len(apart)} of {len(before)}, {apart[0][1]:.6g} for {apart[0][0]:.6g}"
    return found


def save_results(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """Adds rows to those in the folder, in the place of older ones of the same trainers."""
    path, packages = folder / "results.json", {row.package for row in rows}
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    every = [Row(**result) for result in results if result["package"] not in packages]
    order = [peer.package for peer in PEERS]
    every = sorted([*every, *rows], key=lambda row: order.index(row.package))
    text = json.dumps([asdict(row) for row in every], indent=1)
    path.write_text(text, encoding="utf-8")
    return every


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| trainer | tests of commit | mode | passed plainly | passed with hasten "
        "| trained a causal LM | all three of packed, document_attention, labelled_token_loss "
        "acted | acted in how many tests |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        effective = ", ".join(f"{name} {count}" for name, count in row.effective.items()) or "none"
        lines.append(
            f"| {row.package} {row.version} | {row.commit} | {row.mode} | {row.plain} of "
            f"{row.tests} | {row.passed} | {row.causal} of {row.trained} | {row.together} "
            f"| {effective} |"
        )
    return "\n".join(lines)


def write_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    before = page.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def report_of(rows: Iterable[Row]) -> str:
    """Failures, unsteady tests and other losses, one line each."""
    lines = []
    for row in rows:
        lines += [f"FAILED {row.package} {row.mode}: {t}: {e}" for t, e in row.failures.items()]
        lines += [f"UNSTEADY {row.package} {row.mode}: {test}" for test in row.unsteady]
        lines += [f"LOSS {row.package} {row.mode}: {t}: {e}" for t, e in row.other_losses.items()]
    return "\n".join(lines)


def installed_version(python: str, package: str) -> str:
    """The version of a package in another environment; empty if it isn't installed."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    command = [python, "-c", code, package]
    if shutil.which(python) is None:
        return ""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def parser() -> argparse.ArgumentParser:
    summary = "Run other trainers' own tests, plainly and with hasten's techniques."
    made = argparse.ArgumentParser(
        prog="peer_tests.py",
        description=summary,
        epilog="Exit codes: 0, no test failed because of techniques; 1, at least one did; "
        "2, nothing could be run.",
    )
    for peer in PEERS:
        made.add_argument(
            f"--{peer.package}", type=Path, metavar="DIR", help=f"checkout of {peer.package}"
        )
    made.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder for results"
    )
    made.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter that has the trainers and hasten [default: this one]",
    )
    made.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="A,B",
        help="techniques for a run of their own, where a trainer can carry them; repeatable",
    )
    made.add_argument("--select", default="", metavar="EXPRESSION", help="pytest's -k")
    made.add_argument(
        "--timeout", type=int, default=240, metavar="SECONDS", help="limit per test [default: 240]"
    )
    made.add_argument(
        "--page", type=Path, metavar="FILE", help="Markdown page to write the table into"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    chosen = [(peer, getattr(options, peer.package)) for peer in PEERS]
    chosen = [(peer, checkout) for peer, checkout in chosen if checkout is not None]
    if not chosen:
        print("peer_tests: give at least one checkout, such as --trl DIR", file=sys.stderr)
        return 2
    rows: list[Row] = []
    try:
        for peer, checkout in chosen:
            rows += rows_of(peer, checkout, options)
    except (FileNotFoundError, RuntimeError) as error:
        print(f"peer_tests: {error}", file=sys.stderr)
        return 2
    text = table(save_results(options.output, rows))
    (options.output / "table.md").write_text(text + "\n", encoding="utf-8")
    if options.page is not None:
        write_between_marks(options.page, text)
    print(text)
    print(report_of(rows))
    return 1 if any(row.failures for row in rows) else 0


def rows_of(peer: Peer, checkout: Path, options: argparse.Namespace) -> list[Row]:
    """Runs one project in all modes.

    Raises:
        FileNotFoundError: the checkout has no such tests, or the package isn't installed.
    """
    version = installed_version(options.python, peer.package)
    if not version:
        raise FileNotFoundError(f"{options.python} has no {peer.package}; install it")
    print(f"{peer.package}: tests of {commit_of(checkout)}, package {version}", flush=True)
    runner = Runner(peer, options)
    copy_tests(peer, checkout, runner.copy)
    plain = runner.run(PLAIN, PLAIN)
    print(f"  plain: {len(plain.passed())} of {len(plain.outcomes)} passed", flush=True)
    plans = options.plan if peer.package in ("transformers", "trl") else []
    rows = []
    for number, mode in enumerate((USUAL, *plans)):
        changed, failures, unsteady = compare(
            runner, mode, plain, USUAL if not number else f"plan-{number}"
        )
        row = row_of(peer, checkout, version, mode, plain, changed)
        row.failures, row.unsteady = failures, unsteady
        print(f"  {mode}: {row.passed} passed, {len(failures)} failed", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
