"""The command line as one table, the help of every command, and ``hasten keys``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hasten
from hasten.cli.help import HELP
from hasten.cli.main import app
from hasten.recipe.schema import Recipe
from hasten.techniques import CATALOGUE
from told import Hasten

ROOT = Path(__file__).parents[2]
TABLE = {
    "Start": ["demo", "init", "import", "check"],
    "Train": ["train", "export", "chat", "eval", "checkpoint"],
    "Measure": ["speedup", "verify", "tune", "profile"],
    "Look": ["report", "monitor", "env", "keys", "data"],
    "Cluster": ["estimate", "launch"],
}
BELOW = {
    "checkpoint": ["ls", "verify", "diff", "convert"],
    "data": ["inspect", "stats", "pack", "convert"],
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups included."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield name, command
        for below, leaf in getattr(command, "commands", {}).items():
            yield f"{name} {below}", leaf


COMMANDS = dict(commands())


def test_the_help_lists_the_commands_of_the_table_in_their_groups() -> None:
    text = CliRunner().invoke(app, ["-h"]).output
    assert CliRunner().invoke(app, ["--help"]).output == text
    listed: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            section = heading[1]
        elif (row := re.match(r"  (\w+)  ", line)) and section in TABLE:
            listed[section].append(row[1])
    assert listed == TABLE
    groups = {name: list(c.commands) for name, c in COMMANDS.items() if hasattr(c, "commands")}
    assert groups == BELOW


def test_every_command_is_in_the_table_of_examples() -> None:
    assert set(HELP) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_has_a_whole_summary_three_examples_and_its_page(name: str) -> None:
    summary = COMMANDS[name].help.partition("\n")[0]
    assert summary.endswith(".")
    assert len(summary) < 60
    text = CliRunner().invoke(app, [*name.split(), "-h"]).output
    assert summary in text
    entry = HELP[name]
    assert len(set(entry.examples)) == 3
    assert all(f"hasten {example}\n" in text for example in entry.examples)
    assert f"Documentation: {entry.page}" in text
    assert (ROOT / entry.page).is_file()


@pytest.mark.parametrize(
    "example", [example for entry in HELP.values() for example in entry.examples]
)
def test_an_example_is_a_command_line_that_parses(example: str) -> None:
    words = shlex.split(example)
    name = max((n for n in COMMANDS if words[: len(n.split())] == n.split()), key=len)
    command, rest = COMMANDS[name], words[len(name.split()) :]
    command.make_context(name, rest, resilient_parsing=False)


def test_an_option_name_has_one_meaning_over_all_commands() -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    for command in COMMANDS.values():
        for option in command.params:
            if getattr(option, "help", None) and option.param_type_name == "option":
                for spelling in (*option.opts, *option.secondary_opts):
                    meanings[spelling].add(option.help.partition(":")[0])
    assert {name: texts for name, texts in meanings.items() if len(texts) > 1} == {}


def test_json_is_a_flag_and_output_has_a_short_form_everywhere() -> None:
    for name, command in COMMANDS.items():
        for option in command.params:
            if "--json" in option.opts:
                assert option.is_flag, name
            if "--output" in option.opts:
                assert "-o" in option.opts, name
            assert name in ("export", "checkpoint convert") or "--to" not in option.opts
            assert not {"--html", "--recipe", "--variants", "--plan"} & {*option.opts}, name


def test_no_recipe_key_is_an_option_too() -> None:
    from hasten.recipe.schema import Recipe

    allowed = {"output", "price", "device", "max_rejected"}  # without a recipe, or where to write
    for name, command in COMMANDS.items():
        options = {str(p.name) for p in command.params if p.param_type_name == "option"}
        assert (options & set(Recipe.model_fields)) <= allowed, name


def test_the_version_is_printed() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"hasten {hasten.__version__}\n")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_package_is_installed_from_git_without_a_clone(tmp_path: Path) -> None:
    """Without dependencies, which the tests have already; help and version need none of torch."""
    if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("this checkout has no git history to install from")
    target = tmp_path / "installed"
    words = ["install", "--quiet", "--no-deps", "--target", target, f"git+file://{ROOT}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True
    )
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr
    code = "import hasten; from hasten.cli.main import app; print(hasten.__file__); app(['-h'])"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target)},
    )
    assert shown.returncode == 0, shown.stderr
    assert str(target) in shown.stdout
    assert "Documentation" in (target / "hasten" / "cli" / "help.py").read_text()


def test_all_keys_and_techniques_are_listed_with_type_default_and_meaning(hasten: Hasten) -> None:
    code, out, err = hasten("keys", "--json")
    assert (code, err) == (0, "")
    tables = json.loads(out)
    assert [row["name"] for row in tables["keys"]] == list(Recipe.model_fields)
    assert [row["name"] for row in tables["techniques"]] == [kind.name() for kind in CATALOGUE]
    for row in tables["keys"]:
        assert row["type"]
        assert row["meaning"] == Recipe.model_fields[row["name"]].description
    rows = {row["name"]: row for row in tables["keys"]}
    assert rows["model"]["default"] == "required"
    assert rows["dataset"]["type"] == "str | list of str | DataSource"
    assert json.loads(rows["adam_betas"]["default"]) == [0.9, 0.95]
    code, out, _ = hasten("keys")
    assert code == 0
    assert all(f"\n  {name} " in out for name in rows)


def test_one_key_and_one_technique(hasten: Hasten) -> None:
    code, out, _ = hasten("keys", "lr_schedule")
    assert code == 0
    assert "constant | linear | cosine | wsd" in out
    assert '"cosine"' in out
    code, out, _ = hasten("keys", "gradient_accumulation")
    assert code == 0
    assert "technique of slot batch" in out
    assert "micro_batch_size" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("learning_rat", "did you mean 'learning_rate'"),
        ("num_train_epochs", "num_train_epochs is epochs here"),
        ("bf16", "bf16_master_weights or autocast"),
    ],
)
def test_an_unknown_name_is_answered_with_what_to_write(
    hasten: Hasten, name: str, words: str
) -> None:
    code, out, err = hasten("keys", name)
    assert (code, out) == (2, "")
    assert words in err
