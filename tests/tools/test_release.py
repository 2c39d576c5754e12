"""What a release needs: versions and pins, Dockerfiles, and the script's refusals."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.version import Version

from hasten.errors import InputError
from hasten.machine import versions
from hasten.models.source_check import check_native

ROOT = Path(__file__).parents[2]
FILES = ("deploy/Dockerfile", "deploy/Dockerfile.cuda")


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_copies_what_is_there_and_its_shell_parses(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    joined = "\n".join(line for line in lines if line[:1] != "#").replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line]
    sent = (ROOT / ".dockerignore").read_text().split()  # all but what has an exclamation mark
    for kind, text in steps:
        if kind == "COPY":
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in sent, source
        elif kind == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)
            assert text.count("pip install") == text.count("--no-cache-dir")
    kinds = {kind for kind, _ in steps}
    assert "HEALTHCHECK" in kinds
    assert kinds & {"CMD", "ENTRYPOINT"}
    assert [text for kind, text in steps if kind == "USER"] == ["hasten"]


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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A committed copy of what the script looks at, whose checks always fail."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src/hasten").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release.sh", tmp_path / "scripts")
    project = 'version = "1.2.3"\n[project.urls]\nRepository = "https://example.org/x"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "src/hasten/version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3 (2026-11-21)\n")
    (tmp_path / "Makefile").write_text("lint test:\n\t@echo checks >&2; exit 1\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def released(repository: Path, *words: str) -> tuple[int, str]:
    ended = subprocess.run(
        ["bash", "scripts/release.sh", *words], cwd=repository, capture_output=True, text=True
    )
    assert not (repository / "dist").exists()
    return ended.returncode, ended.stderr


def test_nothing_is_built_where_the_checks_fail(repository: Path) -> None:
    code, said = released(repository, "1.2.3")
    assert code != 0
    assert "checks" in said


@pytest.mark.parametrize(
    ("words", "said"), [((), "which version"), (("1.2",), "no version"), (("1.2.4",), "another")]
)
def test_a_wrong_version_is_refused(repository: Path, words: tuple[str, ...], said: str) -> None:
    code, told = released(repository, *words)
    assert code != 0
    assert said in told


def test_a_project_without_an_address_is_refused(repository: Path) -> None:
    project = repository / "pyproject.toml"
    project.write_text('version = "1.2.3"\n[project.urls]\n')
    subprocess.run(["git", "update-index", "--assume-unchanged", project], cwd=repository)
    assert "has no address" in released(repository, "1.2.3")[1]


def test_a_tree_that_isn_t_clean_is_refused(repository: Path) -> None:
    (repository / "more").write_text("")
    assert "isn't clean" in released(repository, "1.2.3")[1]


def test_a_changelog_without_a_date_and_a_tag_that_is_there_are_refused(repository: Path) -> None:
    subprocess.run(["git", "tag", "v1.2.3"], cwd=repository, check=True)
    assert "the tag v1.2.3 is there" in released(repository, "1.2.3")[1]
    (repository / "CHANGELOG.md").write_text("## 1.2.3 (not released)\n")
    subprocess.run(["git", "update-index", "--assume-unchanged", "CHANGELOG.md"], cwd=repository)
    assert "has no heading" in released(repository, "1.2.3")[1]


RANGES = versions.tested()["ranges"]


def test_the_pins_allow_both_ends_and_the_constraints_lie_inside() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = project["dependencies"] + extras["hosts"] + extras["hub"]
    pins = {r.name: r.specifier for r in map(Requirement, every)}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for name, (oldest, newest) in RANGES.items():
        assert {oldest, newest} <= set(pins[name].filter([oldest, newest])), name
        least = next(s.version for s in pins[name] if s.operator == ">=")
        assert Version(oldest).release[:2] == Version(least).release[:2], name
        if name in pinned:
            assert Version(oldest) <= Version(pinned[name]) <= Version(newest), name


def test_releases_inside_the_range_need_no_word() -> None:
    assert versions.untested({name: ends[0] for name, ends in RANGES.items()}) is None
    assert versions.untested({name: ends[1] for name, ends in RANGES.items()}) is None
    assert versions.untested({"torch": f"{RANGES['torch'][1]}+cpu", "numpy": "9.9"}) is None
    newest = Version(RANGES["transformers"][1])
    assert versions.untested({"transformers": f"{newest.major}.{newest.minor}.99"}) is None


def test_a_release_outside_is_named_with_the_range() -> None:
    newest = Version(RANGES["transformers"][1])
    later = f"{newest.major}.{newest.minor + 1}.0"
    said = versions.untested({"transformers": later, "torch": RANGES["torch"][0], "peft": "0.1"})
    assert said is not None
    assert said.startswith(f"hasten wasn't tested with transformers {later} (tested: ")
    assert "peft 0.1 (tested:" in said
    assert "torch" not in said


def test_this_environment_is_asked_without_arguments() -> None:
    found = versions.untested()
    assert found is None or "hasten wasn't tested with" in found


@pytest.mark.parametrize(
    ("model_type", "advice"),
    [
        ("deepseek_v33", "no release up to .* has it either, so choose another model, or correct"),
        ("qqqq", "no release up to .* has it either, so choose another model$"),
    ],
)
def test_a_model_type_that_no_release_knows_is_called_so(model_type: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        check_native("a/b", {"model_type": model_type}, needs_weights=False)


def test_a_model_type_of_a_later_release_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name, since = next(iter(versions.tested()["model_types"].items()))
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {"llama": None})
    with pytest.raises(InputError, match=f"install {since} or newer"):
        check_native("a/b", {"model_type": name}, needs_weights=False)


def test_the_table_and_the_range_are_of_one_run() -> None:
    """``make test-versions`` writes both."""
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    table = page.partition("<!-- table of make test-versions -->")[2].partition("<!-- end")[0]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    if not rows:
        pytest.skip("no complete run of make test-versions since the ranges changed last")
    for place, end in enumerate(("oldest", "newest")):
        for name, ends in RANGES.items():
            assert ends[place] in rows[end], (end, name)
