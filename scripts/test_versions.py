"""Run the tests of models, kernels and other trainers against both ends of what the pins allow.

    python scripts/test_versions.py                 # make test-versions
    python scripts/test_versions.py --end newest    # one end alone; the table keeps the other's
    python scripts/test_versions.py tests/integrations     # these tests in place of the usual ones

  1. an environment for each end, in ~/.cache/hasten/test-environments; made anew when the pins
     change, and for the newest end when the index has a newer release; and one of readers, with a
     transformers of before 5 and the torch of this environment, for tests/models/test_readers.py
  2. the tests in each end, one after the other
  3. ``docs/reference/models.md`` gets the table, between its markers, and
     ``src/hasten/machine/tested_versions.json`` the range, from which ``hasten.speed_up`` says that
     a release is outside it; both only if every usual test was run

Exit code: 0, or 1 if a test failed. It takes about half an hour on two cores and, for a torch that
the index has with CUDA alone, 6 GB of disk.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path.home() / ".cache" / "hasten" / "test-environments"
RANGE = ROOT / "src" / "hasten" / "machine" / "tested_versions.json"
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table of make test-versions -->", "<!-- end of the table -->"
ENDS = ("oldest", "newest")
PACKAGES = ("torch", "transformers", "peft", "trl", "lightning", "datasets")
# What others' releases can break: models and their parts, kernels, trainers, data of the hub, and
# ranks that share a model and resume.
TESTS = (
    "tests/integrations",
    "tests/models",
    "tests/data/test_response_template.py",
    "tests/release/test_servers.py",
    "tests/articles",
    "tests/parts/kernels",
    "tests/parts/nn",
    "tests/parts/optim",
    "tests/data/test_hub.py",
    "tests/parts/distributed",
    "tests/techniques/test_layout_pipeline.py",
    "tests/techniques/test_layout_pipeline_state.py",
    "tests/techniques/test_layout_deepspeed.py",
    "tests/techniques/test_resume_matrix.py",
    "tests/techniques/test_resume_cells.py",
)
# Saved folders are opened by the last transformers before 5, which servers build on, and by the
# package that llama.cpp's converter reads folders with.
READERS = ("transformers>=4.57,<4.58", "gguf")
MODEL_TYPES = "from transformers import CONFIG_MAPPING as m; print(*sorted(m.keys()))"


def main() -> int:
    parser = argparse.ArgumentParser(description="Test against both ends of the pins.")
    parser.add_argument("--end", choices=ENDS, help="one end alone")
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("tests", nargs="*", help="in place of the usual tests")
    options = parser.parse_args()
    failed = False
    readers(options.fresh)
    for end in [options.end] if options.end else ENDS:
        found = run(end, environment(end, options.fresh), options.tests or TESTS)
        failed = failed or bool(found["failed"])
        for name in found["failed"]:
            print(f"{end}: FAILED {name}")
        print(f"{end}: {found['passed']} passed, {found['skipped']} skipped")
        if not options.tests:
            (CACHE / f"{end}.json").write_text(json.dumps(found))
    outcomes = [CACHE / f"{end}.json" for end in ENDS]
    if not options.tests and all(file.exists() for file in outcomes):
        write({end: json.loads(f.read_text()) for end, f in zip(ENDS, outcomes, strict=True)})
    return int(failed)


def pins() -> dict[str, Requirement]:
    """The requirements of pyproject.toml, of other trainers and of the hub's data sets, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = project["dependencies"] + extras["hosts"] + extras["hub"]
    return {r.name: r for r in map(Requirement, every)}


def wanted(end: str) -> list[str]:
    """What pip is asked for: the pins, at the oldest end with the lowest release of each range."""
    known = pins()
    if end == "newest":
        return [str(known[name]) for name in PACKAGES]
    least = {n: next(s.version for s in known[n].specifier if s.operator == ">=") for n in PACKAGES}
    return [f"{name}=={version}" for name, version in least.items()]  # 2.11 is 2.11.0


def environment(end: str, fresh: bool) -> Path:
    """The interpreter of an end's environment, with hasten from this folder."""
    folder, asked = CACHE / end, wanted(end)
    mark = hashlib.sha256(" ".join([*asked, sys.version, str(ROOT)]).encode()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / "made"
    made = stamp.exists() and stamp.read_text() == mark and not fresh
    if not made:
        print(f"{end}: making {folder} with {', '.join(asked)} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if not made or end == "newest":
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        eager = ["--upgrade"] if end == "newest" else ["--no-cache-dir"]
        packages = ["--editable", f"{ROOT}[dev,deepspeed]", "accelerate", "requests", *asked]
        if end == "oldest":
            packages.append("numpy<2.4")  # for the interpreter of its Triton
        subprocess.run([*pip, *eager, *packages], check=True)
        stamp.write_text(mark)
    return python


def readers(fresh: bool) -> None:
    """Make the readers' environment: its own transformers before this environment's packages."""
    folder = CACHE / "readers"
    if (folder / "made").exists() and not fresh:
        return
    print(f"readers: making {folder} with {', '.join(READERS)} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *READERS], check=True, env=variables())
    own = Path(said(Path(python), "import sysconfig; print(sysconfig.get_path('purelib'))"))
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    (own / "behind.pth").write_text("\n".join(ours) + "\n")
    (folder / "made").touch()


def run(end: str, python: Path, tests: Any) -> dict[str, Any]:
    """The outcome of the tests: releases, counts, and the names of what failed."""
    report = CACHE / f"{end}.xml"
    report.unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    many = ["--processes", str(min(cores, 8))] if cores > 1 else []
    command = [str(python), "-m", "pytest", "-q", *many, "-m", "not long and not timing"]
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # DeepSpeed's ninja
    own = {**variables(), "PATH": path}
    subprocess.run([*command, f"--junitxml={report}", *tests], cwd=ROOT, env=own)
    if not report.exists():
        raise SystemExit(f"{end}: pytest has written no report; see above")
    cases = ElementTree.parse(report).getroot().iter("testcase")
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        outcomes[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "date": datetime.date.today().isoformat(),
        "releases": releases(python),
        "model_types": said(python, MODEL_TYPES).split(),
        "passed": len(outcomes["passed"]),
        "skipped": len(outcomes["skipped"]),
        "failed": outcomes["failed"],
    }


def variables() -> dict[str, str]:
    """Of the tests: nothing of this interpreter's own packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def releases(python: Path) -> dict[str, str]:
    code = f"import importlib.metadata as m; print(*(m.version(n) for n in {PACKAGES!r}))"
    return dict(zip(PACKAGES, said(python, code).split(), strict=True))


def said(python: Path, code: str) -> str:
    command = [str(python), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables())
    return done.stdout.strip()


def write(results: dict[str, Any]) -> None:
    """The range into the package, and the table into the page."""
    old, new = (results[end] for end in ENDS)
    plain = {end: {n: v.split("+")[0] for n, v in results[end]["releases"].items()} for end in ENDS}
    fresh = sorted(set(new["model_types"]) - set(old["model_types"]))
    RANGE.write_text(
        json.dumps(
            {
                "ranges": {n: [plain[end][n] for end in ENDS] for n in PACKAGES},
                "model_types": dict.fromkeys(fresh, plain["newest"]["transformers"]),
            },
            indent=1,
        )
        + "\n"
    )
    lines = [
        f"| | {' | '.join(PACKAGES)} | passed | skipped | failed | date |",
        "|---|" + "---|" * (len(PACKAGES) + 4),
    ]
    for end in ENDS:
        found = results[end]
        cells = [end, *found["releases"].values(), str(found["passed"]), str(found["skipped"])]
        lines.append(f"| {' | '.join([*cells, str(len(found['failed'])), found['date']])} |")
    lines += [f"- {end}: failed `{name}`" for end in ENDS for name in results[end]["failed"]]
    text = PAGE.read_text()
    table = f"{BEGIN}\n" + "\n".join(lines) + f"\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
