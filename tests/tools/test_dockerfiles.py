"""The Dockerfiles are read without Docker: nothing wrong in them, and what is wrong is found."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("deploy/Dockerfile", "deploy/Dockerfile.cuda")
GOOD = """\
FROM python:3.11-slim AS root
RUN apt-get update && apt-get install -y g++ \\
    # a remark inside
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/x
COPY src ./src
RUN pip install --no-cache-dir . && useradd x
HEALTHCHECK --interval=5m CMD python -c 'pass'
CMD ["x", "--help"]

FROM root
USER x
"""


def script() -> Any:
    path = ROOT / "scripts" / "rehearse_dockerfile.py"
    spec = importlib.util.spec_from_file_location("rehearse_dockerfile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


TOOL = script()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / ".dockerignore").write_text("# all\n*\n!src\n**/__pycache__\n")
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_there_is_nothing_to_complain_of(name: str) -> None:
    assert TOOL.complaints((ROOT / name).read_text(encoding="utf-8"), ROOT) == []


@pytest.mark.parametrize("name", FILES)
def test_its_python_is_the_project_s_and_its_packages_are_locked(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "FROM python:3.11-" in text
    assert 'requires-python = ">=3.11"' in project
    installs = re.findall(r"pip install [^&;\n]*", text.replace("\\\n", " "))
    assert installs
    assert all("--no-deps" in each for each in installs)
    assert (
        sum("--require-hashes" in each for each in installs) == len(installs) - 1
    )  # all but hasten


def test_the_whole_of_a_good_one_passes(context: Path) -> None:
    assert TOOL.complaints(GOOD, context) == []
    assert [each.name for each in TOOL.stage(TOOL.instructions(GOOD))] == [
        *("RUN", "WORKDIR", "COPY", "RUN", "HEALTHCHECK", "CMD", "USER"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("WORKDIR", "WORKDER", "WORKDER is no instruction"),
        ("python:3.11-slim", "python", "has no tag"),
        ("COPY src ./src", "COPY missing ./src", "missing isn't in the context"),
        ("COPY src ./src", "COPY ../src ./src", "isn't in the context"),
        ("COPY src ./src", "COPY docs ./docs", "left out by .dockerignore"),
        ("USER x", "USER root", "runs as root"),
        ("USER x", "USER 0:0", "runs as root"),
        ("USER x\n", "", "runs as root"),
        ("HEALTHCHECK --interval=5m CMD python -c 'pass'\n", "", "no HEALTHCHECK"),
        ("python -c 'pass'", "python -c 'pass", "the shell can't read it"),
        ('CMD ["x", "--help"]\n', "", "nothing says what the container starts"),
        ('"--help"]', "--help]", "no list of words"),
        ("apt-get update && ", "", "apt-get install without update"),
        (" --no-cache-dir", "", "pip's cache"),
        ("USER x\n", "USER x\nRUN a \\\n", "the last line is continued"),
        (GOOD, "", "doesn't begin with FROM"),
    ],
)
def test_what_is_wrong_is_found(old: str, new: str, said: str, context: Path) -> None:
    assert old in GOOD
    found = TOOL.complaints(GOOD.replace(old, new), context)
    assert any(said in line for line in found), found


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("src", False),
        ("src/hasten/core", False),
        ("src/hasten/__pycache__", True),
        ("docs", True),
        ("docs/reference/techniques/ddp.md", True),
        ("pyproject.toml", True),
    ],
)
def test_the_last_rule_decides_what_is_left_out(path: str, out: bool) -> None:
    assert TOOL.ignored(path, "*\n!src\n**/__pycache__\n") is out


def test_a_rehearsal_runs_commands_in_order_and_spares_the_machine(
    context: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("pip install --no-cache-dir .", "ls src >seen && python -c 'import sys'")
    text = text.replace('CMD ["x", "--help"]', 'CMD ["cat", "seen"]')
    TOOL.rehearse(text, context, tmp_path / "run", None, pip=False)
    out = capfd.readouterr().out
    assert "\nx.py\n" in out
    assert "apt-get install -y g++\nrm -rf /var/lib/apt/lists" in out
    assert out.rstrip().endswith("useradd x")
    assert (tmp_path / "run" / "image" / "opt" / "x" / "src" / "x.py").is_file()
    with pytest.raises(TOOL.subprocess.CalledProcessError):
        TOOL.rehearse(
            text.replace("useradd x", "false"), context, tmp_path / "again", None, pip=False
        )
