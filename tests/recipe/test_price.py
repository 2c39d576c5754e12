"""Prices and preset plans: read from a recipe or a file, strict, and resolved into plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.recipe.preset_plans import entries_of, names, preset, preset_of
from hasten.recipe.price import Price, cost_of
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques import CATALOGUE

CNY = {"currency": "CNY", "per_device_hour": 0.6}


def recipe(**values: Any) -> Recipe:
    rest = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    return recipe_from({**rest, **values}, "test")


def test_the_articles_example_costs_what_they_say() -> None:
    found = cost_of(recipe(price=CNY).price, seconds=1.8 * 3600, tokens=2_000_000, devices=4)
    assert found is not None
    assert found["total"] == pytest.approx(4.32)
    assert found["device_hours"] == pytest.approx(7.2)
    assert found["per_million_tokens"] == pytest.approx(2.16)


def test_spot_hours_devices_and_energy_are_weighed_in() -> None:
    price = Price(
        currency="EUR",
        per_device_hour=2.0,
        devices=8,
        spot_per_device_hour=1.0,
        spot_share=0.5,
        per_kwh=0.3,
    )
    assert price.hour == 1.5
    assert price.money(3600, price.paid(4), kwh=10) == pytest.approx(8 * 1.5 + 3)
    assert price.money(3600, price.paid(4)) == pytest.approx(12)  # energy unknown: not guessed


@given(
    st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0.01, 1), st.floats(0, 1e7), st.integers(1, 99)
)
def test_a_mixed_hour_costs_between_the_two_prices_and_money_grows_with_time(
    usual: float, spot: float, share: float, seconds: float, devices: int
) -> None:
    price = Price(currency="X", per_device_hour=usual, spot_per_device_hour=spot, spot_share=share)
    assert min(usual, spot) * (1 - 1e-9) <= price.hour <= max(usual, spot) * (1 + 1e-9)
    assert price.money(2 * seconds, devices) == pytest.approx(2 * price.money(seconds, devices))


def test_a_recipe_may_name_a_file_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "price.yaml"
    path.write_text("currency: CNY\nper_device_hour: 0.6\ndevices: 4\n")
    found = recipe(price=str(path))
    path.unlink()
    assert found.price == Price(currency="CNY", per_device_hour=0.6, devices=4)
    assert recipe_from(found.model_dump(mode="json"), "again") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("currency: CNY\nper_device_hur: 1\n", "did you mean 'per_device_hour'"),
        ("currency: CNY\n", "the key 'per_device_hour' is missing"),
        ("currency: CNY\nper_device_hour: -1\n", "per_device_hour"),
        ("currency: CNY\nper_device_hour: .nan\n", "per_device_hour"),
        ("currency: CNY\nper_device_hour: 1\nspot_share: 0.5\n", "spot_per_device_hour"),
        ("- 1\n", "not a price file"),
        ("a: [\n", "price.yaml"),
        ("\x00\xff", "price.yaml"),
    ],
)
def test_an_unusable_price_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "price.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"price") as caught:
        recipe(price=str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/nothing/here.yaml", "/", "a\0b"])
def test_a_price_file_that_is_not_there_is_said(name: str) -> None:
    with pytest.raises(InputError, match=r"price file|NUL character"):
        recipe(price=name)


def test_a_mistyped_key_in_the_recipe_s_own_price_has_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'currency'"):
        recipe(price={"curency": "CNY", "per_device_hour": 1})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", names())
def test_a_preset_is_a_plan_of_techniques_that_exist_or_says_what_is_missing(
    name: str, ranks: int
) -> None:
    data = preset(name, ranks)
    plan = Plan.from_list(entries_of(name, ranks), CATALOGUE)
    assert len(plan) == sum("technique" in switch for switch in data["switches"])
    for switch in data["switches"]:
        assert ("technique" in switch) != ("missing" in switch)
        assert switch["claims"]
    assert recipe(plan=name, nproc=ranks).plan == entries_of(name, ranks)
    assert preset_of(recipe(plan=name, nproc=ranks).plan, ranks) == data


def test_the_articles_preset_says_their_four_figures_and_repeats_no_other() -> None:
    switches = preset("article")["switches"]
    assert [s["claims"][0]["said"].split()[0] for s in switches] == ["+15", "+12", "+8", "+7"]
    claimed = {kind.name(): kind().claims for kind in CATALOGUE}
    for switch in switches:  # a technique that carries a claim of its own carries the same
        for claim in claimed.get(switch.get("technique", ""), ()):
            same = [c["ratio"] for c in switch["claims"] if c["metric"] == claim.metric]
            assert same == [claim.ratio]


def test_compression_joins_the_articles_plan_where_there_are_ranks() -> None:
    alone, two = (Plan.from_list(entries_of("article", n), CATALOGUE) for n in (1, 2))
    assert [t.name() for t in set(two) - set(alone)] == ["topk"]
    resolved = recipe(plan="article", nproc=2, checkpoint_every=5).plan
    assert {"topk": {"ratio": 0.05, "dense_share": 0.0}} in resolved


def test_an_unknown_preset_has_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'article'"):
        recipe(plan="articel")


def test_a_plan_of_one_s_own_is_no_preset() -> None:
    assert preset_of([]) is None
    assert preset_of(["packed"]) is None
