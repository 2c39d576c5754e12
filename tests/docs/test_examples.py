"""The example recipes: each loads, nothing is in its plan's way, and it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hasten.data.conversation import Conversation
from hasten.data.corpus import Corpus, SplitSide
from hasten.data.turns import Message
from hasten.measure.choose import choose_by_forecast
from hasten.models.presets import PRESETS
from hasten.parts.kernels import rowwise
from hasten.recipe.build import context_of
from hasten.recipe.schema import Recipe, load_recipe
from hasten.training import run as run_module

pytestmark = pytest.mark.usefixtures("bf16_products")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
each = pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
SHORT = {"eval_data": 3, "max_examples": 40, "cutoff_len": 64, "vocabulary": 300, "warmup_steps": 0}
SHORT |= {"max_steps": 2, "global_batch_size": 4, "global_batch_tokens": None, "eval_every": 0}


def short_corpus() -> Corpus:
    """A stand-in for the embedded corpus, whose examples hardly ever fit into 64 tokens."""

    def portion(numbers: range) -> SplitSide:
        pairs = [
            (f"def add_{n}(x):\n\nAdd {n} to x.", f"    return x + {n}{'  # again' * (n % 4)}")
            for n in numbers
        ]
        talks = [
            Conversation((Message("user", q), Message("assistant", a)), None, q) for q, a in pairs
        ]
        texts = [Conversation((), f"{q}\n{a}\n" * (n % 3 + 1), q) for n, (q, a) in enumerate(pairs)]
        return SplitSide(tuple(talks), tuple(texts))

    return Corpus(portion(range(60)), portion(range(60, 70)), "0" * 64, ())


def sums(path: Path) -> Path:
    """Question and answer examples of the GSM8K form."""
    lines = [
        {"question": f"{a} and {b} together?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
        for a, b in ((i, 3 * i + 1) for i in range(48))
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def short(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The example with seconds of work and everything of its own kept."""
    monkeypatch.setattr("hasten.data.selection.stdlib_corpus", short_corpus)
    recipe = load_recipe(path)
    changes: dict[str, Any] = {**SHORT, "patience": 0, "output": str(folder / "run")}
    if recipe.dataset not in ("stdlib", "stdlib-text"):
        changes["dataset"] = str(sums(folder / "sums.jsonl"))
    recipe = Recipe(**{**recipe.model_dump(), **changes})
    if recipe.auto_plan is not None:  # a race takes longer than all that is tested here
        chosen = choose_by_forecast(recipe, context_of(recipe), "the training is short").entries
        recipe = recipe.model_copy(update={"plan": chosen, "auto_plan": None})
    return recipe


@each
def test_an_example_trains_with_all_its_techniques(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = short(path, tmp_path, monkeypatch)
    said: list[str] = []
    summary = run_module.train(recipe, tell=said.append)
    assert summary["steps"] == 2
    assert len(summary["plan"]) >= len(recipe.plan) > 0
    assert summary["eval_loss"] > 0
    assert (Path(summary["saved"]) / "tokenizer.json").is_file()
    assert ("adapter" in summary["saved"]) == (recipe.finetuning_type == "lora")
    # Two steps of four examples: too few for an accumulation by thousands of tokens to cut, or for
    # a checkpoint every fifty steps.
    idle = {name for name, proof in summary["effective"].items() if not proof["effective"]}
    assert idle <= {"gradient_accumulation", "checkpoints"}
    if rowwise.library().library is not None:  # without a compiler it goes on, and says so
        assert not any("without" in line for line in said)


@each
def test_an_example_says_what_it_is_and_how_it_is_started(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"hasten train examples/{path.name}" in text
    recipe = load_recipe(path)
    assert recipe.output == f"runs/{path.stem}"
    named = re.findall(r"model: ([\w.-]+-(?:tiny|small))\b", text)
    assert named
    assert set(named) <= set(PRESETS)


def test_the_tiny_presets_all_have_an_example() -> None:
    used = {load_recipe(path).model for path in EXAMPLES}
    assert {name for name in PRESETS if name.endswith("-tiny")} <= used


def test_the_demo_has_the_job_of_the_example() -> None:
    from hasten.cli.demo import recipe_for

    example = load_recipe(ROOT / "examples" / "stdlib_tiny.yaml").model_dump()
    demo = recipe_for(Path("runs/demo"), 0).model_dump()
    assert {key for key in demo if demo[key] != example[key]} == {"output", "auto_plan"}


def test_the_metrics_page_names_every_key_that_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = short(ROOT / "examples" / "stdlib_tiny.yaml", tmp_path, monkeypatch)
    summary = run_module.train(recipe, tell=lambda text: None)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## summary.json")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(summary)
    [row] = re.findall(r"^\| `evaluations.jsonl` \|(.*)$", page, re.MULTILINE)
    evaluation = _last_line(tmp_path / "run" / "evaluations.jsonl")
    assert set(re.findall(r"`(\w+)`", row)) <= set(evaluation)


def _last_line(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found
