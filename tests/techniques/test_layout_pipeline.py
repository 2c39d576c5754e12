"""Pipelines on ranks come to what one process comes to, and refuse what they can't do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hasten.core.job import Job, Stop
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.slot import Slot
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.models.save import save_model
from hasten.models.weight_files import weight_source
from hasten.parts.distributed.pipeline.runtime import PipelineSettings
from hasten.parts.distributed.pipeline.stages import MARK
from hasten.parts.nn.losses import TokenAccuracy
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, Quantised
from hasten.techniques.communication.local import LocalSteps
from hasten.techniques.compile import Compiled
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.parallel import ParallelLayout
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.pipeline_stages import check_communication, check_company
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import Autocast, BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from pipeline_rank_jobs import language_model
from ranks import on_ranks
from tiny import examples, job_context, language_job, run, session_of
from whole import whole_weights

Case = tuple[str, bool, tuple[Technique, ...], dict[str, Any]]  # model, tied, plan, of the pipeline
PACKED = (
    Packed(),
    DocumentAttention(),
    LabelledTokenLoss(chunk=16),
    GradientAccumulation(micro_batch_size=3),
)
BALANCED = BalancedRouting(speed=0.01, sequence_loss=0.05)
CASES: dict[str, Case] = {
    "plain": ("llama", False, (), {"schedule": "gpipe"}),
    "tied, accumulated": (
        *("qwen2", True, (GradientAccumulation(micro_batch_size=3),)),
        {"micro_batch_size": 2, "checkpoint": "always"},
    ),
    "packed, label-only": (
        *("llama", True, PACKED),
        {"micro_batch_size": 0, "schedule": "zero_bubble"},
    ),
    "experts": ("deepseek_v3", False, (), {"schedule": "zbv"}),
    "experts, interleaved": ("deepseek_v2", False, (), {"schedule": "interleaved"}),
    "both ways": ("llama", True, (), {"schedule": "dualpipev"}),
    "bf16 masters": ("llama", True, (BF16MasterWeights(),), {}),
    "autocast": ("llama", False, (Autocast(),), {"schedule": "zero_bubble"}),
    "experts, balanced": (
        *(
            "deepseek_v3",
            False,
            (BALANCED, ActivationCheckpointing(), GradientAccumulation(micro_batch_size=3)),
        ),
        {"micro_batch_size": 2},
    ),
    "experts, balanced, packed": (
        *("deepseek_v3", False, (BALANCED, *PACKED)),
        {"micro_batch_size": 0, "schedule": "zbv"},
    ),
    "experts, a loss on sequences": (
        *("deepseek_v2", False, (BalancedRouting(speed=0.0, sequence_loss=0.3),)),
        {"schedule": "zero_bubble", "micro_batch_size": 2},
    ),
    "recomputed": (
        "llama",
        True,
        (ActivationCheckpointing(budget=0.5),),
        {"schedule": "interleaved"},
    ),
    # The first weights of later stages are adapters, in another format than hidden states.
    "adapters on bytes": ("llama", False, (LoRA(rank=4, base="int8"),), {}),
    "half a communication": ("llama", True, (Half(check_every=1),), {}),
    "bytes over the network": (
        *("qwen2", False, (Quantised(check_every=1), BF16MasterWeights())),
        {"schedule": "1f1b"},
    ),
}

# between copies of stages, which two ranks don't have
COMMUNICATIONS = ("half a communication", "bytes over the network")
# Each is made of two others; tests/parts/distributed/test_pipeline.py has every schedule on ranks.
LONG = (
    *("plain", "experts", "experts, interleaved", "experts, a loss on sequences"),
    *("experts, balanced, packed", "autocast"),
)
ON_TWO = tuple(case for case in CASES if case not in (*COMMUNICATIONS, *LONG))
TWO_PIPELINES = ("tied, accumulated", "experts, balanced", "half a communication")
# How far rounding to 8 bits of mantissa, or to 8 bits, takes losses and weights.
ROUGH = {
    "bf16 masters": 1e-2,
    "autocast": 1e-2,
    "adapters on bytes": 1e-2,
    "half a communication": 1e-2,
    "bytes over the network": 3e-2,
}


def job(case: str) -> Job:
    """Five examples in fours: a step has four examples or one, fewer than micro-batches are wanted.

    The largest norm is one that acts. Gradients are compressed from the third step on.
    """
    architecture, tied, *_ = CASES[case]
    dtype = torch.float32 if case in ROUGH else torch.float64
    if "adapters" in case:
        dtype = torch.bfloat16
    return language_job(
        lambda: language_model(architecture, tied).to(dtype),
        data=examples(5),
        batch=4,
        stop=Stop(steps=3 if case in COMMUNICATIONS else 2),
        max_grad_norm=0.5,
        optimizer=torch.optim.SGD,
        lr=0.3,
        metrics={"accuracy": TokenAccuracy()},
    )


def session_on(world: World, case: str) -> Session:
    architecture, _, plan, settings = CASES[case]
    if world.size > 1:
        plan = (*plan, Pipeline(stages=2, **settings))
    else:
        plan = tuple(t for t in plan if t.slot is not Slot.COMMUNICATION)
    made = job(case)
    return session_of(made, *plan, architecture=architecture, world=world)


def result(session: Session) -> dict[str, Any]:
    """All that must not depend on the layout."""
    steps = list(training(session))
    found = evaluate(session)
    model: Any = session.finish()
    weights = {n: t.double() for n, t in whole_weights(session).items()}  # and routers' biases
    return {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "trained": [m.trained_tokens for m in steps],
        "load_ratios": [m.expert_load_ratio or 0.0 for m in steps],
        "eval_data": found.eval_loss,
        "metrics": found.metrics,
        "weights": weights,
        "left": sum(p.numel() for p in model.parameters()),
    }


def on_two(world: World) -> dict[str, Any]:
    return train_here(world, ON_TWO)


def on_two_long(world: World) -> dict[str, Any]:
    return train_here(world, LONG)


def on_four(world: World) -> dict[str, Any]:
    """Two pipelines side by side."""
    return train_here(world, TWO_PIPELINES)


def on_four_long(world: World) -> dict[str, Any]:
    return train_here(world, COMMUNICATIONS[1:])


def train_here(world: World, cases: Iterable[str]) -> dict[str, Any]:
    """Some cases, with the folder in which the ranks of this test meet."""
    folder = str(Path(os.environ["HASTEN_RENDEZVOUS"]).parent)
    return {**train_all(world, folder, cases), "folder": folder}


def train_all(world: World, folder: str, cases: Iterable[str] = CASES) -> dict[str, Any]:
    """Every case on these ranks; the first of them keeps the weights in a file."""
    found = {}
    for case in cases:
        session = session_on(world, case)
        result_of = result(session)
        if world.is_main:
            torch.save(result_of["weights"], Path(folder) / f"{case}.pt")
            if case == "tied, accumulated":
                _saved(session, Path(folder) / "saved")
        elif case == "tied, accumulated":
            _saved(session, None)
        proof = Pipeline().check_effect(session)
        proofs = {t.name(): t.check_effect(session) for t in session.setup.plan}
        found[case] = {
            **{k: v for k, v in result_of.items() if k != "weights"},
            "effective": proof.effective,
            "evidence": proof.evidence,
            "others": {name: [p.effective, p.evidence] for name, p in proofs.items()},
        }
    return found


def _saved(session: Session, folder: Path | None) -> None:
    source = weight_source(session.setup.layout)
    save_model(session.model, None, folder or Path(), source=source, is_first=folder is not None)  # type: ignore[arg-type]


def loaded(folder: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder)


def in_one_process(*cases: str) -> Any:
    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("one")
        return with_weights(train_all(World(), str(folder), cases), folder)

    return found


def on_several(job: Callable[[World], Any], world: int) -> Any:
    @pytest.fixture(scope="module")
    def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        first, *others = on_ranks(job, tmp_path_factory.mktemp(job.__name__), world)
        return [with_weights(first, Path(first["folder"])), *others]

    return found


one, one_long = in_one_process(*ON_TWO, COMMUNICATIONS[0]), in_one_process(*LONG, COMMUNICATIONS[1])
two, two_long = on_several(on_two, 2), on_several(on_two_long, 2)
four, four_long = on_several(on_four, 4), on_several(on_four_long, 4)


def with_weights(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    for case in set(found) - {"folder"}:
        found[case]["weights"] = torch.load(folder / f"{case}.pt")
    return {**found, "folder": str(folder)}


SEEN_ON_EVERY_RANK = ("activation_checkpointing", "balanced_routing", "half", "quantised")
ALL = [
    *(("one", "two", case) for case in ON_TWO),
    *(("one", "four", case) for case in TWO_PIPELINES),
    *(pytest.param("one_long", "two_long", case, marks=pytest.mark.long) for case in LONG),
    pytest.param("one_long", "four_long", COMMUNICATIONS[1], marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "world", "case"), ALL)
def test_losses_norms_and_weights_are_those_of_one_process(
    request: pytest.FixtureRequest, reference: str, world: str, case: str
) -> None:
    alone, ranks = request.getfixturevalue(reference)[case], request.getfixturevalue(world)
    near = ROUGH.get(case, 1e-6 if "expert" in case else 1e-12)
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(alone["losses"], rel=near)
        assert rank[case]["norms"] == pytest.approx(alone["norms"], rel=near)
        assert rank[case]["eval_data"] == pytest.approx(alone["eval_data"], rel=near)
        assert rank[case]["trained"] == alone["trained"]
        assert rank[case]["load_ratios"] == pytest.approx(alone["load_ratios"])
    assert min(alone["norms"]) > (0.01 if "adapters" in case else 0.5)  # so that clipping effective
    weights = ranks[0][case]["weights"]
    assert list(weights) == list(alone["weights"])
    for name, there in alone["weights"].items():
        torch.testing.assert_close(weights[name], there, rtol=near, atol=near)


@pytest.mark.parametrize(("reference", "world", "case"), ALL)
def test_metrics_are_those_of_one_process_and_a_rank_keeps_its_part_alone(
    request: pytest.FixtureRequest, reference: str, world: str, case: str
) -> None:
    alone, ranks = request.getfixturevalue(reference)[case], request.getfixturevalue(world)
    for rank in ranks:  # what came for saving has gone again
        assert rank[case]["metrics"] == pytest.approx(alone["metrics"], rel=1e-2)
        assert rank[case]["left"] < 0.8 * alone["left"]
        assert rank[case]["effective"], rank[case]["evidence"]
        for name, (effective, evidence) in rank[case]["others"].items():
            assert effective or name not in SEEN_ON_EVERY_RANK, (name, evidence)
    assert not alone["effective"]


def test_what_is_saved_is_the_same_hugging_face_folder(
    one: dict[str, Any], two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    folders = [Path(found["folder"]) / "saved" for found in (one, two[0], four[0])]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] == names[2]
    first, *others = (loaded(folder).state_dict() for folder in folders)
    for other in others:
        assert list(other) == list(first)
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-7)


def test_on_one_rank_it_is_one_process() -> None:
    session = session_of(language_job(steps=1), Pipeline())
    run(session)
    assert not Pipeline().check_effect(session).effective


@pytest.mark.parametrize("trained", [True, False])
def test_a_tied_head_is_told_from_a_matrix_of_its_shape(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Linear(4, 9, bias=False))
    end = model[1].weight.requires_grad_(trained)
    setattr(end, MARK, True)
    masters = MasterWeights()
    masters.prepare(model)
    masters.attach_optimizer(torch.optim.SGD(p for p in model.parameters() if p.requires_grad))
    layout: Any = object.__new__(ParallelLayout)
    layout.weights = None
    found = layout.carrier(masters.parameters())
    assert found is (masters.parameters()[1] if trained else None)


@pytest.mark.parametrize(
    ("other", "settings", "said"),
    [
        (Compiled(share=1.0), {}, "compiles a whole model's blocks"),
        (AdaptiveBatch(), {}, "no rank can run its passes again"),
        (ActivationCheckpointing(), {"checkpoint": "always"}, "give one of the two"),
        (ActivationCheckpointing(segments=2), {}, "leave segments out"),
        (ActivationCheckpointing(), {"schedule": "zbv"}, "take the schedule 1f1b"),
    ],
)
def test_techniques_that_reach_into_passes_are_refused_by_name(
    other: Technique, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    job = language_job()
    setup = prepare(job, Plan([other]), job_context(job), tmp_path)
    with pytest.raises(InputError, match=f"{other.name()} doesn't work under pipeline.*{said}"):
        check_company(setup, PipelineSettings(**{"schedule": "1f1b", "ranks": 2, **settings}))


def test_a_loss_that_holds_no_language_model_is_refused_with_advice() -> None:
    job = language_job()
    setup = prepare(job, Plan([]), job_context(job))
    setup.context = job_context(job, world=World(0, 0, 2))
    Pipeline().apply(setup)
    with pytest.raises(InputError, match=r"Linear isn't a loss around .*take ddp or fsdp2"):
        setup.layout.apply_model_parallel(nn.Linear(2, 2))


def communication_of(technique: Technique) -> Any:
    job = language_job()
    return prepare(
        job, Plan([technique, DDP()]), job_context(job, world=World(0, 0, 4))
    ).communication


@pytest.mark.parametrize(
    ("technique", "pipelines", "said"),
    [
        (Half(), 1, "half has nothing to compress in a single pipeline"),
        (Quantised(scope="hosts"), 2, "set scope to all"),
        (LocalSteps(), 2, "take half, quantised, topk or powersgd"),
    ],
)
def test_a_wire_that_cannot_carry_copies_of_stages_is_refused(
    technique: Technique, pipelines: int, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_communication(communication_of(technique), pipelines)


def test_ranks_left_over_are_refused() -> None:
    job = language_job()
    odd = prepare(job, Plan([]), job_context(job))
    odd.context = job_context(job, world=World(0, 0, 3))
    with pytest.raises(InputError, match="pp 2 is 2 ranks and 3 are running; change the sizes"):
        Pipeline(stages=2).apply(odd)
