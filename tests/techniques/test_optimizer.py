"""CompactAdamW, Muon and WeightAverage on whole jobs: settings, formats, checkpoints, folders."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.core.job import Schedule
from hasten.core.setup import Session
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.models.load import load_model
from hasten.parts.kernels import adamw
from hasten.recipe.schema import Recipe
from hasten.release.evaluation import eval_examples
from hasten.techniques.adapter import LoRA
from hasten.techniques.average import WeightAverage
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from hasten.training.run import train
from sample_data import small
from saved import load_latest, save
from tiny import job_context, language_job, restore, run, session_of, tiny_model

NEW: tuple[Technique, ...] = (CompactAdamW(), CompactAdamW("int8"), Muon(), WeightAverage(0.9))
each = pytest.mark.parametrize("technique", NEW, ids=str)


@pytest.mark.parametrize(
    "beside", [(), (LoRA(), BF16MasterWeights())], ids=["alone", "lora, masters"]
)
@each
def test_a_resumed_run_keeps_its_bits(
    technique: Technique, beside: tuple[Technique, ...], tmp_path: Path
) -> None:
    def fresh() -> Session:
        schedule = Schedule("linear", 1, 4, floor=0.1)
        job = language_job(lambda: tiny_model("deepseek_v3"), steps=4, schedule=schedule)
        return session_of(job, technique, *beside, architecture="deepseek_v3")

    whole = fresh()
    steps = training(whole)
    for _ in range(2):
        next(steps)
    save(tmp_path, 2, *state_of(whole))
    expected = [m.loss for m in steps]
    found = load_latest(tmp_path)
    assert found is not None
    second = fresh()
    restore(second, found[0], found[1])
    assert [m.loss for m in run(second)] == expected
    assert technique.check_effect(second) == technique.check_effect(whole)
    for one, other in zip(_saved(second), _saved(whole), strict=True):
        assert torch.equal(one, other)


def _saved(session: Session) -> list[Tensor]:
    """All weights of all versions that would be saved."""
    model = session.finish()
    return [p.detach().clone() for _ in session.versions() for p in model.parameters()]


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_one_pass_on_a_gpu_takes_triton(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is simulated; NVIDIA's alone have it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    adamw._why_no_triton.cache_clear()
    known = replace(job_context(language_job()), device=device)
    try:
        if device == "mps":
            (reason,) = FusedAdamW().unsupported_reasons(known)
            assert reason == "the update in one launch is for NVIDIA GPUs, not for mps"
            return
        assert FusedAdamW().unsupported_reasons(known) == ()
        adamw._why_no_triton.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert FusedAdamW().unsupported_reasons(known)[0].endswith("pip install triton")
    finally:
        adamw._why_no_triton.cache_clear()


def test_a_whole_job_trains_by_the_gpu_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor, in Triton's interpreter; beside the usual way. Its clip is the update's."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton isn't installed")

    def losses(clipped: float) -> list[float]:
        job = replace(language_job(steps=2, lr=0.02), max_grad_norm=clipped)
        return [m.loss for m in run(session_of(job, FusedAdamW(), BF16MasterWeights()))]

    expected = losses(0.1)
    calls: list[int] = []
    usual = adamw.update

    def counted(updates: Any, divisor: Any = None) -> None:
        calls.append(divisor is not None)
        usual(updates, divisor)

    monkeypatch.setattr(adamw, "_why_no_triton", lambda device: "")
    monkeypatch.setattr(adamw, "update", counted)
    assert losses(0.1) == pytest.approx(expected, rel=2e-3)
    assert calls == [True] * 2


@pytest.mark.parametrize("technique", NEW[:3], ids=str)
def test_rate_betas_decay_and_groups_are_the_job_s(technique: Technique) -> None:
    def adamw(groups: Any, lr: float) -> torch.optim.Optimizer:
        groups[0]["weight_decay"] = 0.3
        return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), eps=1e-7)

    session = session_of(language_job(optimizer=adamw, lr=0.02), technique)
    groups = session.optimizer.param_groups
    assert {(g["lr"], g["betas"], g["eps"]) for g in groups} == {(0.02, (0.8, 0.9), 1e-7)}
    for group in groups:
        assert group["weight_decay"] == (0.3 if group["params"][0].ndim >= 2 else 0.0)
    held = sorted(id(p) for g in groups for p in g["params"])
    assert held == sorted(id(p) for p in session.module.parameters())


@pytest.mark.parametrize("technique", NEW[:3], ids=str)
def test_an_optimizer_that_is_not_a_fresh_adamw_is_refused(technique: Technique) -> None:
    with pytest.raises(InputError, match="SGD"):
        session_of(language_job(optimizer=torch.optim.SGD), technique)

    def stepped(groups: Any, lr: float) -> torch.optim.Optimizer:
        used = torch.optim.AdamW(groups, lr=lr)
        used.param_groups[0]["params"][0].grad = torch.ones_like(groups[0]["params"][0])
        used.step()
        return used

    with pytest.raises(InputError, match="hasn't been stepped"):
        session_of(language_job(optimizer=stepped), technique)


def test_the_probe_counts_the_bytes_of_the_state() -> None:
    evidence = {}
    for technique in NEW[:3]:
        session = session_of(language_job(), technique)
        run(session)
        evidence[str(technique)] = technique.check_effect(session).evidence
    count = sum(p.numel() for p in tiny_model().parameters())
    assert all(f"AdamW's is {8 * count / 1e6:.2f} MB" in text for text in evidence.values())
    sizes = [float(text.split("state of ")[1].split(" MB")[0]) for text in evidence.values()]
    assert sizes[1] < sizes[0] < 8 * count / 1e6


@pytest.mark.parametrize("precision", [(), (BF16MasterWeights(),)], ids=["float32", "masters"])
@pytest.mark.parametrize(
    ("save", "suffixes"), [("both", ["", "_average"]), ("average", [""]), ("last", [""])]
)
def test_saved_versions_are_the_weights_and_their_mean(
    save: str, suffixes: list[str], precision: Any
) -> None:
    session = session_of(language_job(steps=6), WeightAverage(0.5, save), *precision)
    run(session)
    before = [p.detach().clone() for p in session.setup.precision.parameters()]
    WeightAverage(0.5, save).check_effect(session)
    after = session.setup.precision.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    session.finish()
    weights = [p for g in session.optimizer.param_groups for p in g["params"]]
    average: Any = session.setup.average
    seen = []
    for suffix in session.versions():
        is_mean = suffix == "_average" or save == "average"
        expected = average.means if is_mean else before
        assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
        seen.append(suffix)
    assert seen == suffixes
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))


@torch.no_grad()
def _loss_of(model: Any, examples: Any) -> float:
    """The loss per trained token, an example at a time."""
    model.eval()
    total, count = 0.0, 0
    for example in examples:
        ids = torch.from_numpy(example.input_ids.astype("int64"))
        log_probabilities = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        trained = torch.from_numpy(example.trained)[1:]
        of_labels = log_probabilities[:-1].gather(1, ids[1:, None])[:, 0]
        total, count = total - float(of_labels[trained].sum()), count + int(trained.sum())
    return total / count


def test_the_eval_loss_of_a_run_is_that_of_the_saved_model(tmp_path: Path) -> None:
    rates = {"learning_rate": 0.03, "lr_schedule": "constant"}
    plan = [{"weight_average": {"decay": 0.9, "save": "average"}}]
    summary = train(Recipe(**small(tmp_path, plan=plan, **rates)), tell=lambda text: None)
    folder = tmp_path / "run"
    examples = eval_examples(folder, lambda text: None)
    loss = _loss_of(load_model(str(folder / "model")), examples)
    assert summary["eval_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_leaves_both_folders_and_both_load(tmp_path: Path, kind: Any) -> None:
    values = small(
        tmp_path,
        model="deepseek-llm-tiny",
        max_steps=4,
        finetuning_type=kind,
        plan=["activation_checkpointing", "muon", {"weight_average": {"decay": 0.9}}],
    )
    earlier = tmp_path / "run" / "model_average"
    earlier.mkdir(parents=True)  # of a run before, and moved aside
    summary = train(Recipe(**values), tell=lambda text: None)
    last = Path(summary["saved"])
    mean = last.with_name(f"{last.name}_average")
    assert (tmp_path / "run" / "previous" / "1" / earlier.name).is_dir()
    assert "eval loss" in summary["effective"]["weight_average"]["evidence"]
    if kind == "full":
        one, other = (load_model(str(p)).state_dict() for p in (last, mean))
        assert one.keys() == other.keys()
        assert any(not torch.equal(one[k], other[k]) for k in one)
    else:
        assert (mean / "adapter_model.safetensors").is_file()
