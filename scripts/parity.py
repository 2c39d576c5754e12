"""Runs the same work in two checkouts and compares what comes out of it, bit by bit.

    python scripts/parity.py OLD NEW              # everything, about ten minutes on two cores
    python scripts/parity.py OLD NEW --quick      # a sample of each part, under two minutes
    python scripts/parity.py OLD NEW --only training resume
    python scripts/parity.py OLD NEW --other-keys # prepared data may have another key

OLD and NEW are folders with ``src/hasten``. It is for changes that must not change behaviour:
modules that are moved, merged or renamed. Both run on this machine, with this interpreter.

    (1) One process for each checkout (parity_worker.py) loads the libraries. It forks for each
        command, and the child imports that checkout's hasten.
    (2) OLD makes checkpoints and an experiment, with which both checkouts go on.
    (3) Both run the items of each part (parity_items.py), in folders with paths of equal length.
    (4) Exit codes, output and written files are compared, floats to the last bit.
    (5) What may differ stands in MAY_DIFFER, each entry with its reason. All else is a difference.

Exit codes: 0, no difference; 1, differences; 2, it could not be run, or OLD itself ended an item
with an exit code that it should not have, so that the item proves nothing; 130, interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import parity_items
from parity_items import Item

SIDES = ("old", "new")  # of equal length: texts with paths in them are wrapped or cut alike
ABSENT = "(absent)"
LIMIT_SECONDS = 240  # of one command
LEAVING_SECONDS = 5  # for a worker to end what it runs
SHOWN = 5  # differences of one item that are printed
WIDEST = 160  # characters of a value that are printed


@dataclass(frozen=True)
class Allowed:
    """Something that differs between two runs of the same code too.

    Args:
        reason: why it says nothing about behaviour.
        key: names of a JSON value, joined by "/", each a glob; the value isn't compared. Texts of a
            command have names, too: "command 1/out".
        pattern: a regular expression; what it matches in a text isn't compared, and where it ends
            with a line break the line may be absent. SIDE stands for the folder of a checkout's
            items.
        items: globs of the items, "PART: NAME", that it is for.
    """

    reason: str
    key: str = ""
    pattern: str = ""
    items: tuple[str, ...] = ("*",)

    @property
    def name(self) -> str:
        """What it looks for, and where."""
        return f"{self.key or self.pattern} in {', '.join(self.items)}"

    def is_for(self, item: str) -> bool:
        """Whether it is for this item."""
        return any(fnmatchcase(item, glob) for glob in self.items)


RUNS = ("training: *", "data: *", "resume: *")  # items whose JSON says what a run measured
REPORTS = ("report: *",)
OTHER_KEYS = Allowed(
    "--other-keys: prepared data has another key, and so another name; its bytes are compared",
    pattern=r"\b[0-9a-f]{32}(?=\.arrow)",
)
MAY_DIFFER: tuple[Allowed, ...] = (
    Allowed("each checkout's items run in a folder of their own", pattern="SIDE"),
    # In texts
    Allowed("how often progress is shown goes by the clock", pattern=r"^ *\d+%  .*  ETA .*\n"),
    Allowed("seconds of a run", pattern=r"(?<= tokens in )\d[^,]* (s|min)\b"),
    Allowed("speed of a run", pattern=r"[\d,.]+ tokens/s\b", items=RUNS),
    Allowed("seconds of steps", pattern=r"^data stall \d.*$"),
    Allowed("memory of a process", pattern=r"\bpeak \d+ MB"),
    Allowed(
        "memory of a process",
        pattern=r"(?<=memory of a rank: about )[\d.]+ GB|[\d.]+ GB(?= the process itself)",
    ),
    Allowed("seconds in a model card", pattern=r"^\| time \| .*$"),
    Allowed("memory in a model card", pattern=r"^\| peak memory of one \| .*$"),
    Allowed(
        "whether a batch was ready in time goes by the clock",
        pattern=r"\d+ of \d+ steps were ready before they were asked for, [\d.]+ s of waiting",
    ),
    Allowed("seconds of a compiler", pattern=r"(?<= shapes in )[\d.]+ s"),
    Allowed(
        "page faults depend on what the kernel has at hand",
        pattern=r"[\d,]+ page faults per step|[\d,]+ of [\d,]+ pages of a freed block",
    ),
    Allowed("seconds of a search", pattern=r"(?<= layouts in )[\d.]+ s"),
    Allowed("others write to the disk, too", pattern=r'"free_bytes": \d+'),
    Allowed("the time of day", pattern=r'"created": "[^"]*"|<time .*?</time>', items=REPORTS),
    Allowed("the time of day, in a line of torch's profiler", pattern=r"^USDT:.*\n"),
    Allowed("the address of a default value", pattern=r"(?<= at )0x[0-9a-f]+"),
    # In JSON
    Allowed("seconds of a run", key="*seconds*", items=RUNS),
    Allowed("speed of a run", key="*_per_second", items=RUNS),
    Allowed("memory of a process", key="peak_*bytes", items=RUNS),
    Allowed("seconds of a step's parts", key="step_parts", items=RUNS),
    Allowed("spread of seconds", key="stability", items=RUNS),
    Allowed("share of seconds", key="data_stall_share", items=RUNS),
    Allowed("seconds of the run in its checkpoint", key="history/seen", items=RUNS),
    Allowed(
        "a hash over a manifest that has seconds in it", key="manifest.json/values/seal", items=RUNS
    ),
    Allowed("the number of a process", key="run.json/values/pid", items=RUNS),
    Allowed("the time of day", key="run.json/values/began", items=RUNS),
    Allowed("others write to the disk, too", key="free_bytes", items=RUNS),
    Allowed("the time of day", key="report.json/values/created", items=REPORTS),
    # Of single items
    Allowed(
        "a class got a name of its own, which an annotation shows",
        pattern=r"\bSubject\b|\bExperimentSubject\b",
        items=("commands: public names",),
    ),
    Allowed(
        "verdicts follow from measured speed; what does not is in the item's view",
        key="command 1/out",
        items=("resume: experiment",),
    ),
    Allowed("seconds and bytes of a profile", key="command 1/out", items=("commands: profile",)),
    Allowed(
        "Transformers prints seconds and speed; losses and weights are in the probe's value",
        key="command 1/[oe]*",
        items=("training: Transformers' trainer",),
    ),
)


Folders = tuple[Path, Path]  # in which each side's items run
Result = dict[str, Any]  # what an item says and writes, as JSON values
Results = Mapping[str, tuple[Item, Result]]  # by the item's name


class RefusedError(Exception):
    """It can't be run; the message says why."""


# Comparing


@dataclass(frozen=True)
class Difference:
    """Two values that should be equal."""

    part: str
    item: str
    place: str
    old: str
    new: str

    def __str__(self) -> str:
        equal = sum(1 for _ in _common_start(self.old, self.new))
        first = max(0, equal - WIDEST // 3)  # a long value is shown from where the two part
        lead = "..." if first else ""
        old, new = (lead + text[first:][:WIDEST] for text in (self.old, self.new))
        lines = f"  {self.item}: {self.place}", f"    old: {old}", f"    new: {new}"
        return "\n".join(line.replace("\n", "\\n") for line in lines)


def _common_start(old: str, new: str) -> Iterator[str]:
    for one, two in zip(old, new, strict=False):
        if one != two:
            return
        yield one


@dataclass(frozen=True)
class Mask:
    """What may differ in one item.

    Args:
        item: "PART: NAME".
        folders: for which SIDE stands.
        used: how often each entry hid something.
        allowed: what may differ.
    """

    item: str
    folders: Folders
    used: dict[str, int] = field(default_factory=dict)
    allowed: Sequence[Allowed] = ()

    def text(self, text: str, side: int) -> str:
        """A text of one side without what may differ."""
        for allowed in self.allowed:
            if allowed.pattern and allowed.is_for(self.item):
                sign = "" if allowed.pattern.endswith(r"\n") else "~"
                text, count = _compiled(allowed.pattern, self.folders[side]).subn(sign, text)
                self._note(allowed, count)
        return text

    def names(self, values: dict[str, Any], side: int) -> dict[str, Any]:
        """A dictionary of one side, names of prepared data without what may differ."""
        found = {}
        for name, value in values.items():
            shown = self.text(name, side) if name.endswith(".arrow") else name
            found[name if shown in found else shown] = value
        return found

    def hides(self, place: str) -> bool:
        """Whether the value at a place may differ."""
        for allowed in self.allowed:
            if allowed.key and allowed.is_for(self.item) and _ends_with(place, allowed.key):
                self._note(allowed, 1)
                return True
        return False

    def _note(self, allowed: Allowed, count: int) -> None:
        if count:
            self.used[allowed.name] = self.used.get(allowed.name, 0) + count


@functools.cache
def _compiled(pattern: str, folder: Path) -> re.Pattern[str]:
    return re.compile(pattern.replace("SIDE", re.escape(str(folder))), re.MULTILINE)


def _ends_with(place: str, globs: str) -> bool:
    """Whether the last names of a place fit the globs, one each."""
    wanted = globs.split("/")
    names = place.split("/")[-len(wanted) :]
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def differences(mask: Mask, old: Any, new: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Place, old and new value of everything that differs between two JSON values."""
    if mask.hides(place):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        old, new = mask.names(old, 0), mask.names(new, 1)
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield f"{place}, order of keys", ", ".join(old), ", ".join(new)
        for key in {**old, **new}:
            inner = f"{place}/{key}" if place else key
            yield from differences(mask, old.get(key, ABSENT), new.get(key, ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{place}, length", str(len(old)), str(len(new))
        for number, (one, two) in enumerate(zip(old, new, strict=False)):
            yield from differences(mask, one, two, f"{place}/{number}")
    elif isinstance(old, str) and isinstance(new, str):
        yield from _lines(mask.text(old, 0), mask.text(new, 1), place)
    elif _bits(old) != _bits(new):
        yield place, _bits(old), _bits(new)


def _lines(old: str, new: str, place: str) -> Iterator[tuple[str, str, str]]:
    """The lines in which two texts differ."""
    if old == new:
        return
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            where = f"{place}, line {i + 1}" if len(before) > 1 else place
            yield where, "".join(before[i:j]) or ABSENT, "".join(after[k:m]) or ABSENT


def _bits(value: Any) -> str:
    """A value as text: floats to the last bit, and 1 is not 1.0."""
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else json.dumps(value)


# Running


class Worker:
    """The process that runs commands of one checkout.

    Raises:
        RefusedError: the folder is no checkout.
    """

    def __init__(self, checkout: Path, side: Path) -> None:
        if not (checkout / "src" / "hasten" / "__init__.py").is_file():
            raise RefusedError(f"{checkout} has no src/hasten: give the folder of a checkout")
        self.checkout, self.side = checkout, side
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("parity_worker.py"))],
            env=environment(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def check(self) -> None:
        """Wait until it is ready.

        Raises:
            RefusedError: it isn't, or would import another hasten.
        """
        package = self._answer()["package"]
        if not package or not Path(package).resolve().is_relative_to(self.checkout):
            raise RefusedError(f"PYTHONPATH doesn't win: for {self.checkout} imports {package}")

    def run(self, item: Item, folder: Path, words: Sequence[str]) -> dict[str, Any]:
        """Run one command of an item, or its probe: exit code, output, and the probe's value."""
        prefix = folder.with_name(f"{folder.name}.output")
        request = {
            "folder": str(folder),
            "prefix": str(prefix),
            "words": words,
            "probe": item.probe,
            "steady": item.steady,
            "seconds": LIMIT_SECONDS,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # there is no answer then
            print(json.dumps(request), file=self._process.stdin, flush=True)
        found = {"exit code": self._answer()["code"]}
        for name in ("out", "err"):
            found[name] = Path(f"{prefix}.{name}").read_text(encoding="utf-8", errors="replace")
        if item.probe and found["exit code"] == 0:
            found["value"] = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RefusedError(f"the process for {self.checkout} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the process, and what it runs."""
        self._process.terminate()
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def environment(checkout: Path) -> dict[str, str]:
    """Variables of a checkout's processes: its package first, and nothing that isn't the same."""
    told = ("PYTHON", "HASTEN", "PYTEST")
    return {k: v for k, v in os.environ.items() if not k.startswith(told)} | {
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def run_items(worker: Worker, items: Sequence[Item]) -> Results:
    """The results of items by name, with those that a list of commands leads to."""
    found: dict[str, tuple[Item, Result]] = {}
    waiting = list(items)
    while waiting:
        item = waiting.pop(0)
        result = run_item(worker, item)
        found[item.name] = item, result
        if item.listed:
            group = item.name.removesuffix("--help")
            names = parity_items.listed_commands(result["command 1"]["out"])
            waiting += [parity_items.help_of(group + name) for name in names]
    return found


def run_item(worker: Worker, item: Item) -> Result:
    """Everything that an item says and writes."""
    folder = worker.side / item.part / _file_name(item.name)
    folder.mkdir(parents=True)
    for path, text in item.files.items():
        (folder / path).write_text(text, encoding="utf-8")
    for path, source in item.copies.items():
        name, _, rest = source.partition("/")
        made = worker.side.with_name(SIDES[0]) / "made" / _file_name(name)
        shutil.copytree(made / rest, folder / path)
    if item.edit is not None:
        item.edit(folder)
    before = {path: _stamp(path) for path in folder.rglob("*")}
    found: Result = {}
    for number, words in enumerate(item.commands or [()], start=1):
        found[f"command {number}"] = worker.run(item, folder, words)
    written = {path for glob in item.compared for path in folder.glob(glob) if path.is_file()}
    found["files"] = {
        path.relative_to(folder).as_posix(): _content(path)
        for path in sorted(written)
        if before.get(path) != _stamp(path)
    }
    if item.view is not None:
        try:
            found["view"] = json.loads(json.dumps(item.view(folder)))
        except (OSError, ValueError, LookupError) as error:
            found["no view"] = f"{type(error).__name__}: {error}"
    return found


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _content(path: Path) -> Any:
    """A file's values, its text, or where it has none a hash."""
    content = path.read_bytes()
    try:
        text = content.decode()
        if path.suffix == ".json":
            return {"lines": text.count("\n"), "values": json.loads(text)}
        return [*map(json.loads, text.splitlines())] if path.suffix == ".jsonl" else text
    except ValueError:
        return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"


def last_command(result: Result) -> tuple[Any, str]:
    """The exit code of an item's last command, and the last line that it said."""
    last = [one for key, one in result.items() if key.startswith("command ")][-1]
    lines = [line for line in (last["err"] or last["out"]).splitlines() if line.strip()]
    return last["exit code"], lines[-1][:WIDEST] if lines else "it said nothing"


# The whole


@dataclass
class Outcome:
    """What became of one part; ``in_vain`` are items that OLD itself can't do."""

    part: str
    seconds: float
    items: int = 0
    refusals: int = 0  # items that end with another exit code than 0, as they may
    differences: list[Difference] = field(default_factory=list)
    in_vain: list[str] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)  # by MAY_DIFFER's entries, how often

    def __str__(self) -> str:
        words = [f"{self.part:<9}{self.items:>4} items", f"{len(self.differences)} differences"]
        words += [f"{self.refusals} refused alike"] if self.refusals else []
        words += [f"{len(self.in_vain)} in vain"] if self.in_vain else []
        return ", ".join([*words, f"{self.seconds:.0f} s"])

    def report(self) -> Iterator[str]:
        """Lines about the differences, a few of each item, and about what was in vain."""
        counts = Counter(one.item for one in self.differences)
        shown: Counter[str] = Counter()
        for one in self.differences:
            shown[one.item] += 1
            if shown[one.item] <= SHOWN:
                yield str(one)
            elif shown[one.item] == counts[one.item]:
                yield f"  {one.item}: {counts[one.item] - SHOWN} more differences"
        yield from (f"  in vain: {words}" for words in self.in_vain)


def compare(
    part: str,
    old: Results,
    new: Results,
    folders: Folders,
    seconds: float = 0.0,
    allowed: Sequence[Allowed] = (),
) -> Outcome:
    """What differs between the results of one part."""
    outcome = Outcome(part, seconds, items=len({**old, **new}))
    for name in {**old, **new}:
        if name not in old or name not in new:
            there = [name if name in side else ABSENT for side in (old, new)]
            outcome.differences.append(Difference(part, name, "item", *there))
            continue
        item, result = old[name]
        code, words = last_command(result)
        if code not in item.codes:
            outcome.in_vain.append(f"{name}, exit code {code}: {words}")
        elif "no view" in result:
            outcome.in_vain.append(f"{name}: {result['no view']}")
        outcome.refusals += code in item.codes and code != 0
        mask = Mask(f"{part}: {name}", folders, outcome.used, (*MAY_DIFFER, *allowed))
        found = differences(mask, result, new[name][1])
        outcome.differences += [Difference(part, name, *one) for one in found]
    return outcome


class Comparison:
    """Two checkouts and their processes.

    Args:
        checkouts: OLD and NEW.
        work: a new or empty folder for all files.
        quick: a sample of each part.
        allowed: what may differ beside MAY_DIFFER.
    """

    def __init__(
        self,
        checkouts: tuple[Path, Path],
        work: Path,
        quick: bool,
        allowed: Sequence[Allowed] = (),
    ) -> None:
        self.work, self.quick, self.allowed = work, quick, allowed
        self._folders = work / SIDES[0], work / SIDES[1]
        pairs = zip(checkouts, self._folders, strict=True)
        self._workers = [Worker(checkout, folder) for checkout, folder in pairs]
        self._pools = [ThreadPoolExecutor(1) for _ in SIDES]  # an item of each at a time

    def run(self, parts: Sequence[str]) -> Iterator[Outcome]:
        """Run parts; the outcome of each as soon as both checkouts are done with it."""
        inputs = self.work / "in"
        inputs.mkdir(parents=True)
        parity_items.write_inputs(inputs)
        for worker in self._workers:
            worker.check()
        items = {part: self._items(part, inputs) for part in parts}
        needed = {
            path.partition("/")[0] for p in parts for i in items[p] for path in i.copies.values()
        }
        makers = [item for item in parity_items.makers(inputs) if item.name in needed]
        made = self._pools[0].submit(self._make, makers)
        sides = [
            {part: pool.submit(self._side, worker, items[part], made) for part in parts}
            for pool, worker in zip(self._pools, self._workers, strict=True)
        ]
        began = time.monotonic()
        for part in parts:
            old, new = (side[part].result() for side in sides)
            took = time.monotonic() - began
            yield compare(part, old, new, self._folders, took, self.allowed)
            began = time.monotonic()

    def _items(self, part: str, inputs: Path) -> list[Item]:
        make, probe = getattr(parity_items, part), parity_items.ASKED.get(part)
        if probe is None:
            items = [*make(inputs)]
        else:
            asked = run_item(self._workers[0], Item("made", probe, probe=probe))
            code, words = last_command(asked)
            if code != 0:
                raise RefusedError(f"OLD can't list its {probe}: {words}")
            items = [*make(inputs, asked["command 1"]["value"])]
        return parity_items.sample(items) if self.quick else items

    def _make(self, makers: Sequence[Item]) -> None:
        for name, (_, result) in run_items(self._workers[0], makers).items():
            code, words = last_command(result)
            if code != 0:
                raise RefusedError(f"OLD can't make {name!r}, exit code {code}: {words}")

    def _side(self, worker: Worker, items: Sequence[Item], made: Future[None]) -> Results:
        if any(item.copies for item in items):
            made.result()
        return run_items(worker, items)

    def end(self) -> None:
        """End both processes; what has not begun does not begin."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parts = parity_items.PARTS
    parser.add_argument("old", type=Path, help="a checkout, the reference")
    parser.add_argument("new", type=Path, help="a checkout that should behave the same")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="a sample of each part")
    parser.add_argument("--other-keys", action="store_true", help="data may have other keys")
    parser.add_argument("--save", type=Path, help="write the outcome here, as JSON")
    parser.add_argument("--work", type=Path, help="a new folder for all files, which stays")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    given, began = arguments(words), time.monotonic()
    work = (given.work or Path(tempfile.mkdtemp(prefix="parity-"))).resolve()
    outcomes: list[Outcome] = []
    try:
        checkouts = given.old.resolve(), given.new.resolve()
        allowed = (OTHER_KEYS,) if given.other_keys else ()
        comparison = Comparison(checkouts, work, given.quick, allowed)
        with contextlib.ExitStack() as stack:
            stack.callback(comparison.end)
            for outcome in comparison.run(given.only or parity_items.PARTS):
                outcomes.append(outcome)
                print("\n".join([str(outcome), *outcome.report()]), flush=True)
    except (RefusedError, OSError, ValueError, LookupError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if given.work is None:
            shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - began
    count = sum(len(outcome.differences) for outcome in outcomes)
    print(f"{count} differences in {seconds:.0f} s")
    if not (given.only or given.quick):
        used = {name for outcome in outcomes for name in outcome.used}
        for one in MAY_DIFFER:
            if one.name not in used:
                print(f"MAY_DIFFER: nothing needed {one.name}")
    if given.save is not None:
        values = {"old": str(given.old), "new": str(given.new), "seconds": seconds}
        saved = {**values, "parts": [asdict(outcome) for outcome in outcomes]}
        given.save.write_text(json.dumps(saved, indent=1) + "\n")
    return 1 if count else 2 if any(outcome.in_vain for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
