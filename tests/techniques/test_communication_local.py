"""Sessions whose ranks train apart: averages, other techniques, bad steps, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.core.job import Job, Stop
from hasten.core.loop import evaluate
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from ranks import once_on_ranks
from tiny import (
    examples,
    job_context,
    language_job,
    restore,
    run,
    session_of,
    state_of_all_ranks,
    tiny_model,
)
from told import refusal

APART = Stream(fragments=2)


def job(architecture: str = "llama", **changes: Any) -> Job:
    """Nine examples in fours: the last step of an epoch has one, fewer than there are ranks."""
    settings = {"data": examples(9), "batch": 4, "stop": Stop(epochs=2), "lr": 3e-3}
    return language_job(lambda: tiny_model(architecture), **{**settings, **changes})


def session_on(
    world: World, made: Job, *plan: Technique, architecture: str = "llama", folder: Any = None
) -> Session:
    return session_of(made, DDP(), *plan, architecture=architecture, folder=folder, world=world)


def weights(session: Session) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in session.model.parameters()])


def averaged(world: World) -> dict[str, Any]:
    """Plain SGD, averaged after every step and not, beside replicas that average gradients."""
    plans: dict[str, tuple[Technique, ...]] = {
        "ddp": (),
        "every step": (LocalSteps(every=1, codec="none"),),
        "accumulated": (
            LocalSteps(every=1, codec="none"),
            GradientAccumulation(micro_batch_size=1),
        ),
        "adaptive": (LocalSteps(every=1, codec="none"), AdaptiveBatch(initial_size=1)),
        "seldom": (LocalSteps(every=100, codec="none"),),
    }
    found: dict[str, Any] = {}
    for name, plan in plans.items():
        made = job(optimizer=torch.optim.SGD, max_grad_norm=None, lr=0.1)
        session = session_on(world, made, *plan)
        steps = list(training(session))
        before = float(weights(session).norm())
        evaluation = evaluate(session)
        progress = session.progress
        found[name] = {
            "unsettled": before,
            "weights": weights(session)[::997].tolist(),
            "held out": evaluation.eval_loss,
            "progress": [progress.step, progress.tokens, progress.trained_tokens],
            "more progress": [progress.examples, progress.positions],
            "losses": [m.loss for m in steps],
            "probe": [bool(t.check_effect(session).effective) for t in session.setup.plan],
            "wrapped": type(session.module).__name__,
        }
    return found


COMPANY: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "plain": ("llama", ()),
    "masters": ("llama", (BF16MasterWeights(), GradientAccumulation(micro_batch_size=1))),
    "experts": ("deepseek_v3", (BalancedRouting(speed=0.01),)),
}


def accompanied(world: World) -> dict[str, Any]:
    """A stream and DiLoCo beside other techniques: same bits on all ranks once synchronized."""
    found = {}
    for name, (architecture, others) in COMPANY.items():
        for communication in (APART, LocalSteps(every=2, outer="nesterov")):
            made = job(architecture)
            session = session_on(world, made, communication, *others, architecture=architecture)
            run(session)
            apart = float(weights(session).sum())
            loss = evaluate(session).eval_loss
            synchronized = float(weights(session).sum())
            model = session.finish()
            state = [t.double().sum().item() for t in model.state_dict().values()]
            found[f"{name}, {communication.name()}"] = {
                "apart": apart,
                "synchronized": synchronized,
                "state": state,
                "loss": loss,
                "probe": communication.check_effect(session).evidence,
                "effective": communication.check_effect(session).effective,
            }
    return found


def stopped_by_one(world: World) -> dict[str, int]:
    """Only rank 1 asks for a stop, after two steps; all must leave after the same one."""
    found = {}
    for communication in (APART, LocalSteps(every=4)):
        session = session_on(world, job(), communication)
        for metrics in training(session):
            if world.rank == 1 and metrics.step == 2:
                session.stop_requested = True
        evaluate(session)
        found[communication.name()] = session.progress.step
    return found


def resumed(world: World) -> dict[str, Any]:
    """A run of six steps, and its last three once more from the state after the third."""
    found = {}
    for communication in (APART, LocalSteps(every=2, outer="nesterov")):
        whole = session_on(world, job(stop=Stop(steps=6)), communication)
        losses, saved = [], ({}, {})
        for metrics in training(whole):
            losses.append(metrics.loss)
            if metrics.step == 3:
                saved = state_of_all_ranks(whole)
        again = session_on(world, job(stop=Stop(steps=6)), communication)
        restore(again, *saved)
        later = [m.loss for m in training(again)]
        evaluate(whole)
        evaluate(again)
        found[communication.name()] = {
            "losses": [losses[3:], later],
            "weights": [weights(whole).tolist()[::997], weights(again).tolist()[::997]],
            "ranks": sorted({n.split("/")[1] for n in saved[0] if n.startswith("rank/")}),
        }
        other = session_on(world, job(), LocalSteps() if communication is APART else APART)
        found[communication.name()]["other"] = refusal(restore, other, *saved)
    return found


def refused(world: World) -> list[str]:
    """What is said to plans and jobs that don't go together with training apart."""
    return [
        refusal(session_on, world, job(stop=Stop(tokens=500)), APART),
        refusal(session_on, world, job(), LocalSteps(), WeightAverage()),
    ]


def everything(world: World) -> dict[str, Any]:
    """All jobs: a start takes longer than most of them."""
    jobs = (averaged, accompanied, stopped_by_one, resumed, refused)
    return {each.__name__: each(world) for each in jobs}


found = once_on_ranks(everything)


@pytest.fixture
def as_ddp(found: list[Any]) -> list[Any]:
    return [rank["averaged"] for rank in found]


@pytest.mark.parametrize("name", ["every step", "accumulated", "adaptive"])
def test_averaging_each_step_of_sgd_is_ddp_whatever_tokens_ranks_have(
    as_ddp: list[Any], name: str
) -> None:
    for rank in as_ddp:
        assert rank[name]["weights"] == pytest.approx(rank["ddp"]["weights"], abs=2e-6)
        assert rank[name]["held out"] == pytest.approx(rank["ddp"]["held out"], rel=1e-5)


def test_counts_over_all_ranks_are_exact_once_settled(as_ddp: list[Any]) -> None:
    for rank in as_ddp:
        for name in ("every step", "seldom"):
            assert rank[name]["progress"] == rank["ddp"]["progress"]
            assert rank[name]["more progress"][0] == rank["ddp"]["more progress"][0]


def test_an_evaluation_is_of_one_model_on_all_ranks(as_ddp: list[Any]) -> None:
    one, other = (rank["seldom"] for rank in as_ddp)
    assert one["unsettled"] != other["unsettled"]
    assert one["weights"] == other["weights"]
    assert one["held out"] == other["held out"]


def test_gradients_are_not_replicated_and_the_probes_say_so(as_ddp: list[Any]) -> None:
    for rank in as_ddp:
        assert rank["ddp"]["wrapped"] == "DistributedDataParallel"
        assert rank["every step"]["wrapped"] != "DistributedDataParallel"
        assert rank["every step"]["probe"] == [True, True]
        assert rank["seldom"]["probe"] == [True, False]  # the run was shorter than one round


@pytest.mark.parametrize("communication", ["stream", "local_steps"])
@pytest.mark.parametrize("name", COMPANY)
def test_ranks_end_with_the_same_bits_beside_other_techniques(
    found: list[Any], name: str, communication: str
) -> None:
    one, other = (rank["accompanied"][f"{name}, {communication}"] for rank in found)
    assert one["apart"] != other["apart"] or communication == "local_steps"
    assert one["synchronized"] == other["synchronized"]
    assert one["state"] == other["state"]
    assert one["loss"] == other["loss"]
    assert one["effective"]
    assert "exchanges among 2 ranks" in one["probe"]


def test_what_does_not_go_together_is_refused_in_words(found: list[Any]) -> None:
    for rank in found:
        assert "max_tokens" in rank["refused"][0]
        assert "weight_average" in rank["refused"][1]


def test_the_forecast_is_of_bytes_on_the_wire_and_of_the_anchor() -> None:
    context = job_context(language_job())
    for world in (2, 8):  # float32 is summed in a ring, as gradients are
        several = job_context(language_job(), world=World(0, 0, world))
        found = LocalSteps(every=10, codec="none").forecast(several)
        assert found.comm_bytes == pytest.approx(0.1)
    assert Stream(fragments=4).forecast(context).comm_bytes == pytest.approx(0.0159, rel=0.02)
    assert Stream().forecast(context).resident_bytes == 4 * context.model.parameters


def test_a_stop_that_one_rank_asks_for_comes_after_the_same_step_on_all(found: list[Any]) -> None:
    assert [rank["stopped_by_one"] for rank in found] == [{"stream": 4, "local_steps": 4}] * 2


def test_a_resumed_run_has_the_bits_of_the_whole_one_on_every_rank(found: list[Any]) -> None:
    for rank in found:
        for name, case in rank["resumed"].items():
            assert case["losses"][0] == case["losses"][1]
            assert case["weights"][0] == case["weights"][1]
            assert case["ranks"] == ["0", "1"]
            assert f"plan: {name} was on" in case["other"]
