"""Steps on a GPU that isn't there: budgets of syncs and launches, and a node's ranks.

The toy recipes and a node of two GPUs are traced by one process, which imports once. Other layouts
on nodes of eight, and whole models with other optimizers, have the mark ``long``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import warm
from gpu_simulation import __main__ as command
from gpu_simulation.request import RankTrace, SimulatedTrace, traces
from hasten.errors import InputError
from hasten.recipe.schema import Recipe
from simulated_recipes import (
    LAYOUTS,
    MASTERS,
    TOY_EXPERTS,
    WHOLE_MODELS,
    WholeModel,
    toy,
)

pytestmark = [
    pytest.mark.cold,
    pytest.mark.slow,  # most of it imports and starts of ranks
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]
RANKS = 2
VALUES_A_LAUNCH = 20e6  # of the optimizer
OPTIMIZER = 14  # its launches in a step of the toy that is trained in full
STATE_BYTES = 2 + 4 + 8  # of a weight: in bf16, its master in float32, two moments
LORA = {"finetuning_type": "lora", "lora_targets": "all-linear", "from_scratch": False}
TOYS = {
    "full": {},
    "lora": LORA,
    "smaller": {"layers": 1, "passes": 1},
    "experts": {"config": TOY_EXPERTS, "plan": (*MASTERS, "experts_implementation")},
}
# Launches of a toy's step per layer and pass: bound, as they are today.
LAUNCHES = {"full": 107, "lora": 158, "experts": 163}
SYNCS, BLOCKING = 1, 0  # of one rank's step, and how many of them are copies to the device


def traced(recipes: Mapping[str, Recipe]) -> dict[str, SimulatedTrace | InputError]:
    """By name; in the place of what can't be traced, the reason."""
    with warm.cold():
        found = traces(list(recipes.values()), "h100")
    return dict(zip(recipes, found, strict=True))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimulatedTrace | InputError]:
    folder = tmp_path_factory.mktemp("paper")
    recipes = {name: toy(folder / name, **keys) for name, keys in TOYS.items()}
    recipes["ddp"] = toy(folder / "ddp", nproc=RANKS, layers=1, passes=1, plan=["packed", "ddp"])
    recipes["refused"] = toy(folder / "refused", plan=[{"tensor_parallel": {"size": 2}}])
    return traced(recipes)


@pytest.fixture
def steps(answers: dict[str, SimulatedTrace | InputError]) -> dict[str, SimulatedTrace]:
    return {name: one for name, one in answers.items() if isinstance(one, SimulatedTrace)}


def step(steps: Mapping[str, SimulatedTrace], name: str) -> RankTrace:
    return steps[name].ranks[0]


def blocking(rank: RankTrace) -> float:
    return sum(n for where, n in rank.by_name("syncs").items() if "from the host" in where)


@pytest.mark.parametrize("name", [*TOYS, "ddp"])
def test_nothing_waits_for_the_device_inside_a_pass(
    steps: dict[str, SimulatedTrace], name: str
) -> None:
    for rank in steps[name].ranks:
        assert rank.by_name("syncs", "forward", "backward") == {}


@pytest.mark.parametrize("name", TOYS)
def test_a_step_of_one_rank_waits_no_more_often_than_it_may(
    steps: dict[str, SimulatedTrace], name: str
) -> None:
    rank = step(steps, name)
    assert rank.total("syncs") <= SYNCS, rank.by_name("syncs")
    assert blocking(rank) <= BLOCKING, rank.by_name("syncs")


def test_waits_do_not_grow_with_layers_passes_or_parameters(
    steps: dict[str, SimulatedTrace],
) -> None:
    few, many = step(steps, "smaller"), step(steps, "full")
    assert (many.layers, many.passes) > (few.layers, few.passes)
    assert many.by_name("syncs") == few.by_name("syncs")


def test_the_optimizer_launches_once_for_twenty_million_values(
    steps: dict[str, SimulatedTrace],
) -> None:
    few, many = step(steps, "smaller"), step(steps, "full")
    few_launches = few.total("launches", "optimizer")
    more_values = (many.total("between_steps") - few.total("between_steps")) / STATE_BYTES
    assert more_values > 0
    more = math.ceil(more_values / VALUES_A_LAUNCH)
    assert many.total("launches", "optimizer") <= min(few_launches + more, OPTIMIZER)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_and_pass_launches_no_more_than_it_may(
    steps: dict[str, SimulatedTrace], name: str
) -> None:
    rank = step(steps, name)
    assert rank.total("launches") / rank.layers / rank.passes <= LAUNCHES[name]


def test_fused_experts_move_each_row_once(steps: dict[str, SimulatedTrace]) -> None:
    rank = step(steps, "experts")
    launches = {name: n for name, n in rank.by_name("launches").items() if "expert" in name}
    layers = (rank.layers - 1) * rank.passes  # the first layer has no experts
    assert launches == {
        "expert_spread": 3 * layers,  # tokens, their gradients, and tokens for the weights'
        "expert_gate": layers,
        "expert_combine": 2 * layers,
        "expert_gate_backward": layers,
    }


def test_what_a_step_takes_is_counted(steps: dict[str, SimulatedTrace]) -> None:
    """Against counts by hand: weights, tokens, products, and what a GPU can't do without."""
    rank = step(steps, "full")
    hidden, between, vocabulary, layers, tokens = 64, 128, 500, 2, 2 * 2 * 48
    weights = 2 * vocabulary * hidden + layers * (
        hidden * (2 * hidden + 2 * 32) + 3 * hidden * between + 2 * hidden
    )
    weights += hidden
    assert rank.total("tokens") == tokens
    # Weights, masters and moments stay between steps; little else does.
    state = STATE_BYTES * weights
    assert state <= rank.total("between_steps") <= 1.1 * state
    assert rank.peak_bytes > rank.total("between_steps")
    # Products of a token: forward, and twice as many backward (but none for the embedding).
    products = weights - vocabulary * hidden - (2 * layers + 1) * hidden
    counted = rank.by_name("flops")["mm"]
    assert 3 * 2 * products * tokens * 0.8 <= counted <= 4 * 2 * products * tokens
    attention = "_scaled_dot_product_flash_attention"  # the documents have one length
    assert rank.by_name("launches")[attention] == layers * rank.passes
    assert rank.device_seconds > 0 < rank.host_seconds


def every_rank_is_its_own(
    found: SimulatedTrace, syncs: int, exchanges: bool = True, ranks: int = RANKS
) -> None:
    assert len(found.ranks) == ranks
    for number, rank in enumerate(found.ranks):
        own = f"cuda:{number}"
        assert (rank.device, rank.current_device) == (own, own)
        assert rank.meeting["current_device"] == own, "set_device comes before the meeting"
        assert rank.meeting["device_id"] == own
        assert "cpu:gloo" in rank.meeting["backend"], "what lies on the host needs no GPU"
        assert list(rank.tensors_on) == [own]
        left_from = {device for _, device, _, _ in rank.messages}
        assert left_from <= {own, "cpu"}, rank.messages
        assert own in left_from or not exchanges
        assert rank.total("syncs") <= syncs, rank.by_name("syncs")


def test_a_rank_of_a_node_computes_and_sends_on_its_own_device(
    steps: dict[str, SimulatedTrace],
) -> None:
    every_rank_is_its_own(steps["ddp"], LAYOUTS["ddp"].bound)


def test_a_recipe_that_cannot_train_there_is_refused_in_one_sentence(
    answers: dict[str, SimulatedTrace | InputError],
) -> None:
    said = answers["refused"]
    assert isinstance(said, InputError)
    assert str(said).startswith("plan: tensor_parallel: ")
    assert "\n" not in str(said)


def test_the_command_prints_what_was_counted(
    answers: dict[str, SimulatedTrace | InputError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``python tools/gpu_simulation``, with the trace of a recipe in the place of a process."""
    asked: list[str] = []

    def traces_of(recipes: list[Recipe], device: str) -> list[SimulatedTrace | InputError]:
        asked.extend([device, *(recipe.model for recipe in recipes)])
        return [answers["full"]]

    monkeypatch.setattr(command, "traces", traces_of)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(toy(tmp_path / "model").to_yaml())
    command.main([str(recipe), "--device", "h200"])
    assert asked == ["h200", str(tmp_path / "model")]
    printed = capsys.readouterr().out
    first, *_, last = printed.strip().splitlines()
    assert "by simulation, h100" in first
    assert "counted without a GPU, nothing was measured" in first
    assert last.startswith("assumed: products at ")
    assert "TFLOP/s in bf16" in last
    assert "upper bound" in last
    for word in ("forward", "backward", "optimizer", "syncs", "peak", "scaled_dot_product"):
        assert word in printed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_communications_on_a_node_of_eight(name: str, tmp_path: Path) -> None:
    found = traced({name: LAYOUTS[name].recipe(tmp_path / name)})[name]
    assert isinstance(found, SimulatedTrace), found
    apart = name.endswith(("local_steps", "stream"))  # its ranks meet every few steps
    every_rank_is_its_own(found, LAYOUTS[name].bound, exchanges=not apart, ranks=8)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("whole", WHOLE_MODELS.values(), ids=WHOLE_MODELS)
def test_a_whole_model_keeps_its_budget(whole: WholeModel, tmp_path: Path) -> None:
    found = traced({"whole": whole.recipe(tmp_path / "model")})["whole"]
    assert isinstance(found, SimulatedTrace), found
    rank, bound = found.ranks[0], whole.bound
    assert rank.by_name("syncs", "forward", "backward") == {}
    assert rank.total("syncs") <= bound.syncs, rank.by_name("syncs")
    assert rank.total("launches") / rank.layers / rank.passes <= bound.launches
    assert rank.total("launches", "optimizer") <= bound.optimizer
    assert rank.total("bytes") / found.tokens / 1e6 <= bound.megabytes
    assert rank.peak_bytes / 1e9 <= bound.gigabytes
