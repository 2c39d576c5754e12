"""The keys ``ceiling`` and ``price``: values, files, and every way in which they can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.core import context as facts
from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.machine.benchmark import MachineRates, Rate
from hasten.machine.environment import World
from hasten.machine.host import Accelerator
from hasten.models.flops import model_flops
from hasten.recipe import peak_flops
from hasten.recipe.peak_flops import (
    ceiling_of,
    meter_of,
    mfu_words,
    read_rates,
    resolve_ceiling,
    write_rates,
)
from hasten.recipe.preset_plans import entries_of, names, preset, preset_of
from hasten.recipe.price import Price, cost_of
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques import CATALOGUE
from tiny import tiny_model

HERE = facts.seen_at_start()
ON_CPU = replace(HERE, device="cpu")


def recipe(folder: Path, **changes: Any) -> Recipe:
    values = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    return Recipe(**{**values, "output": str(folder / "run"), **changes})


def on_gpu(name: str, size: int = 1) -> JobContext:
    hardware = replace(HERE.hardware, accelerators=(Accelerator(name, 80 * 10**9, "9.0"),))
    return replace(HERE, hardware=hardware, device="cuda:0", world=World(size=size))


def rates(**changes: Any) -> MachineRates:
    values: dict[str, Any] = {
        "device": "cpu",
        "device_name": HERE.hardware.cpu,
        "threads": 2,
        "torch": "2.13.0",
        "measured_at": "2026-11-21T03:00:00+00:00",
        "seconds": 2.0,
        "products": (
            Rate("64x16 by 16x32", "bf16", 3e12, 2e12, 5),
            Rate("64x64 by 64x64", "fp32", 1e12, 1e12, 5),
            Rate("64x64 by 64x64", "fp8", 9e12, 9e12, 5),
        ),
        "copies": (),
    }
    return MachineRates(**{**values, **changes})


def test_a_file_s_fastest_format_but_fp8_is_the_ceiling(tmp_path: Path) -> None:
    write_rates(rates(), tmp_path / "rates.json")
    wish = recipe(tmp_path, ceiling=str(tmp_path / "rates.json"))
    found = ceiling_of(wish, ON_CPU)
    assert found is not None
    assert found.rate == 3e12
    assert found.source == "3 TFLOP/s, measured: bf16 64x16 by 16x32, threads: 2, 2026-11-21"
    words = mfu_words(wish, ON_CPU)
    assert words is not None
    assert "Frozen weights: 4 FLOPs instead of 6" in words


def test_auto_is_the_datasheet_of_a_known_gpu_times_their_number(tmp_path: Path) -> None:
    model = tiny_model()
    meter = meter_of(recipe(tmp_path), on_gpu("NVIDIA H200", 8), model)
    assert meter.ceiling == 8 * 989e12
    assert meter.source.startswith("8 x 989 TFLOP/s, datasheet of H200: stas00")
    assert meter.per_token == model_flops(model).per_token


@pytest.mark.parametrize("context", [ON_CPU, on_gpu("NVIDIA H100 NVL")], ids=["cpu", "unknown gpu"])
def test_auto_without_a_known_device_counts_flops_and_no_mfu(
    tmp_path: Path, context: JobContext
) -> None:
    meter = meter_of(recipe(tmp_path), context, tiny_model())
    assert meter.per_token
    assert not meter.ceiling
    assert mfu_words(recipe(tmp_path), context) is None


def test_a_model_that_is_not_counted_has_no_meter(tmp_path: Path) -> None:
    meter = meter_of(recipe(tmp_path), on_gpu("NVIDIA H200"), nn.Linear(2, 2))
    assert meter == type(meter)()


def test_ranks_on_one_measured_processor_share_its_ceiling(tmp_path: Path) -> None:
    write_rates(rates(), tmp_path / "rates.json")
    wish = recipe(tmp_path, ceiling=str(tmp_path / "rates.json"), nproc=2)
    for size, expected in ((1, 3e12), (2, 3e12), (4, 0.0)):
        known = replace(ON_CPU, world=World(size=size))
        assert meter_of(wish, known, tiny_model()).ceiling == expected


def test_measure_is_done_once_per_folder_and_anew_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    given = [rates(), rates(device_name="another")]
    monkeypatch.setattr(peak_flops, "measure", lambda **asked: calls.append(asked) or given[0])
    wish, said = recipe(tmp_path, ceiling="measure"), list[str]()
    resolve_ceiling(wish, ON_CPU, said.append)
    resolve_ceiling(wish, ON_CPU, said.append)
    assert len(calls) == len(said) == 1
    assert calls[0]["seconds"] == 2.0
    found = ceiling_of(wish, ON_CPU)
    assert found is not None
    assert found.rate == 3e12
    write_rates(given[1], tmp_path / "run" / "data" / "ceiling.json")
    assert ceiling_of(wish, ON_CPU) is None
    resolve_ceiling(wish, ON_CPU)
    assert len(calls) == 2


def test_ranks_never_measure_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_flops, "measure", lambda **asked: pytest.fail("measured"))
    resolve_ceiling(recipe(tmp_path, ceiling="measure"), replace(ON_CPU, world=World(1, 1, 2)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "can't be used"),
        (b"\xff\xfe", "can't be used"),
        (b"[" * 100_000, "can't be used"),
        (b"[]", "holds a list, expected an object"),
        (json.dumps(rates(device_name="NVIDIA H200").to_dict()).encode(), "was measured on NVIDIA"),
        (json.dumps(rates(device="cuda").to_dict()).encode(), "was measured on"),
    ],
)
def test_a_file_that_can_t_be_used_is_one_sentence(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        resolve_ceiling(recipe(tmp_path, ceiling=str(path)), ON_CPU)
    assert str(caught.value).startswith("ceiling: ")
    assert "\n" not in str(caught.value)
    assert "hasten env --bench -o FILE" in str(caught.value)


def test_a_failed_write_leaves_the_earlier_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    write_rates(rates(), path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left on device; make room"):
        write_rates(rates(threads=9), path)
    assert [p.name for p in tmp_path.iterdir()] == ["rates.json"]
    assert read_rates(path, ON_CPU).threads == 2


CNY = {"currency": "CNY", "per_device_hour": 0.6}


def priced_recipe(**values: Any) -> Recipe:
    rest = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    return recipe_from({**rest, **values}, "test")


def test_the_articles_example_costs_what_they_say() -> None:
    found = cost_of(priced_recipe(price=CNY).price, seconds=1.8 * 3600, tokens=2_000_000, devices=4)
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
    found = priced_recipe(price=str(path))
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
        priced_recipe(price=str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/nothing/here.yaml", "/", "a\0b"])
def test_a_price_file_that_is_not_there_is_said(name: str) -> None:
    with pytest.raises(InputError, match=r"price file|NUL character"):
        priced_recipe(price=name)


def test_a_mistyped_key_in_the_recipe_s_own_price_has_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'currency'"):
        priced_recipe(price={"curency": "CNY", "per_device_hour": 1})


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
    assert priced_recipe(plan=name, nproc=ranks).plan == entries_of(name, ranks)
    assert preset_of(priced_recipe(plan=name, nproc=ranks).plan, ranks) == data


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
    resolved = priced_recipe(plan="article", nproc=2, checkpoint_every=5).plan
    assert {"topk": {"ratio": 0.05, "dense_share": 0.0}} in resolved


def test_a_plan_of_one_s_own_is_no_preset() -> None:
    assert preset_of([]) is None
    assert preset_of(["packed"]) is None
