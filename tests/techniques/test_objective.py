"""Multi-token prediction in whole runs: it learns, resumes, replicates, leaves a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hasten.core.context import JobContext, ModelFacts
from hasten.core.job import Job
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.core.technique import Fidelity, Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.nn.losses import ObjectiveLoss
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from ranks import on_ranks
from tiny import examples, job_context, language_job, restore, run, session_of


def replicated(world: World) -> dict[str, Any]:
    job = language_job(steps=4)
    session = session_of(job, MultiTokenPrediction(depth=2), DDP(), world=world)
    losses = [m.loss for m in run(session)]
    weights = [float(p.detach().double().sum()) for p in session.loss_module.parameters()]
    return {"losses": losses, "weights": weights}


PLAN: tuple[Technique, ...] = (Packed(), DocumentAttention(), LabelledTokenLoss(chunk=64))
AHEAD = MultiTokenPrediction(depth=2)
MORE: dict[str, tuple[Technique, ...]] = {
    "packed": PLAN,
    "accumulated": (GradientAccumulation(micro_batch_size=3),),
    "recomputed": (ActivationCheckpointing(),),
    "packed and accumulated": (*PLAN, GradientAccumulation(micro_batch_size=2)),
}


def losses(session: Session) -> list[float]:
    return [m.loss for m in run(session)]


def short_job() -> Job:
    return language_job(steps=3, data=examples(8))


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(session_of(short_job(), AHEAD))


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_other_techniques_change_no_loss_of_it(
    more: tuple[Technique, ...], plain: list[float]
) -> None:
    found = losses(session_of(short_job(), AHEAD, *more))
    assert found == pytest.approx(plain, rel=1e-4)
    assert found[-1] < found[0]


def test_with_weight_0_a_run_keeps_its_bits() -> None:
    job = language_job(steps=4)
    off = MultiTokenPrediction(weight=0.0)
    assert off.fidelity is Fidelity.EXACT
    assert AHEAD.fidelity is Fidelity.LOSSY
    assert losses(session_of(job, off)) == losses(session_of(job))


def test_the_modules_learn_and_the_eval_loss_is_the_models_alone() -> None:
    session = session_of(language_job(steps=8), AHEAD)
    before = {n: p.clone() for n, p in session.loss_module.named_parameters()}
    run(session)
    moved = {n for n, p in session.loss_module.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before)
    with_them = evaluate(session).eval_loss
    session.loss_module.ahead = None  # type: ignore[assignment]
    assert evaluate(session).eval_loss == with_them


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    session = session_of(language_job(steps=2), AHEAD)
    run(session)
    model: Any = session.finish()
    model.save_pretrained(tmp_path)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in again.state_dict().items())


def test_a_checkpoint_has_the_modules_and_a_resumed_run_goes_on() -> None:
    def session(weight: float = 0.3) -> Session:
        return session_of(language_job(steps=6), MultiTokenPrediction(2, weight), *PLAN)

    whole = session()
    expected = losses(whole)
    first = session()
    found = []
    for metrics in training(first):
        found.append(metrics.loss)
        if metrics.step == 3:
            break
    tensors, meta = state_of(first)
    tensors = {name: t.clone() for name, t in tensors.items()}
    assert any(name.startswith("model/ahead.modules_ahead.1.") for name in tensors)
    then = session()
    restore(then, tensors, meta)
    assert found + losses(then) == expected
    other = session(weight=0.1)
    restore(other, tensors, meta)
    assert losses(other)[0] < expected[3]  # the same step, with less of their loss
    plain = session_of(language_job(steps=6), *PLAN)
    with pytest.raises(InputError, match="multi_token_prediction was on"):
        restore(plain, tensors, meta)


def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    one, two = on_ranks(replicated, tmp_path)
    assert one["weights"] == two["weights"]
    assert one["losses"] == pytest.approx(
        losses(session_of(language_job(steps=4), AHEAD)), rel=1e-4
    )


def test_where_it_cannot_work_it_says_so() -> None:
    job, known = language_job(), job_context(language_job())
    other = prepare(job, Plan([AHEAD]), known)
    for module, said in (
        (ObjectiveLoss(torch.nn.Linear(1, 1), None), "loss is ObjectiveLoss"),
        (torch.nn.Linear(1, 1), "multi_token_prediction: .*Linear"),
    ):
        with pytest.raises(InputError, match=said):
            other.objective(module)
    [reason] = AHEAD.unsupported_reasons(JobContext(known.hardware, model=ModelFacts("gpt2", 1000)))
    assert "gpt2" in reason
    for settings, said in (({"depth": 0}, "depth is 0"), ({"weight": -0.5}, "weight is -0.5")):
        with pytest.raises(ValueError, match=said):
            MultiTokenPrediction(**settings)


def test_its_forecast_grows_with_depth_and_is_none_without_weight() -> None:
    context = job_context(language_job())
    one, two = (MultiTokenPrediction(depth=d).forecast(context) for d in (1, 2))
    assert 1 < one.flops < two.flops
    assert 2 * one.resident_bytes == pytest.approx(two.resident_bytes)
    assert MultiTokenPrediction(weight=0).forecast(context).flops == 1
