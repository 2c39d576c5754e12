"""Products of stages, shards, split layers and experts come to what one process comes to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.core.layout import NoCompression
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed import expert_parallel as experts
from hasten.parts.distributed.fsdp import Sharding
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.compress import Half
from hasten.techniques.layout import parallel
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.parallel import LayoutOptions, ParallelLayout, routed
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from pipeline_rank_jobs import language_model
from ranks import once_on_ranks
from techniques.sharded_rank_jobs import Case, check_same, even_examples, outcome
from tiny import job_context, language_job
from told import refusal

TWO = GradientAccumulation(micro_batch_size=2)
BALANCED = BalancedRouting(speed=0.01, sequence_loss=0.05)
SHARDS, CUT = Hybrid(pp=2, shard=2), Hybrid(pp=2, tp=2)
EXPERTS = Hybrid(shard=4, ep=2)
DEEP = partial(language_model, "deepseek_v3", layers=4)  # both stages have experts
CASES: dict[str, Case] = {
    "stages of shards": Case(SHARDS, (TWO,)),
    "stages of shards, tied, recomputed": Case(
        SHARDS, (ActivationCheckpointing(), LabelledTokenLoss(chunk=16)), tied=True
    ),
    "stages of shards, experts": Case(SHARDS, (BALANCED,), "deepseek_v3"),
    "stages of cut layers": Case(CUT, (TWO,), "qwen2", data=even_examples),
    "stages of cut layers, tied": Case(CUT, (LabelledTokenLoss(chunk=16),), tied=True),
    "stages of cut layers, experts": Case(
        CUT, (BALANCED, ActivationCheckpointing()), "deepseek_v3"
    ),
    "experts beside shards": Case(EXPERTS, (BALANCED, TWO), "deepseek_v3"),
    "experts beside shards, whole gradients": Case(
        Hybrid(shard=4, ep=4, whole_gradients=True, reshard=False), (TWO,), "deepseek_v2"
    ),
    "experts beside copies of shards": Case(
        Hybrid(dp=2, shard=2, ep=2),
        (ActivationCheckpointing(), FusedAdamW()),
        "deepseek_v3",
        torch.float32,
    ),
    "experts beside split layers": Case(
        Hybrid(dp=2, tp=2, ep=2), (BALANCED, TWO), "deepseek_v3", data=even_examples
    ),
    "experts in stages": Case(
        Hybrid(dp=2, pp=2, ep=2), (BALANCED, ActivationCheckpointing()), "deepseek_v3", model=DEEP
    ),
    "experts in stages of shards": Case(
        Hybrid(shard=2, pp=2, ep=2), (BALANCED,), "deepseek_v3", model=DEEP
    ),
    "experts beside shards of split layers": Case(
        Hybrid(shard=2, tp=2, ep=2), (TWO,), "deepseek_v3", data=even_examples
    ),
}
TO_THE_DIGIT = [name for name in CASES if name.startswith("experts in") or "split layers" in name]
# Each is made of two others.
LONG = (
    *("stages of shards", "stages of shards, experts"),
    "stages of cut layers, tied",
    *("stages of cut layers, experts", "experts beside shards, whole gradients"),
    *("experts in stages of shards", "experts beside shards of split layers"),
)
USUAL = [name for name in CASES if name not in LONG]
REFUSED: dict[str, tuple[Hybrid, tuple[Technique, ...]]] = {
    "masters of stages": (SHARDS, (BF16MasterWeights(),)),
    "masters beside experts": (EXPERTS, (BF16MasterWeights(),)),
    "a communication method between stages": (CUT, (Half(),)),
    "a communication method beside experts": (EXPERTS, (Half(),)),
    "activation_checkpointing's own choice": (EXPERTS, (ActivationCheckpointing(budget=0.5),)),
}


def on_four(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {name: outcome(CASES[name].session(world)) for name in USUAL}
    for name, (layout, others) in REFUSED.items():
        experts = "deepseek_v3" if layout.ep > 1 else "llama"
        found[name] = refusal(Case(layout, others, experts, torch.float32).session, world)
    return found


def on_four_long(world: World) -> dict[str, Any]:
    return {name: outcome(CASES[name].session(world)) for name in LONG}


# Routers and DeepSeek V2's rotary embedding compute in float32 whatever the model's format is.
CLOSE, CLOSE_EXPERTS = 1e-12, 1e-5


four = once_on_ranks(on_four, 4)
four_long = once_on_ranks(on_four_long, 4)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_further_products_come_to_what_one_process_comes_to(
    four_long: list[Any], name: str
) -> None:
    same(four_long, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_products_with_stages_and_experts_come_to_what_one_process_comes_to(
    four: list[Any], name: str
) -> None:
    same(four, name)


def same(four: list[Any], name: str) -> None:
    case: Case = CASES[name]
    alone, one, close = outcome(CASES[name].session(World())), four[0][name], CLOSE
    if "deepseek" in case.architecture:
        close = CLOSE_EXPERTS if case.dtype is torch.float64 else 1e-4
        close = 1e-7 if name in TO_THE_DIGIT else close
    check_same(one, alone, close)
    for other in four[1:]:
        assert other[name]["losses"] == one["losses"]
        assert other[name]["norms"] == one["norms"]
    seen = {"hybrid", "activation_checkpointing", "balanced_routing"} & set(one["proofs"])
    assert all(rank[name]["proofs"][technique] for rank in four for technique in seen)
    assert all(rank[name]["pieces"] < 0.8 * alone["pieces"] for rank in four), "each holds a part"


def test_what_does_not_go_together_is_refused_on_every_rank(four: list[Any]) -> None:
    for rank in four:
        for name in ("masters of stages", "masters beside experts"):
            assert "lets FSDP2 cast weights" in rank[name]
        for name in (
            "a communication method between stages",
            "a communication method beside experts",
        ):
            assert "leave the method's technique out" in rank[name]
        assert "leave budget out" in rank["activation_checkpointing's own choice"]
    assert set(REFUSED) <= set(four[0])


def test_experts_are_on_the_device_before_their_copies_are_made_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are sent over a link that carries the device's memory alone."""
    done: list[str] = []

    class Part:
        """A weight that says when it is moved."""

        data = property(lambda self: self, lambda self, moved: done.append("place"))
        requires_grad, device = False, "cpu"

        def to(self, device: str) -> Part:
            return self

    monkeypatch.setattr(parallel.fsdp, "shard", lambda *given: done.append("shard"))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "broadcast", lambda *given, **options: done.append("made alike"))
    monkeypatch.setattr(experts.SharedExperts, "parameters", lambda shared: [Part()])
    job = language_job()
    setup = prepare(job, Plan(()), job_context(job))
    setup.context = job_context(job, world=World(size=4))
    layout: Any = ParallelLayout(setup, LayoutOptions("", MeshSizes(shard=4, ep=2), Sharding()))
    mesh: Any = SimpleNamespace(get_group=lambda axis: None)
    layout.shared = experts.SharedExperts({}, mesh, experts.TokenTraffic())
    monkeypatch.setattr(parallel, "data_mesh", lambda *given: None)
    monkeypatch.setattr(MeshSizes, "build", lambda *given: None)
    layout.apply_data_parallel(torch.nn.Module(), torch.device("cpu"), NoCompression())
    assert done == ["shard", "place", "made alike"]


def test_a_product_takes_the_memory_of_a_piece_of_a_stage() -> None:
    context = job_context(language_job(), world=World(size=4))
    whole = 16 * context.model.parameters
    assert Hybrid(pp=2, shard=2).forecast(context).resident_bytes == pytest.approx(-0.75 * whole)
    assert Hybrid(pp=2, dp=2).forecast(context).resident_bytes == pytest.approx(-0.5 * whole)


def test_experts_and_what_lies_beside_them_are_counted_each_by_its_own_cut() -> None:
    """Tensor parallelism cuts no routed expert, and shards beside experts hold no expert."""
    known = job_context(language_job(), "deepseek_v3", World(size=4))
    facts = replace(known, model=replace(known.model, parameters=10**9))
    experts = routed(facts)
    rest = 10**9 - experts
    assert experts == 10**9 - 2 * 97 * 32 - 4 * 2 * 32**2
    for layout, gone in (
        (ExpertParallel(), 0.75 * experts),
        (ExpertParallel(size=2), 0.5 * experts),
        (Hybrid(dp=4, ep=2), 0.5 * experts),
        (Hybrid(shard=4, ep=2), 0.5 * experts + 0.75 * rest),
        (TensorParallel(), 0.75 * rest),
        (Hybrid(shard=2, tp=2), 0.5 * experts + 0.75 * rest),
    ):
        assert layout.forecast(facts).resident_bytes == pytest.approx(-16 * gone, rel=1e-9)
    assert ExpertParallel(size=2).forecast(replace(facts, world=World())).resident_bytes == 0
    assert routed(job_context(language_job())) == 0
