"""Reads a Dockerfile without Docker, and can run its commands in a folder of its own.

    python scripts/rehearse_dockerfile.py deploy/Dockerfile deploy/Dockerfile.cuda
    python scripts/rehearse_dockerfile.py deploy/Dockerfile --run FOLDER [--behind SITE_PACKAGES]

(1) Read: instructions, paths that are copied, shell syntax, user, what starts, health check.
(2) With ``--run``: COPY copies into the folder, RUN runs there in order, with a virtual environment
in the place of the image's Python. What belongs to a system of its own (packages of the
distribution, users, folders at its root) is only written down. Then what the container would start,
and its health check, are run. ``--behind`` lets the environment see another's packages, so that
large ones aren't fetched again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KNOWN = (
    *("FROM", "ARG", "ENV", "LABEL", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "VOLUME"),
    *("HEALTHCHECK", "ENTRYPOINT", "CMD", "STOPSIGNAL", "SHELL"),
)
# A rehearsal must not touch the machine's own: these only say what they were asked for.
OF_THE_SYSTEM = ("apt-get", "useradd", "install", "rm", "chown")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines joined."""

    line: int
    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """A Dockerfile's instructions.

    Raises:
        ValueError: an unknown instruction, with its line.
    """
    found, joined, begun = [], "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):  # inside a continued instruction too
            continue
        begun = begun or number
        joined += " " + line.removesuffix("\\").strip()
        if line.endswith("\\"):
            continue
        name, _, rest = joined.strip().partition(" ")
        if name not in KNOWN:
            raise ValueError(f"line {begun}: {name} is no instruction")
        found.append(Instruction(begun, name, rest.strip()))
        joined, begun = "", 0
    if joined:
        raise ValueError(f"line {begun}: the last line is continued and nothing follows")
    return found


def stage(found: Sequence[Instruction]) -> list[Instruction]:
    """What the last image consists of: its own instructions behind those of the stages below it."""
    stages: list[tuple[str, str, list[Instruction]]] = []
    for each in found:
        if each.name == "FROM":
            words = each.text.split()
            name = words[2] if len(words) == 3 and words[1].lower() == "as" else ""
            stages.append((words[0], name, []))
        elif stages:
            stages[-1][2].append(each)
    whole: list[Instruction] = []
    base = None
    for below, name, own in reversed(stages):
        if base is None or (name and name == base):
            whole, base = [*own, *whole], below
    return whole


def complaints(text: str, context: Path) -> list[str]:
    """What is wrong with a Dockerfile whose context is that folder; empty: nothing was found."""
    try:
        found = instructions(text)
    except ValueError as error:
        return [str(error)]
    last = stage(found)
    wrong = [*_about_images(found), *_about_copies(last, context), *_about_commands(last)]
    names = {each.name for each in last}
    if not names & {"CMD", "ENTRYPOINT"}:
        wrong.append("nothing says what the container starts")
    if "HEALTHCHECK" not in names:
        wrong.append("there is no HEALTHCHECK")
    user = next((e.text for e in reversed(last) if e.name == "USER"), "root")
    if user.split(":")[0] in ("root", "0"):
        wrong.append("it runs as root")
    return wrong


def _about_images(found: Sequence[Instruction]) -> Iterator[str]:
    if not found or found[0].name not in ("FROM", "ARG"):
        yield "it doesn't begin with FROM"
    own = {w[2] for e in found if e.name == "FROM" and len(w := e.text.split()) == 3}
    for each in found:
        image = each.text.split()[0]
        if each.name == "FROM" and image not in own and ("@" not in image and ":" not in image):
            yield f"line {each.line}: {image} has no tag, which means whatever is newest"


def _about_copies(found: Sequence[Instruction], context: Path) -> Iterator[str]:
    file = context / ".dockerignore"
    rules = file.read_text(encoding="utf-8") if file.is_file() else ""
    for each in found:
        if each.name != "COPY" or "--from=" in each.text:
            continue
        *sources, _ = [word for word in each.text.split() if not word.startswith("--")]
        for source in sources:
            path = context / source
            if source.startswith("/") or ".." in Path(source).parts or not path.exists():
                yield f"line {each.line}: {source} isn't in the context"
            elif ignored(source, rules):
                yield f"line {each.line}: {source} is left out by .dockerignore"


def ignored(path: str, rules: str) -> bool:
    """Whether .dockerignore leaves a path out: the last rule that matches it, or a folder of it."""
    out = False
    places = [path, *map(str, Path(path).parents)][:-1]
    for rule in map(str.strip, rules.splitlines()):
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").rstrip("/")
        tail = pattern.removeprefix("**/")
        names = [place.rsplit("/", 1)[-1] for place in places] if tail != pattern else []
        if any(_matches(p, pattern) for p in places) or any(_matches(n, tail) for n in names):
            out = not rule.startswith("!")
    return out


def _matches(path: str, pattern: str) -> bool:
    """Docker's ``*`` doesn't cross a slash (Go's filepath.Match)."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _about_commands(found: Sequence[Instruction]) -> Iterator[str]:
    for each in found:
        text = each.text
        if each.name == "HEALTHCHECK":
            text = text.partition("CMD ")[2]
        if each.name not in ("RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK"):
            continue
        if text.startswith("["):
            try:
                json.loads(text)
            except ValueError:
                yield f"line {each.line}: {text} is no list of words"
        elif subprocess.run(["sh", "-n", "-c", text], capture_output=True, check=False).returncode:
            yield f"line {each.line}: the shell can't read it"
        if "apt-get install" in text and not all(
            part in text for part in ("apt-get update", " -y", "rm -rf /var/lib/apt/lists")
        ):
            yield f"line {each.line}: apt-get install without update, -y, or the lists removed"
        if re.search(r"\bpip install\b", text) and "--no-cache-dir" not in text:
            yield f"line {each.line}: pip's cache stays in the image"


class Rehearsal:
    """A folder in the place of an image's file system."""

    def __init__(self, context: Path, folder: Path, behind: Path | None, pip: bool) -> None:
        folder.mkdir(parents=True)  # one of its own
        self.context, self.folder = context, folder.resolve()
        self.place, self.notes = self.folder / "image", self.folder / "not_run"
        self.place.mkdir()
        without = [] if pip else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *without, self.folder / "venv"], check=True)
        packages = next((self.folder / "venv" / "lib").glob("python3*")) / "site-packages"
        if behind is not None:
            (packages / "behind.pth").write_text(f"{behind.resolve()}\n")
        (self.folder / "stand_ins").mkdir()
        for name in OF_THE_SYSTEM:
            path = self.folder / "stand_ins" / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.notes}"\n')
            path.chmod(0o755)
        (self.folder / "home").mkdir()
        self.here = self.place

    def take(self, each: Instruction) -> None:
        """Do what the instruction says.

        Raises:
            CalledProcessError: a command failed.
        """
        if each.name == "WORKDIR":
            self.here = self.place / each.text.lstrip("/")
            self.here.mkdir(parents=True, exist_ok=True)
        elif each.name == "COPY":
            *sources, target = each.text.split()
            for source in sources:
                self._copy(self.context / source, self.here / target)
        elif each.name == "RUN":
            self.run(each.text)

    def run(self, command: str) -> None:
        """A shell command as the container would run it, in the folder."""
        print(f"+ {command}", flush=True)
        path = [self.folder / "stand_ins", self.folder / "venv" / "bin", os.environ["PATH"]]
        environment = {**os.environ, "PATH": os.pathsep.join(map(str, path))}
        environment |= {"HOME": str(self.folder / "home")}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        subprocess.run(["sh", "-e", "-c", command], cwd=self.here, env=environment, check=True)

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, target, ignore=leave, dirs_exist_ok=True)
        else:
            self.here.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target if not target.is_dir() else target / source.name)


def shell(text: str) -> str:
    """A command in either form as one for the shell."""
    words = json.loads(text) if text.startswith("[") else None
    return text if words is None else " ".join(f"'{word}'" for word in words)


def rehearse(text: str, context: Path, folder: Path, behind: Path | None, pip: bool = True) -> None:
    """Everything in order, then what the container starts, and its health check."""
    found = stage(instructions(text))
    rehearsal = Rehearsal(context, folder, behind, pip)
    for each in found:
        rehearsal.take(each)
    last = {each.name: each.text for each in found}
    rehearsal.run(" ".join(shell(last[n]) for n in ("ENTRYPOINT", "CMD") if n in last))
    rehearsal.run(shell(last["HEALTHCHECK"].partition("CMD ")[2]))
    print(f"only written down:\n{rehearsal.notes.read_text()}", end="")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    asked.add_argument("files", nargs="+", type=Path)
    asked.add_argument("--run", type=Path, help="a folder that isn't there yet")
    asked.add_argument("--behind", type=Path, help="site-packages that the environment sees too")
    given = asked.parse_args()
    context = Path(__file__).parents[1]
    wrong = [f"{f}: {w}" for f in given.files for w in complaints(f.read_text("utf-8"), context)]
    print("\n".join(wrong) or f"nothing to complain of in {len(given.files)} file(s)")
    if wrong or given.run is None:
        return len(wrong) > 0
    for file in given.files:
        rehearse(file.read_text(encoding="utf-8"), context, given.run / file.name, given.behind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
