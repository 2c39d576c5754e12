"""``gradual_optimize`` of a model and its loader keeps what pays, and trains with it."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import InputError, OptimizedTrainer, PipeDream, benchmark, gradual_optimize
from hasten.core.plan import Plan
from hasten.integrations import gradual
from hasten.machine.environment import World
from hasten.measure.ablation import Variant
from hasten.measure.search import Proposal
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.communication.compress import Half
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast
from integrations.loader_rank_jobs import model
from ranks import on_ranks


def data(count: int = 96) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, generator=draw)
    return TensorDataset(x, (x @ torch.randn(5, 3, generator=draw)).argmax(1))


def everything(world: World) -> dict[str, Any]:
    jobs = (optimized, rate, grown, pipe)
    return {job.__name__: job(world) for job in jobs}


def optimized(world: World) -> dict[str, Any]:
    network = model()
    found = gradual_optimize(
        network,
        DataLoader(data(), batch_size=4),
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        techniques=[Half(), GradientAccumulation(micro_batch_size=2)],
        rounds=2,
        steps=2,
    )
    return {
        "rungs": found.climb.rows(),
        "examples": found.summary["examples_per_step"],
        "weights": network.weight.tolist(),  # type: ignore[union-attr, operator]
    }


def rate(world: World) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = benchmark(model(), DataLoader(data(), batch_size=4))
    return {"rate": found, "said": said.getvalue()}


def grown(world: World) -> dict[str, Any]:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    trainer = OptimizedTrainer(network, optimizer, nn.CrossEntropyLoss(), dynamic_batch=True)
    summary = trainer.train(DataLoader(data(), batch_size=2), epochs=2)
    whole = summary["examples_per_step"]
    return {"most": whole["most"], "all": whole["mean"] * summary["steps"]}


def pipe(world: World) -> str:
    try:
        PipeDream(nn.Sequential(nn.Linear(2, 2)))
    except ValueError as error:
        return str(error)
    return ""


class Costly(nn.Module):
    """Each pass has a price of its own, whatever its rows: larger steps pay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(5, 3), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        self.rows.append(len(x))
        found: Tensor = self.layer(x)
        return found


def batches(count: int = 40, size: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count * size, 5, generator=draw)
    y = (x @ torch.randn(5, 3, generator=draw)).argmax(1)
    return list(zip(x.split(size), y.split(size), strict=True))


def tuned(*techniques: Any, **more: Any) -> tuple[Costly, gradual.GradualResult]:
    torch.manual_seed(0)
    model = Costly()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = {"techniques": techniques, "optimizer": optimizer, "rounds": 6, **more}
    return model, gradual_optimize(model, batches(), **given)


def test_what_is_surely_faster_and_not_worse_is_kept_and_trained_with() -> None:
    growing = AdaptiveBatch(initial_size=16, max_size=16, grow=True)
    state = torch.get_rng_state()
    model, found = tuned(growing)
    assert list(found.climb.plan) == [growing], str(found)
    assert str(found).endswith(f"kept: {Plan([growing])}")
    assert found.climb.rungs[0].accepted
    assert sum(model.rows) == 160  # copies were measured; the model itself had one epoch
    assert max(model.rows) == 16
    assert found.summary["steps"] == 10
    assert found.trainer.model is model
    assert state.shape == torch.get_rng_state().shape


def test_what_does_not_pay_is_left_out_and_why_is_said() -> None:
    model, found = tuned(GradientAccumulation(micro_batch_size=1), Half())
    assert not len(found.climb.plan)
    why = {rung.technique: rung.why for rung in found.climb.rungs}
    assert why["half"] == "with one rank no gradient travels"
    assert "slower" in why["gradient_accumulation(micro_batch_size=1)"]
    assert "kept: nothing" in str(found)
    assert model.rows == [4] * 40


def test_a_worse_model_is_not_kept_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = AdaptiveBatch(initial_size=16, max_size=16, grow=True)
    torch.manual_seed(0)
    model = Costly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # fewer steps learn less
    found = gradual_optimize(model, batches(), techniques=[growing], optimizer=optimizer, rounds=3)
    (rung,) = found.climb.rungs
    assert not rung.accepted
    assert "examples, one seed" in rung.why or "not shown" in rung.why


def test_usual_losses_and_optimizers_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    gradual_optimize(nn.Linear(5, 3), batches(10), techniques=[], rounds=2, steps=1)
    said = capsys.readouterr().out
    assert "AdamW(lr=0.001) is used; give optimizer=" in said
    assert "cross-entropy is taken" in said


def test_the_order_may_follow_the_gain_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Autocast(emulate=True), AdaptiveBatch(4, 8)
    rates = {first: 1.0, second: 3.0}
    asked: list[Plan] = []

    def measured(self: Any, proposal: Proposal[Plan]) -> list[Variant]:
        before, *others = proposal.variants.items()
        variants = [Variant(before[0], before[1], [1.0] * 4)]
        for name, plan in others:
            asked.append(plan)
            effective = [{"technique": t.name(), "effective": True, "evidence": ""} for t in plan]
            rate = [sum(rates[t] for t in plan)] * 4
            variants.append(
                Variant(name, plan, rate, effective=effective, baseline_rounds=[1.0] * 4)
            )
        return variants

    monkeypatch.setattr(gradual._Comparison, "__call__", measured)
    more = {"techniques": [first, second], "rounds": 2, "steps": 1}
    gradual_optimize(Costly(), batches(8), order="gain", **more)
    assert [list(plan) for plan in asked[:3]] == [[first], [second], [second]]


@pytest.mark.slow
def test_two_ranks_decide_alike_and_train_together(tmp_path: Path) -> None:
    one, two = on_ranks(everything, tmp_path)
    assert one["optimized"]["rungs"] == two["optimized"]["rungs"]
    assert len(one["optimized"]["rungs"]) == 2
    assert all(rung["ratio"] is not None for rung in one["optimized"]["rungs"])
    assert one["optimized"]["weights"] == two["optimized"]["weights"]
    assert one["optimized"]["examples"] == {"least": 8, "mean": 8, "most": 8}
    assert one["rate"]["rate"] == two["rate"]["rate"] > 0
    assert "samples/sec on 2 ranks" in one["rate"]["said"]
    assert not two["rate"]["said"]
    assert one["grown"] == two["grown"]
    assert one["grown"]["most"] > 4
    assert one["grown"]["all"] == 2 * 96
    assert "take AsyncPipeline(stages=2)" in one["pipe"]


def test_calls_of_wrong_kinds_are_refused() -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(InputError, match="the loader gives its batches once"):
        gradual_optimize(model, iter(batches()))
    for given in ((model,), (7,), ("recipe.yaml", batches()), (model, None)):
        with pytest.raises(TypeError, match="takes a recipe, or a model and its loader"):
            gradual_optimize(*given)
    with pytest.raises(TypeError, match="takes a recipe"):
        gradual_optimize("recipe.yaml", loss_fn=nn.functional.mse_loss)
    with pytest.raises(InputError, match="the least"):
        gradual_optimize(model, batches(1))
    with pytest.raises(InputError, match="rounds=2"):
        gradual_optimize(model, batches(), rounds=1)
    with pytest.raises(InputError, match="decides LAYOUT"):
        gradual_optimize(model, batches(), techniques=[DDP()])
    named = [{"x": torch.ones(2, 5), "labels": torch.ones(2)}] * 4
    with pytest.raises(InputError, match="give loss_fn="):
        gradual_optimize(model, named)
