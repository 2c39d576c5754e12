"""The indexers' loss in whole runs: what learns, how fast, and that the model's step stays."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hasten.core.job import Job, Schedule
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.state import state_of
from hasten.core.step import without_loss
from hasten.core.technique import Fidelity, Technique
from hasten.data.tokenize import train_bpe
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.models.adapters import merge, with_adapter
from hasten.models.load import load_model
from hasten.models.save import save_adapter, save_model
from hasten.parts.data.collate import tokenized_example
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.optim.master_weights import LossScale
from hasten.recipe.schema import Recipe
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from hasten.techniques.indexer import IndexerLoss
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import FusedAdamW, Muon
from hasten.techniques.routing import BalancedRouting
from hasten.training.run import train
from indexer_reference import plain_training, wide_model
from sample_data import WORDS, small
from tiny import (
    examples,
    job_context,
    language_job,
    logits,
    restore,
    run,
    session_of,
    tiny_config,
)
from told import json_lines

BASE = (Packed(), DocumentAttention())
RATE, CLIP = 3e-3, 0.05  # others than the model's, and a clip that acts


def v32(job: Job, *plan: Technique, **more: Any) -> Session:
    return session_of(job, *BASE, *plan, architecture="deepseek_v32", **more)


def job_of(dtype: torch.dtype = torch.float64, **changes: Any) -> Job:
    settings = {"data": examples(12), "steps": 3, "max_grad_norm": 0.5, **changes}
    return language_job(partial(wide_model, dtype), **settings)


def weights(session: Session) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in session.model.named_parameters()}


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("more", [(), (GradientAccumulation(micro_batch_size=3),)], ids=str)
def test_a_run_learns_what_a_plain_loop_over_examples_does(
    stage: str, more: tuple[Technique, ...]
) -> None:
    """The choice is of 6 keys, in examples of up to 40; routers are float32."""
    job = job_of()
    technique = IndexerLoss(stage=stage, weight=0.7, learning_rate=RATE, clip=CLIP)
    session = v32(job, technique, *more)
    steps = run(session)
    expected = plain_training(job.build_model, job, 3, stage, 0.7, RATE, CLIP)
    assert [m.loss for m in steps] == pytest.approx(expected["losses"], rel=1e-7)
    assert [m.indexer_kl for m in steps] == pytest.approx(expected["kl"], rel=1e-7)
    assert [m.grad_norm for m in steps] == pytest.approx(expected["norms"], rel=1e-6)
    assert all(m.learning_rate == (RATE if stage == "warmup" else 1e-2) for m in steps)
    start = dict(wide_model().named_parameters())
    for name, weight in weights(session).items():
        assert torch.allclose(weight, expected["weights"][name], rtol=0, atol=1e-6), name
        learns = stage == "sparse" or ".indexer." in name
        assert torch.equal(weight, start[name]) != learns, name


@pytest.mark.parametrize(
    ("dtype", "fused"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)]
)
def test_the_models_step_has_the_bits_that_it_has_without_the_loss(
    dtype: torch.dtype, fused: bool
) -> None:
    kernels = (FusedAdamW(),) if fused else ()
    without, weak, strong = (
        weights(after_one(job_of(dtype, steps=1), *plan, *kernels))
        for plan in ((), (IndexerLoss(weight=1e-3),), (IndexerLoss(weight=1e3, clip=0),))
    )
    for name, weight in without.items():
        learnt = ".indexer." in name
        assert torch.equal(weight, weak[name]) != learnt, name
        assert torch.equal(weight, strong[name]) != learnt, name
        assert torch.equal(weak[name], strong[name]) or learnt


def after_one(job: Job, *plan: Technique) -> Session:
    session = v32(job, *plan)
    run(session)
    return session


def decaying(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{**g, "weight_decay": 0.5} for g in groups], lr=lr)


def test_with_weight_0_the_indexers_and_the_run_keep_their_bits() -> None:
    job = job_of(optimizer=decaying)
    off = IndexerLoss(weight=0.0)
    assert off.fidelity is Fidelity.EXACT
    assert IndexerLoss().fidelity is Fidelity.LOSSY
    session, plain = v32(job, off), v32(job)
    assert [m.loss for m in run(session)] == [m.loss for m in run(plain)]
    start = dict(wide_model().named_parameters())
    for name, weight in weights(session).items():
        assert torch.equal(weight, start[name]) == (".indexer." in name), name
    assert not off.check_effect(session).effective


def test_muon_and_a_mean_leave_the_indexers_to_their_own_group() -> None:
    session = v32(job_of(torch.float32), IndexerLoss(learning_rate=RATE), Muon(), WeightAverage())
    run(session)
    own = [g for g in session.optimizer.param_groups if g.get("clip_apart")]
    names = dict(zip(map(id, flat(session)), session.weight_names, strict=True))
    assert {names[id(p)] for g in own for p in g["params"]} == {
        n for n in session.weight_names if ".indexer." in n
    }
    assert all(g["lr"] == RATE and not g["muon"] for g in own)


def test_layers_that_a_pipelines_rank_frees_are_not_kept() -> None:
    session = v32(job_of(), IndexerLoss())
    attention = weakref.ref(session.model.get_submodule("model.layers.1.self_attn"))
    session.model.get_submodule("model").layers = nn.ModuleList()  # type: ignore[assignment]
    gc.collect()
    assert attention() is None


def flat(session: Session) -> list[torch.Tensor]:
    return [p for g in session.optimizer.param_groups for p in g["params"]]


def test_a_loss_scale_changes_nothing() -> None:
    """A power of two, in float64."""
    found = []
    for scale in (1.0, 4096.0):
        session = v32(job_of(steps=2), IndexerLoss(clip=CLIP))
        session.setup.loss_scale = LossScale(scale)
        run(session)
        found.append(weights(session))
    assert all(torch.equal(found[0][name], weight) for name, weight in found[1].items())


def test_a_gradient_of_an_indexer_that_is_not_finite_moves_no_weight() -> None:
    session = v32(job_of(steps=1), IndexerLoss())
    session.setup.step_checks.quarantine = None  # type: ignore[attr-defined]
    start = weights(session)
    begin = session.setup.indexer.begin  # type: ignore[union-attr]

    def broken(tokens: int) -> None:
        begin(tokens)
        session.setup.indexer.learnings[0].factor = float("nan")  # type: ignore[union-attr]

    session.setup.indexer.begin = broken  # type: ignore[union-attr, method-assign]
    (step,) = run(session)
    assert step.skipped
    assert step.loss == pytest.approx(step.loss)  # it is a number
    assert all(torch.equal(w, start[n]) for n, w in weights(session).items())


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("length", [4, 12])  # of examples with fewer and more keys than chosen
def test_copies_of_examples_teach_nothing_and_leave_a_gradient_of_each_weight(
    stage: str, length: int
) -> None:
    """A rank without examples runs one of others'; replicas wait for each gradient."""
    data = [tokenized_example(list(range(5, 5 + length)))]
    session = v32(job_of(data=data), IndexerLoss(stage=stage))
    collate: Any = session.setup.collate
    session.engine.gradients([without_loss(collate(data))], 1.0)
    learns = [p for p in session.module.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learns)
    assert not any(p.grad.any() for p in flat(session) if p.grad is not None)
    assert session.setup.indexer.metrics() == {}  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_beside_an_adapter_the_indexers_learn_and_are_saved(stage: str, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    save_model(wide_model(torch.float32), None, Path(base))  # type: ignore[arg-type]
    job = language_job(partial(load_model, base), data=examples(12))
    session = v32(job, IndexerLoss(stage=stage), LoRA(rank=4))
    start = weights(session)
    run(session)
    model: Any = session.finish()
    for name, weight in model.named_parameters():
        learns = ".indexer." in name or (stage == "sparse" and ".lora_" in name)
        assert torch.equal(weight, start[name]) != learns, name
    save_adapter(model, None, tmp_path / "adapter")
    again = with_adapter(load_model(base), tmp_path / "adapter")
    trained = trunk_of(model)
    expected = logits(trained)
    assert torch.equal(logits(trunk_of(again)), expected)
    merged = merge(again)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    learnt = {n: p for n, p in merged.named_parameters() if ".indexer." in n}
    assert all(torch.equal(p, trained.get_parameter(n)) for n, p in learnt.items())
    assert len(learnt) == 10


def trunk_of(model: Any) -> Any:
    inner = model.get_base_model()
    inner.set_attn_implementation("sdpa")
    return inner


def test_modules_ahead_have_indexers_that_learn_too() -> None:
    session = v32(job_of(), IndexerLoss(), MultiTokenPrediction(depth=2))
    start = {n: p.detach().clone() for n, p in session.loss_module.named_parameters()}
    run(session)
    ahead = [n for n in start if "ahead" in n and ".indexer." in n]
    assert len(ahead) == 10
    found = dict(session.loss_module.named_parameters())
    assert not any(torch.equal(found[n], start[n]) for n in ahead)
    assert "KL of 4 indexers" in IndexerLoss().check_effect(session).evidence
    off = v32(job_of(), IndexerLoss(), MultiTokenPrediction(weight=0.0))
    assert "KL of 2 indexers" in IndexerLoss().check_effect(after(off)).evidence


def after(session: Session) -> Session:
    run(session)
    return session


def test_a_resumed_run_goes_on_with_its_bits_and_can_not_change_the_stage() -> None:
    technique = IndexerLoss(learning_rate=RATE)
    job = job_of(steps=4, optimizer=decaying)
    straight = after(v32(job, technique))
    first = after(v32(replace(job, stop=replace(job.stop, steps=2)), technique))
    saved = state_of(first)
    second = v32(job, technique)
    restore(second, *saved)
    run(second)
    expected = weights(straight)
    assert all(torch.equal(w, expected[n]) for n, w in weights(second).items())
    with pytest.raises(InputError, match="plan: indexer_loss: stage was sparse and is warmup now"):
        restore(v32(job, IndexerLoss(stage="warmup", learning_rate=RATE)), *saved)


def test_an_evaluation_is_of_the_chosen_keys_in_a_warm_up_too() -> None:
    session = v32(job_of(), IndexerLoss(stage="warmup"))
    found = evaluate(session)
    assert found.eval_loss == evaluate(v32(job_of())).eval_loss
    assert found.eval_loss != evaluate(after(session)).eval_loss  # by the indexers alone


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ((Packed(),), "indexer_loss needs document_attention"),
        ((DocumentAttention(),), "indexer_loss needs packed"),
        ((*BASE, TensorParallel()), "can't go with tensor_parallel"),
        ((*BASE, Hybrid(tp=2)), "can't go with hybrid"),
        ((*BASE, DeepSpeed()), "can't go with deep_speed"),
        ((*BASE, Compiled()), "isn't tested with compiled"),
        ((*BASE, BalancedRouting()), "leave balanced_routing out"),
    ],
    ids=str,
)
def test_a_plan_that_it_can_not_be_in_is_refused(plan: tuple[Technique, ...], said: str) -> None:
    job = job_of()
    context = job_context(job, "deepseek_v32", World(size=2))
    with pytest.raises(InputError, match=said) as refused:
        prepare(job, Plan([*plan, IndexerLoss(stage="warmup")]), context)
    assert ". " not in str(refused.value)


@pytest.mark.parametrize(
    ("stage", "topk", "refused"),
    [("sparse", 40, True), ("sparse", 39, False), ("warmup", 40, False)],
)
def test_a_choice_that_never_binds_is_refused_before_work_starts(
    stage: str, topk: int, refused: bool
) -> None:
    context = job_context(job_of(), "deepseek_v32")
    context = replace(
        context,
        model=replace(context.model, index_topk=topk),
        examples=replace(context.examples, longest=40),
    )
    reasons = IndexerLoss(stage=stage).unsupported_reasons(context)
    assert bool(reasons) == refused
    assert all("the longest example has 40 tokens" in reason for reason in reasons)


def test_models_without_such_indexers_are_refused() -> None:
    for architecture in ("llama", "deepseek_v3", "deepseek_v4"):
        (reason,) = IndexerLoss().unsupported_reasons(job_context(job_of(), architecture))
        assert architecture in reason


SIZES = {"vocab_size": 400, "num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": 8}


def recipe(folder: Path, stage: str, model: str, **changes: Any) -> Recipe:
    settings = {"stage": stage, "learning_rate": 3e-3}
    values = small(
        folder,
        model=model,
        max_steps=2,
        lr_schedule="constant",
        plan=["packed", "document_attention", {"indexer_loss": settings}],
        output=str(folder / stage),
    )
    return Recipe(**{**values, **changes})


def uneven_attention() -> nn.Module:
    """One layer with attention that differs from key to key, and states with a constant part.

    An index head's weight has no bias: without that part no head could keep its sign.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "index_topk": 16}
    sizes |= {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = tiny_config("deepseek_v32")
    for name, value in sizes.items():
        setattr(config, name, value)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    for name, weight in model.model.layers[0].self_attn.named_parameters():
        if weight.ndim > 1:
            scale = 2.0 if "q_b_proj" in name else 1.0
            weight.data.normal_(std=scale * weight.shape[1] ** -0.5)
    states = model.model.embed_tokens.weight.data
    states.normal_().div_(1 + torch.arange(64) / 8.0)[:, 0] = 2.0
    freeze_indexers(model)
    return model  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_warm_up_finds_the_keys_that_attention_needs() -> None:
    """16 of up to 128 keys; at the start they have about half of the best possible attention."""
    draw = np.random.default_rng(0)
    data = [tokenized_example(draw.integers(3, 512, 128)) for _ in range(400)]
    job = language_job(
        uneven_attention,
        data=data,
        batch=2,
        steps=200,
        lr=2e-2,
        schedule=Schedule("linear", 0, 200),
    )
    steps = run(v32(job, IndexerLoss(stage="warmup", clip=0)))
    captured = [m.indexer_captured or 0.0 for m in steps]
    assert captured[0] < 0.6
    assert sum(captured[-20:]) / 20 > 0.88


@pytest.mark.slow
def test_two_recipes_train_from_dense_to_sparse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "on")
    config: Any = tiny_config("deepseek_v32")
    for name, value in SIZES.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path / "config")
    train_bpe(WORDS, 400).save_pretrained(tmp_path / "config")
    warmup = recipe(tmp_path, "warmup", str(tmp_path / "config"), from_scratch=True)
    first = train(warmup)
    with caplog.at_level(logging.INFO, "hasten"):
        second = train(recipe(tmp_path, "sparse", str(tmp_path / "warmup" / "model")))
    (proof,) = [r.message for r in caplog.records if "without hasten" in r.message]
    assert "equal to" in proof
    assert "nothing was tested" not in proof
    for summary, folder in ((first, "warmup"), (second, "sparse")):
        effect = summary["effective"]["indexer_loss"]
        assert effect["effective"]
        assert f"{folder}: KL of 2 indexers" in effect["evidence"]
        assert "of the best possible attention" in effect["evidence"]
        lines = json_lines(tmp_path / folder / "metrics.jsonl")
        assert all(line["indexer_kl"] > 0 for line in lines)
        assert all(0 < line["indexer_captured"] <= 1 for line in lines)
        card = (tmp_path / folder / "model" / "README.md").read_text()
        assert re.search(rf"`indexer_loss` +\| effective +\| {folder}: KL of 2", card)
    config.index_topk = 64  # as many as the longest example's tokens
    config.save_pretrained(tmp_path / "config")
    with pytest.raises(InputError, match="the longest example has 64 tokens"):
        train(recipe(tmp_path, "sparse", str(tmp_path / "config"), from_scratch=True))
