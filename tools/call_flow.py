"""Counts how a training travels through the package, from its command to its steps.

    python tools/call_flow.py RECIPE [key=value ...]

(1) Until the first step: how often the execution enters ``recipe``, ``data`` and
    ``foreign_files`` from another part of the package. A loop over the same call counts once.
(2) One step in the middle, with what happens around it: files and functions that run.

Only the main thread is counted. The hasten that the interpreter imports is used. Example: the
file ``examples/deepseek_llm_tiny.yaml`` with ``max_steps=4``.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

COUNTED = ("recipe", "data", "foreign_files")
STEP = 3  # the step whose functions are counted


class CallFlow:
    """A profiler that follows calls between the parts of the package."""

    def __init__(self, package: Path) -> None:
        self._package = str(package) + "/"
        self._files: dict[CodeType, str] = {}
        self._previous: tuple[str, str] | None = None
        self.entries: Counter[tuple[str, str]] = Counter()  # caller's part, entered part
        self.edges: set[tuple[str, str]] = set()  # calling and called function
        self.step = 0
        self.in_step: set[CodeType] = set()
        self.around_step: set[CodeType] = set()
        self._depth = 0

    def file_of(self, code: CodeType) -> str:
        """The file of a function within the package; empty for all others."""
        found = self._files.get(code)
        if found is None:
            name = code.co_filename
            found = name[len(self._package) :] if name.startswith(self._package) else ""
            self._files[code] = found
        return found

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = self.file_of(code)
        if not file:
            return
        is_step = code.co_name == "train_step" and file == "core/step.py"
        if event == "return":
            self._depth -= is_step
            return
        if event != "call" or code.co_name == "<module>":
            return
        if is_step:
            self.step += 1
            self._depth += 1
        if self.step == 0:
            self._note(frame, code, file)
        elif self.step == STEP:
            self.around_step.add(code)
            if self._depth:
                self.in_step.add(code)

    def _note(self, frame: FrameType, code: CodeType, file: str) -> None:
        caller = frame.f_back
        while caller is not None and not self.file_of(caller.f_code):
            caller = caller.f_back
        if caller is None or caller.f_code.co_name == "<module>":
            return
        source, target = part_of(self.file_of(caller.f_code)), part_of(file)
        if source == target or not {source, target} & {*COUNTED}:
            return
        edge = (name_of(caller.f_code, self), name_of(code, self))
        if edge != self._previous and target in COUNTED:
            self.entries[source, target] += 1
        self.edges.add(edge)
        self._previous = edge

    def report(self) -> str:
        """The figures as text."""
        entered = {part: self._entered(part) for part in COUNTED}
        lines = [f"entries before the first step: {sum(entered.values())}"]
        for part, count in entered.items():
            sources = {s: n for (s, t), n in self.entries.items() if t == part}
            shown = ", ".join(f"{n} from {s}" for s, n in sorted(sources.items()))
            lines.append(f"  {part}: {count} ({shown})")
        between = {e: n for e, n in self.entries.items() if {*e} <= {*COUNTED}}
        lines.append(f"moves between them: {sum(between.values())}")
        lines += [f"  {source} -> {target}: {n}" for (source, target), n in between.items()]
        pairs = sorted(self.edges)
        within = [e for e in pairs if {part_of(e[0]), part_of(e[1])} <= {*COUNTED}]
        lines.append(f"different calls between them: {len(within)}")
        lines += [f"  {caller} -> {called}" for caller, called in within]
        for title, codes in ("step", self.in_step), ("step and around it", self.around_step):
            files = {self.file_of(code) for code in codes}
            lines.append(f"{title}: {len(files)} files, {len(codes)} functions")
        files = {self.file_of(code) for code in self.around_step}
        for file in sorted(files):
            names = sorted(c.co_name for c in self.around_step if self.file_of(c) == file)
            lines.append(f"  {file}: {', '.join(names)}")
        return "\n".join(lines)

    def _entered(self, part: str) -> int:
        return sum(count for (_, target), count in self.entries.items() if target == part)


def part_of(file: str) -> str:
    """The package, or the module directly in hasten, of a file."""
    return file.partition("/")[0].partition(".py")[0]


def name_of(code: CodeType, flow: CallFlow) -> str:
    return f"{flow.file_of(code)}:{code.co_qualname}"


def main() -> None:
    """Trains with the command and prints the figures at the end."""
    import hasten
    from hasten.cli.main import run

    flow = CallFlow(Path(hasten.__file__).parent)
    sys.argv = ["hasten", "train", *sys.argv[1:]]
    try:
        sys.setprofile(flow)
        run()
    finally:
        sys.setprofile(None)
        print(flow.report())


if __name__ == "__main__":
    main()
