"""``plan: auto`` on a real recipe whose races are drawn: what helps stays, what hurts goes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.core import context as facts
from hasten.core.plan import Plan, name_of
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, LiveSetting, Technique
from hasten.errors import InputError
from hasten.integrations.adapt import context_of
from hasten.machine import locks
from hasten.machine.host import Accelerator
from hasten.measure import choose as module
from hasten.measure.ablation import Variant
from hasten.measure.choice import Choice, kept_choices
from hasten.measure.choose import PLAIN, choose, kept_choice
from hasten.measure.experiment import Measured
from hasten.measure.recipe_experiment import prepared
from hasten.measure.significance import with_process_variance
from hasten.progress import SilentProgress
from hasten.recipe import build, memory_check
from hasten.recipe.build import Building
from hasten.recipe.candidates import candidates
from hasten.recipe.schema import Recipe, recipe_from
from hasten.report.judgement import judge_variants
from hasten.training.auto_adjust import Candidate
from measure.planted import recorded

SLICED = 3**-0.5  # slices leave a third of the variance of whole turns


class Planted(Technique):
    """A technique that is known to do what its speed in `TRUTHS` says."""

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Any) -> None: ...

    def check_effect(self, session: Any) -> EffectCheck:
        return EffectCheck(True, "races are drawn")


@dataclass(frozen=True)
class Sleeps(Planted):
    slot = Slot.FEED
    auto = "usual"


@dataclass(frozen=True)
class DoesNothing(Planted):
    slot = Slot.ALLOCATOR
    auto = "usual"


@dataclass(frozen=True)
class Gains(Planted):
    slot = Slot.FEED
    auto = "try"


PLANTED = (Sleeps, DoesNothing, Gains)
TRUTHS = {"sleeps": 0.8, "does_nothing": 1.0, "gains": 1.1}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    pairs = [(a, b) for a in range(6) for b in range(6)]
    examples = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return {
        "model": "deepseek-llm-tiny",
        "dataset": str(data),
        "eval_data": 4,
        "vocabulary": 300,
        "cutoff_len": 32,
        "global_batch_size": 4,
        "max_steps": 9,
        "device": "cpu",
        "output": str(folder / "out"),
        "plan": "auto",
        "auto_budget": 60,
    }


def race(
    speeds: Mapping[str, float], noise: Callable[[int], np.ndarray[Any, Any]], rounds: int = 30
) -> Callable[..., Measured]:
    """In place of `measured`: each plan is as fast as its techniques' product, under a noise."""
    races = [0]

    def measured(subject: Any, plans: Mapping[str, Plan], *rest: Any, **more: Any) -> Measured:
        drawn = noise(races[0])[:rounds]
        races[0] += 1
        variants: list[Variant] = []
        for place, (name, plan) in enumerate(plans.items()):
            true = math.prod(speeds.get(t.name(), 1.0) for t in plan)
            values = [1000 * true * float(x) for x in drawn[:, place % drawn.shape[1]]]
            variant = Variant(name, plan, values, kind="other" if place else "baseline")
            variant.baseline_rounds = variants[0].rounds if place else []
            variants.append(variant)
        return Measured(variants, {})

    return measured


def steady(sigma: float, seed: int) -> Callable[[int], np.ndarray[Any, Any]]:
    def noise(number: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng((seed, number)).lognormal(0, sigma / 2**0.5, (30, 16))

    return noise


def busy(seed: int) -> Callable[[int], np.ndarray[Any, Any]]:
    """Rounds of what a busy machine's turns were recorded to stray by, drawn for each variant."""
    turns = np.log(np.median(recorded(), axis=2))
    strays = turns - turns.mean(axis=1, keepdims=True)

    def noise(number: int) -> np.ndarray[Any, Any]:
        draw = np.random.default_rng((seed, number))
        found = strays[draw.integers(len(strays), size=(30, 16)), draw.integers(4, size=16)]
        return np.exp(SLICED * found)

    return noise


def chosen(
    values: Mapping[str, Any], folder: Path, fake: Callable[..., Measured], **more: Any
) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compare_plans", fake)
        recipe = recipe_from(dict(values), "a test")
        return choose(recipe, SilentProgress(), folder=folder, **more)


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(busy, id="busy"),
        pytest.param(lambda seed: steady(0.03, seed), id="calm", marks=pytest.mark.long),
    ],
)
def test_of_60_planted_truths_57_are_told_apart(
    sums: dict[str, Any], noise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With or without bf16 there are other rows, and so other draws of noise: one plan everywhere.
    monkeypatch.setattr("hasten.techniques.precision._slow_bf16", lambda facts: ())
    recipe, right = recipe_from(dict(sums), "a test"), dict.fromkeys(TRUTHS, 0)
    settings = recipe.auto_plan
    assert settings is not None
    subject = prepared(recipe.model_copy(update={"auto_plan": None}), SilentProgress())
    for seed in range(20):
        monkeypatch.setattr(module, "compare_plans", race(TRUTHS, noise(seed)))
        search = module.PlanComparison(subject, settings, SilentProgress(), PLANTED)
        found = search.run().entries
        right["sleeps"] += "sleeps" not in found
        right["does_nothing"] += "does_nothing" not in found
        right["gains"] += "gains" in found
    assert sum(right.values()) >= 57, right


def test_what_usually_helps_stays_where_it_does(sums: dict[str, Any], tmp_path: Path) -> None:
    speeds = {"packed": 1.8, "labelled_token_loss": 1.2, "fused_layers": 1.1, "fused_adamw": 1.05}
    found = chosen(sums, tmp_path, race(speeds, steady(0.02, 1)))
    assert set(speeds) <= set(found.entries)
    assert found.source == "measured"
    assert found.gain is not None
    assert found.gain["low"] is not None
    assert found.gain["low"] < math.prod(speeds.values()) < (found.gain["high"] or 0)
    assert "× [" in found.sentence


def test_where_everything_hurts_nothing_is_taken(sums: dict[str, Any], tmp_path: Path) -> None:
    slow = dict.fromkeys(("packed", "labelled_token_loss", "fused_layers", "fused_adamw"), 0.5)
    found = chosen(sums, tmp_path, race(slow, steady(0.02, 1)))
    assert not set(slow) & set(map(name_of, found.entries))


def test_one_round_decides_nothing(sums: dict[str, Any], tmp_path: Path) -> None:
    """As on a machine so busy that the budget ends after a round."""
    speeds = {"labelled_token_loss": 0.5, "fused_adamw": 0.9, "packed": 2.0}
    found = chosen(sums, tmp_path, race(speeds, steady(0.02, 1), rounds=1))
    names = set(map(name_of, found.entries))
    assert {"labelled_token_loss", "fused_adamw"} <= names  # what usually helps
    assert "packed" not in names
    assert "the best supported one of" in found.why
    raced = [row for row in found.rows if row.ratio is not None]
    assert {row.why for row in raced} == {"undecided"}


def test_plan_auto_and_the_report_have_one_word_for_the_same_rounds() -> None:
    draw, variants = np.random.default_rng(4), list[Variant]()
    for place, speed in enumerate((1.0, 1.03, 1.2, 0.9, 1.0, 1.06)):
        values = [1000 * speed * float(x) for x in draw.lognormal(0, 0.02, 6)]
        variant = Variant(f"with {place}", Plan(), values, kind="other" if place else "baseline")
        variant.baseline_rounds = variants[0].rounds if place else []
        variants.append(variant)
    variants = with_process_variance(variants)
    ours = {name: (said.text, ratio) for name, (ratio, said) in module._effects(variants).items()}
    theirs = {
        variant.name: (said.verdict, said.effect)
        for variant, said in zip(variants[1:], judge_variants(variants)[1:], strict=True)
    }
    assert ours == theirs
    assert len({text.partition(":")[0] for text, _ in ours.values()}) > 1


def test_a_gain_below_the_noise_floor_has_one_word_in_plan_auto_a_report_and_live_tuning() -> None:
    """Six rounds with a ratio of 1.006 [1.0054, 1.0069]."""
    ratios = [1.0054, 1.0057, 1.006, 1.0062, 1.0066, 1.0069]
    base = Variant("baseline", Plan(), [1000.0] * 6, kind="baseline")
    variant = Variant(
        "with it", Plan(), [1000 * r for r in ratios], kind="other", baseline_rounds=base.rounds
    )
    (_, judged) = judge_variants([base, variant])
    assert judged.effect is not None
    assert 1.005 < judged.effect.low < judged.effect.high < 1.007
    (_, auto) = module._effects([base, variant])["with it"]
    logs = [math.log(r) for r in ratios]
    live = Candidate(LiveSetting("x", (1, 2), lambda: 1, print), 2, [*logs, *logs[:2]]).verdict(
        0.05
    )
    assert {judged.verdict, auto.word, live} == {"no effect"}
    plans = {"with it": Plan()}
    assert module._changes({"with it": judged.effect}, plans, set(), set()) == []


def test_a_choice_is_kept_for_the_same_job_and_no_other(
    sums: dict[str, Any], tmp_path: Path
) -> None:
    first = chosen(sums, tmp_path, race({}, steady(0.02, 1)))

    def never(*args: Any, **more: Any) -> Measured:
        raise AssertionError("raced again")

    again = chosen({**sums, "auto_budget": 50, "max_steps": 10}, tmp_path, never)
    assert (again.source, again.entries) == ("remembered", first.entries)
    assert kept_choice(recipe_from(sums, "a test"), SilentProgress(), tmp_path) == again
    other = recipe_from({**sums, "cutoff_len": 24}, "a test")
    assert kept_choice(other, SilentProgress(), tmp_path) is None
    assert "--fresh compares again" in again.why
    for change in ({"cutoff_len": 24}, {"plan": {"auto": {"fidelity": "exact"}}}):
        with pytest.raises(AssertionError, match="raced again"):
            chosen({**sums, **change}, tmp_path, never)
    with pytest.raises(AssertionError, match="raced again"):
        chosen(sums, tmp_path, never, fresh=True)


def test_a_choice_is_found_by_the_model_itself_as_another_trainer_has_it(
    sums: dict[str, Any], tmp_path: Path
) -> None:
    first = chosen(sums, tmp_path, race({}, steady(0.02, 1)))
    recipe = recipe_from({**sums, "plan": []}, "a test")
    subject = prepared(recipe, SilentProgress())
    assert subject.data is not None
    model = Building(recipe, subject.data)()
    (kept,) = kept_choices(context_of(model, "cpu"), tmp_path)
    assert kept.choice == first
    assert kept.examples == subject.context.examples
    assert kept_choices(context_of(model, "cuda:0"), tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"date": 1}', '{"date": "", "choice": {}}'])
def test_a_damaged_memory_is_told_of_and_measured_anew(
    sums: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    first = chosen(sums, tmp_path, race({}, steady(0.02, 1)))
    (kept,) = tmp_path.glob("*.json")
    kept.write_text(text)
    again = chosen(sums, tmp_path, race({}, steady(0.02, 1)))
    assert (again.source, again.entries) == ("measured", first.entries)
    assert "can't be read" in caplog.text
    assert Choice.from_dict(json.loads(kept.read_text())["choice"]).entries == first.entries


def test_without_time_for_a_race_a_forecast_chooses(sums: dict[str, Any], tmp_path: Path) -> None:
    """Nine steps of a tiny model take less than two starts."""
    values = {**sums, "auto_budget": None}
    found = choose(recipe_from(values, "a test"), SilentProgress(), folder=tmp_path)
    assert found.source == "forecast"
    assert "too short to compare plans" in found.why
    assert "labelled_token_loss" in found.entries
    assert not list(tmp_path.glob("*.json"))


def test_the_machine_is_held_over_all_races(sums: dict[str, Any], tmp_path: Path) -> None:
    """Between two races another measurement could begin, and end after the budget."""
    held: list[bool] = []
    fake = race({}, steady(0.02, 1))

    def measured(*args: Any, **more: Any) -> Measured:
        held.append(locks._measuring)
        return fake(*args, **more)

    chosen(sums, tmp_path, measured)
    assert len(held) == 2
    assert all(held)
    assert not locks._measuring


def test_where_another_measurement_has_the_machine_for_too_long_a_forecast_chooses(
    sums: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(tell: Callable[[str], None], budget_seconds: float) -> Any:
        raise InputError(f"budget: waiting for process 1 took all of its {budget_seconds} s")

    monkeypatch.setattr(module, "one_measurement", busy)
    found = chosen(sums, tmp_path, race({}, steady(0.02, 1)))
    assert found.source == "forecast"
    assert "another measurement had this machine for more than 1 min 00 s, so" in found.why
    assert "labelled_token_loss" in found.entries
    assert not list(tmp_path.glob("*.json"))  # it isn't kept


def test_a_choice_says_how_many_changes_had_no_time_and_what_a_forecast_decided(
    sums: dict[str, Any], tmp_path: Path
) -> None:
    whole, counts = race({"labelled_token_loss": 1.5}, steady(0.02, 1)), list[int]()

    def measured(subject: Any, plans: Mapping[str, Plan], *rest: Any, **more: Any) -> Measured:
        """Races all of three plans, and of more the first three."""
        found = whole(subject, plans)
        counts.append(len(plans) - 1)
        return Measured(found.variants if len(plans) <= 3 else found.variants[:3], {})

    found = chosen(sums, tmp_path, measured)
    assert found.why.endswith(f"; no time for {counts[0] - 2} of {counts[0]} changes")
    untried = [r for r in found.rows if r.why.startswith("no time to compare it; forecast: ")]
    assert {r.name for r in untried if r.decision == "taken"} <= set(map(name_of, found.entries))
    assert untried


def test_what_the_recipe_asks_for_by_other_keys_is_kept(
    sums: dict[str, Any], tmp_path: Path
) -> None:
    values = {**sums, "checkpoint_every": 4}
    seen: list[Plan] = []
    fake = race({}, steady(0.02, 1))

    def measured(subject: Any, plans: Mapping[str, Plan], *rest: Any, **more: Any) -> Measured:
        seen.extend(plans.values())
        return fake(subject, plans, *rest, **more)

    found = chosen(values, tmp_path, measured)
    assert {"checkpoints": {"interval": 4}} in found.entries
    assert not any(Slot.CHECKPOINT in plan for plan in seen)  # it isn't raced


def test_every_candidate_has_its_reason(sums: dict[str, Any], tmp_path: Path) -> None:
    found = chosen(sums, tmp_path, race({}, steady(0.02, 1)))
    about = " ".join(row.name for row in found.rows)
    for name in ("packed", "compiled", "float8", "half", "experts_implementation"):
        assert name in about
    assert all(row.why and row.decision for row in found.rows)
    assert PLAIN not in found.entries


def test_only_the_allowed_fidelity_is_a_candidate(sums: dict[str, Any]) -> None:
    recipe = recipe_from(dict(sums), "a test")
    known = build.context_of(recipe)
    for fidelity, allowed in (
        ("exact", {Fidelity.EXACT}),
        ("rounding", {Fidelity.EXACT, Fidelity.ROUNDING}),
        ("lossy", set(Fidelity)),
    ):
        taken = [c for c in candidates(recipe, known, fidelity) if not c.refused]
        assert {c.technique.fidelity for c in taken} <= allowed
    assert any(c.technique.fidelity is Fidelity.LOSSY for c in taken)


@pytest.mark.parametrize(
    ("name", "capability", "bf16"), [("NVIDIA H100 80GB HBM3", "9.0", True), ("T4", "7.5", False)]
)
def test_the_same_code_chooses_on_a_gpu(
    sums: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: str,
    bf16: bool,
) -> None:
    """The device is simulated, and the race is drawn."""
    here = facts.seen_at_start()
    gpus = (Accelerator(name, 16 * 10**9, capability),)
    hardware = dataclasses.replace(here.hardware, accelerators=gpus)
    simulated = dataclasses.replace(here, device="cuda:0", hardware=hardware)
    monkeypatch.setattr(facts, "seen_at_start", lambda: simulated)
    monkeypatch.setattr(build, "check_kernels", lambda known, tell: [])  # it has no kernels
    speeds = {"bf16_master_weights": 2.0, "fused_adamw": 1.1, "labelled_token_loss": 1.2}
    found = chosen({**sums, "device": "auto"}, tmp_path, race(speeds, steady(0.02, 1)))
    assert ("bf16_master_weights" in found.entries) == bf16
    assert "labelled_token_loss" in found.entries
    reasons = {row.name: row.why for row in found.rows if row.decision == "left out"}
    assert "fused_adamw" in found.entries
    assert bf16 or "no bf16 units" in reasons["bf16_master_weights"]


def test_plans_that_memory_does_not_hold_are_not_raced(
    sums: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory_check.needs_of

    def needs_of(size: Any, known: Any, plan: Plan, slots: int) -> Any:
        found = real(size, known, plan, slots)
        large = any(t.name() == "prefetched" for t in plan)
        return dataclasses.replace(found, activations=1e15) if large else found

    monkeypatch.setattr(memory_check, "needs_of", needs_of)
    found = chosen(sums, tmp_path, race({"prefetched": 9.0}, steady(0.02, 1)))
    assert "prefetched" not in found.entries
    (row,) = [row for row in found.rows if row.name == "with prefetched"]
    assert row.why == "memory would run out"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"plan": {"auto": {"fidelity": "bitwise"}}},
            "a test: plan: auto: fidelity is 'bitwise'; it is exact, rounding or lossy$",
        ),
        ({"plan": {"auto": {"fidelity": ["exact"]}}}, r"fidelity is \['exact'\] .did you mean"),
        (
            {"plan": {"auto": {"fidelty": "exact"}}},
            "unknown key 'fidelty' .did you mean 'fidelity'",
        ),
        ({"plan": {"auto": "lossy"}}, "plan: auto: 'lossy' isn't a setting; write plan: auto,"),
        ({"plan": "atuo"}, "no plan is called 'atuo' .did you mean 'auto'"),
        ({"auto_budget": True}, "auto_budget: write 90s, 20m or 1h30m"),
        ({"auto_budget": "-3m"}, "auto_budget: can't read '-3m'"),
        ({"auto_budget": -1}, "auto_budget.*greater than 0"),
        ({"auto_budget": "soon"}, "auto_budget: can't read 'soon'; write 90s, 20m or 1h30m"),
        ({"plan": ["auto", "packed"]}, "plan: auto chooses all techniques by itself"),
        ({"plan": {"auto": {}, "packed": {}}}, "plan: auto chooses all techniques by itself"),
    ],
)
def test_a_wrong_wish_is_refused_in_a_sentence(
    sums: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as told:
        recipe_from({**sums, **change}, "a test")
    assert "\n" not in str(told.value)


def test_live_tuning_and_a_chosen_plan_may_both_be_on(sums: dict[str, Any]) -> None:
    recipe = recipe_from({**sums, "live_tuning": True}, "a test")
    assert recipe.live_tuning
    assert recipe.auto_plan is not None
    again = Recipe(**recipe.model_dump())
    assert again == recipe
