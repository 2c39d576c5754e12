"""The release script refuses what isn't ready, before it builds anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A committed copy of what the script looks at, whose checks always fail."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src/hasten").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release.sh", tmp_path / "scripts")
    project = 'version = "1.2.3"\n[project.urls]\nRepository = "https://example.org/x"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "src/hasten/__init__.py").write_text('__version__ = "1.2.3"\n')
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
