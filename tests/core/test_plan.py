"""Plans, techniques and their settings as data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
import yaml

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Knob, Technique, knob, setting
from hasten.errors import InputError


@dataclasses.dataclass(frozen=True)
class Small(Technique):
    slot: ClassVar[Slot] = Slot.COMMUNICATION
    share: float = knob(0.05, "part that is kept", low=0.01, high=0.5, log=True)
    name_of_it: str = setting("x", "a name")
    fidelity = Fidelity.LOSSY

    def __post_init__(self) -> None:
        if self.share <= 0:
            raise ValueError(f"share is {self.share}; it must be above 0")

    def apply(self, setup: Any) -> None: ...

    def check_effect(self, session: Any) -> EffectCheck:
        return EffectCheck(True, "did it")


@dataclasses.dataclass(frozen=True)
class TwoLevels(Technique):
    slot: ClassVar[Slot] = Slot.COMMUNICATION
    between: Any = setting(None, "what travels between hosts")
    fidelity = Fidelity.LOSSY

    def apply(self, setup: Any) -> None: ...

    def check_effect(self, session: Any) -> EffectCheck:
        return EffectCheck(True, "did it")


@dataclasses.dataclass(frozen=True)
class FP8Loss(Small):  # only its name matters here
    slot: ClassVar[Slot] = Slot.LOSS


CATALOGUE = (Small, TwoLevels, FP8Loss)


def test_two_techniques_of_one_slot_are_refused_with_the_decision_they_share() -> None:
    with pytest.raises(InputError, match="what travels between ranks"):
        Plan([Small(), TwoLevels()])


def test_a_plan_lists_its_techniques_in_the_order_of_the_step() -> None:
    assert [t.slot for t in Plan([Small(), FP8Loss()])] == [Slot.LOSS, Slot.COMMUNICATION]


def test_names_are_the_class_names_in_snake_case() -> None:
    assert [t.name() for t in CATALOGUE] == ["small", "two_levels", "fp8_loss"]


@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump])
def test_a_plan_survives_json_and_yaml_with_nested_techniques(dump: Any) -> None:
    plan = Plan([TwoLevels(between=Small(share=0.1)), FP8Loss()])
    read = json.loads if dump is json.dumps else yaml.safe_load
    again = Plan.from_list(read(dump(plan.to_list())), CATALOGUE)
    assert again == plan
    assert again.key == plan.key
    assert hash(again) == hash(plan)


def test_the_key_changes_with_a_setting_and_not_with_the_order_given() -> None:
    one = Plan([Small(), FP8Loss()])
    assert one.key == Plan([FP8Loss(), Small()]).key
    assert one.key != Plan([Small(share=0.06), FP8Loss()]).key


def test_variants_are_nothing_each_alone_each_left_out_and_all() -> None:
    third = TwoLevels()
    plan = Plan([FP8Loss(), third])
    assert list(plan.variants()) == ["baseline", "only fp8_loss", "only two_levels", "all"]
    assert plan.variants()["only two_levels"] == Plan([third])
    assert list(Plan([third]).variants()) == ["baseline", "all"]


def test_the_ladder_adds_one_technique_at_a_time() -> None:
    plan = Plan([Small(), FP8Loss()])
    rungs = plan.cumulative()
    assert [len(rung) for rung in rungs.values()] == [0, 1, 2]
    assert list(rungs.values())[-1] == plan


def test_entries_are_names_or_settings_in_several_spellings() -> None:
    spellings = ["small", "Small", {"small": {"share": 0.05}}, {"technique": "small"}]
    assert {Plan.from_list([s], CATALOGUE) for s in spellings} == {Plan([Small()])}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("smal", "did you mean 'small'"),
        ("zzz", "no technique is called .zzz.; `hasten keys` lists them all$"),
        ({"small": {"shar": 0.1}}, "did you mean 'share'"),
        ({"small": {"share": "much"}}, "must be a float"),
        ({"small": {"share": True}}, "must be a float"),
        ({"small": {"share": -1}}, "must be above 0"),
        ({"small": 3}, "can't read"),
        (7, "can't read"),
        ({"small": {"share": 0.1}, "fp8_loss": {}}, "can't read"),
    ],
)
def test_what_is_wrong_in_a_plan_is_named(entry: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Plan.from_list([entry], CATALOGUE)


def test_knobs_are_the_fields_that_a_tuner_may_change() -> None:
    assert Small.knobs() == {"share": Knob((), 0.01, 0.5, True)}


def test_a_technique_prints_what_differs_from_its_defaults() -> None:
    assert str(Small()) == "small"
    assert str(Small(share=0.5)) == "small(share=0.5)"


def test_settings_can_not_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Small().share = 0.5  # type: ignore[misc]
