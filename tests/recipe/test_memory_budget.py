"""What a rank will need is told before it starts, is right, and is refused where it can't fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.plan import Plan
from hasten.core.setup import Setup, prepare
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.models.memory import ModelSize, activation_bytes, state_bytes
from hasten.recipe import memory_check
from hasten.recipe.memory_check import MemoryRanOutError, advising, settle_memory
from hasten.recipe.schema import Recipe
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from memory_rank_jobs import ON_RANKS, both, on_ranks_too
from ranks import on_ranks
from tiny import examples, job_context, language_job

PLANS: tuple[tuple[Technique, ...], ...] = (
    (),
    (BF16MasterWeights(),),
    (FusedAdamW(),),
    (BF16MasterWeights(), CompactAdamW(moments="int8")),
    (Muon(), LabelledTokenLoss()),
    (ActivationCheckpointing(),),
)


@pytest.mark.parametrize(
    ("plan", "architecture"),
    [*((plan, "llama") for plan in PLANS), *((plan, "deepseek_v3") for plan in PLANS[:2])],
    ids=lambda value: value if isinstance(value, str) else str(Plan(value)),
)
def test_weights_gradients_and_optimizer_are_what_was_estimated(
    plan: tuple[Technique, ...], architecture: str
) -> None:
    found = both(architecture, plan)
    assert 0.9 < found["state"] < 1.1
    # counts the block at work too, which the meter doesn't
    if plan != (ActivationCheckpointing(),):
        assert 0.5 < found["activations"] < 1.5


@pytest.mark.parametrize("plan", [(), (CompactAdamW(),)], ids=lambda plan: str(Plan(plan)))
def test_so_they_are_with_weights_in_half_a_format(plan: tuple[Technique, ...]) -> None:
    found = both("llama", plan, dtype=torch.bfloat16)
    assert 0.9 < found["state"] < 1.1
    assert 0.5 < found["activations"] < 1.5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(on_ranks_too, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("layout", ON_RANKS)
def test_so_it_is_on_each_of_two_ranks(ranks: list[Any], layout: str) -> None:
    for rank in ranks:
        assert 0.9 < rank[layout]["state"] < 1.1


def test_shards_take_half_on_two_ranks(ranks: list[Any]) -> None:
    assert ranks[0]["fsdp2"]["bytes"] < 0.55 * ranks[0]["ddp"]["bytes"]


@pytest.fixture(autouse=True)
def nothing_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own process is larger than one that only trains."""
    monkeypatch.setattr(memory_check, "resident_bytes", lambda: 0)
    monkeypatch.setattr(memory_check, "host_room", lambda known, resident: 64e9)


def setup_of(plan: Plan | None = None) -> Setup:
    job = language_job(data=examples(8))
    context = job_context(job)
    context = replace(context, model=replace(context.model, parameters=10**9))
    return prepare(job, plan or Plan(), context)


RECIPE = Recipe(model="deepseek-llm-tiny", dataset="stdlib", max_steps=1, from_scratch=True)


def test_the_needs_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "room_of", lambda known: 64e9)
    said: list[str] = []
    settle_memory(RECIPE, setup_of(), said.append)
    assert len(said) == 1
    assert "16.0 GB weights, gradients and optimizer" in said[0]
    assert "of 64.0 GB on cpu" in said[0]


@pytest.mark.usefixtures("published_presets")
def test_what_can_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "room_of", lambda known: 13e9)
    with pytest.raises(InputError, match=r"take 16.0 GB on each rank.*cpu has 13.0 GB") as error:
        settle_memory(RECIPE, setup_of(), lambda text: None)
    assert "with compact_adamw in the plan it would be about 12.9 GB" in str(error.value)


@pytest.mark.parametrize(
    ("room", "advice"),
    [
        (5e9, "finetuning_type: lora would need about "),
        (2e9, "finetuning_type: lora and lora_base: int8 would need about "),
        (1e9, "more ranks with fsdp2"),
    ],
)
def test_beyond_the_plan_lora_is_advised_and_then_ranks(
    monkeypatch: pytest.MonkeyPatch, room: float, advice: str
) -> None:
    """A billion weights: 4 GB in float32, 1 GB in int8, and no moments that an optimizer saves."""
    monkeypatch.setattr(memory_check, "room_of", lambda known: room)
    with pytest.raises(InputError) as error:
        settle_memory(RECIPE, setup_of(Plan([CompactAdamW()])), lambda text: None)
    assert advice in str(error.value)
    assert "compact_adamw" not in str(error.value)


def test_lora_keeps_the_base_without_gradients_and_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_check, "room_of", lambda known: 64e9)
    lora = RECIPE.model_copy(update={"finetuning_type": "lora"})
    said: list[str] = []
    settle_memory(lora, setup_of(), said.append)
    assert "4.0 GB weights, gradients and optimizer" in said[0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_memory_that_runs_out_all_the_same_ends_with_advice(error: Exception) -> None:
    with pytest.raises(MemoryRanOutError, match=r"memory ran out .*; take lora"):  # noqa: SIM117
        with advising("take lora"):
            raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), advising("take lora"):
        raise RuntimeError("shapes differ")


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    context = job_context(language_job())
    room = memory_check.room_of(context)
    assert room > 1e8
    monkeypatch.setattr(memory_check, "ranks_here", lambda world: 4)
    assert memory_check.room_of(context) == room / 4


@given(st.integers(0, 10**12), st.floats(-10, 10), st.floats(0, 1), st.integers(1, 64))
def test_state_is_never_below_nothing_and_falls_with_what_is_dealt_out(
    count: int, more: float, share: float, ranks: int
) -> None:
    dealt = 16.0 * count * (1 - 1 / ranks)
    found = state_bytes(count, more * count, dealt)
    assert 0 <= found <= max(state_bytes(count, more * count), 0.0) + 1
    assert found == pytest.approx((16 + more) * count / ranks, rel=1e-9, abs=1e-3)


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_recomputing_never_keeps_more_than_a_block_beyond_everything(
    slots: int, share: float
) -> None:
    size = ModelSize(10**9, 1e9, 2048, 24, 32_000)
    whole = activation_bytes(size, slots)
    assert activation_bytes(size, slots, recomputed=share) <= whole * (1 + 1 / 24) + 1
    assert activation_bytes(size, slots, recomputed=1.0) <= whole / 4 + 1
