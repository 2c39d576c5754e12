"""The scripts of findings/ have the parts that its README names. None is run, nothing is loaded."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FINDINGS = Path(__file__).resolve().parent.parent / "findings"
SCRIPTS = sorted(path for path in FINDINGS.glob("*.sh") if path.name != "run.sh")


def names(path: Path) -> str:
    return path.stem


def installed(text: str) -> list[str]:
    """The requirements in a script's calls of pip."""
    joined = re.sub(r"\\\n\s*", "", text)
    calls = re.findall(r'\bpip"? install ([^|;&\n]*)', joined)
    return [word for call in calls for word in call.split() if not word.startswith("-")]


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_finding_cleans_up_and_says_what_it_shows(script: Path) -> None:
    text = script.read_text()
    lines = text.splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert re.match(r"# \S+.*: ", lines[1]), "the second line is 'package: the behaviour'"
    assert "set -euo pipefail" in lines
    assert re.search(r"=\$\(mktemp -d\)", text)
    assert re.search(r"^trap .*rm -rf .* EXIT$", text, re.MULTILINE)
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_finding_pins_its_packages_and_does_without_hasten(script: Path) -> None:
    text = script.read_text()
    requirements = installed(text)
    assert requirements
    pinned = re.compile(r"""["']?[\w.-]+(\[[\w,]+\])?==\d[\w.]*["']?""")
    assert [r for r in requirements if not pinned.fullmatch(r)] == []
    assert not re.search(r"(import|from|-m|install) +hasten\b", text)


def test_the_runner_lists_the_outcome_of_each_finding(tmp_path: Path) -> None:
    shutil.copy(FINDINGS / "run.sh", tmp_path)
    for name, code in (("same", 0), ("other", 1), ("offline", 2)):
        script = tmp_path / f"{name}.sh"
        script.write_text(f"#!/usr/bin/env bash\nexit {code}\n")
        script.chmod(0o755)

    def run(*arguments: str) -> tuple[int, dict[str, str], str]:
        done = subprocess.run([tmp_path / "run.sh", *arguments], capture_output=True, text=True)
        rows = re.findall(r"^(\S+) +(as described|changed|not run) +\d+ s$", done.stdout, re.M)
        return done.returncode, dict(rows), done.stderr

    rows = {"same": "as described", "other": "changed", "offline": "not run"}
    assert run()[:2] == (1, rows)
    assert run("same")[:2] == (0, {"same": "as described"})
    assert run("offline")[:2] == (2, {"offline": "not run"})
    code, none, error = run("oter")
    assert (code, none) == (2, {})
    assert 'no finding "oter"' in error
    assert "offline other same" in error
