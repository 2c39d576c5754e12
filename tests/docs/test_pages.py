"""The reference pages against the code: recipe keys, cards, slots, fields of the metrics files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Price, Recipe
from hasten.techniques import CATALOGUE

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("Settings", "Fidelity and proof", "Claim and measurement", "Alone", "Source")
kinds = pytest.mark.parametrize("kind", CATALOGUE, ids=lambda k: k.name())


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def default_of(field: FieldInfo) -> str:
    """A recipe key's default as the page writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    value = list(value) if isinstance(value, tuple) else value  # as YAML has it
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in (Recipe, Price) for name in model.model_fields],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_the_recipe_page_has_each_key_with_default_and_meaning(
    model: type[BaseModel], name: str
) -> None:
    field = model.model_fields[name]
    assert f"| `{name}` | {default_of(field)} | {field.description} |" in page("recipe.md")


def test_the_recipe_page_has_no_key_that_does_not_exist() -> None:
    tables = re.findall(r"\| key \| default \|.*?\n\n", page("recipe.md"), re.DOTALL)
    named = set(re.findall(r"^\| `(\w+)` \|", "".join(tables), re.MULTILINE))
    assert named == {*Recipe.model_fields, *Price.model_fields}


def test_the_recipe_page_names_every_preset() -> None:
    text = page("recipe.md")
    assert [name for name in PRESETS if f"`{name}`" not in text] == []


@kinds
def test_every_technique_has_a_card_with_all_its_sections(kind: type[Technique]) -> None:
    card = page(f"cards/{kind.name()}.md")
    assert card.startswith(f"# {kind.name()}\n")
    assert f"Slot: {kind.slot.name}." in card.replace("\n", " ")
    for lead in ("What it does", "When it helps", "When it harms", "Obstacles"):
        assert f"**{lead}.**" in card
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == list(SECTIONS)


@kinds
def test_a_card_lists_every_setting_and_no_other(kind: type[Technique]) -> None:
    settings = page(f"cards/{kind.name()}.md").split("## Settings")[1].split("\n## ")[0]
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*?) \|", settings, re.MULTILINE)
    assert rows == [(f.name, str(f.default), f.metadata["doc"]) for f in fields]
    if not fields:
        assert settings.strip() == "None."


@kinds
def test_a_card_shows_what_a_tuner_may_try(kind: type[Technique]) -> None:
    card = page(f"cards/{kind.name()}.md")
    for name, knob in kind.knobs().items():
        tries = ", ".join(map(str, knob.choices))
        if knob.low is not None:
            tries = f"{knob.low} to {knob.high}"
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(tries)} ?\|$", card, re.MULTILINE)


@kinds
def test_a_card_names_the_fidelity_and_every_claim(kind: type[Technique]) -> None:
    card = page(f"cards/{kind.name()}.md")
    proof = card.split("## Fidelity and proof\n\n")[1]
    assert proof.lower().startswith(kind().fidelity.name.lower())
    claims = card.split("## Claim and measurement\n\n")[1].split("\n## ")[0]
    for claim in kind().claims:
        assert f"| {claim.ratio:.2f}× " in claims
    assert claims.startswith("No claim.") == (not kind().claims)
    assert "not measured" in claims or "`hasten demo`, 20" in claims


def test_every_card_belongs_to_a_technique() -> None:
    cards = {path.stem for path in (DOCS / "cards").glob("*.md")}
    assert cards == {kind.name() for kind in CATALOGUE}


def test_the_slots_table_has_every_slot_its_decision_and_its_techniques() -> None:
    text = page("how-it-works.md")
    rows = {found[1]: found[0] for found in re.finditer(r"^\| ([A-Z]+) \| .*$", text, re.MULTILINE)}
    assert list(rows) == [slot.name for slot in Slot]
    for slot in Slot:
        assert slot.value in rows[slot.name]
        linked = set(re.findall(r"\(cards/(\w+)\.md\)", rows[slot.name]))
        assert linked == {kind.name() for kind in CATALOGUE if kind.slot is slot}


def test_the_metrics_page_has_each_field_of_a_step_in_order() -> None:
    section = page("metrics.md").split("## metrics.jsonl")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(StepMetrics)]


def test_the_security_page_names_tests_that_exist() -> None:
    text = page("security.md")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        paths = re.findall(r"\]\(\.\./(tests/[^)]+)\)", row)
        assert paths, row
        assert all((DOCS.parent / path).is_file() for path in paths), row
