"""How often a step makes the host wait for the device; counted on a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gpu_rank_jobs import sums, waits
from hasten.core.job import MicroBatch
from hasten.core.setup import copy_to_device
from hasten.core.step import batches, train_step
from hasten.core.technique import Technique
from hasten.machine import host
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from host_waits import HostWaits
from ranks import on_ranks
from tiny import language_job, session_of, tiny_config

PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "accumulated": (GradientAccumulation(micro_batch_size=1),),
    "bf16 with masters": (BF16MasterWeights(),),
    "labelled tokens": (LabelledTokenLoss(chunk=16),),
}


def of_layers(count: int) -> nn.Module:
    config = tiny_config("llama")
    config.num_hidden_layers = count
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_waits_for_the_device_once(
    plan: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers and passes there are; and at the end of all passes."""
    from hasten.parts.nn import losses

    monkeypatch.setattr(losses, "skips_unlabelled", lambda hidden: False)  # as on a GPU
    monkeypatch.setattr(losses.row_kernels, "fits", lambda *tensors: False)
    job = language_job(lambda: of_layers(layers))
    session = session_of(job, *PLANS[plan])
    batch = next(batches(session))
    tensors = list(session.module.state_dict(keep_vars=True).values())
    tensors += [t for m in batch.micro_batches for t in m.inputs.values() if isinstance(t, Tensor)]
    with HostWaits(tensors) as waits:
        metrics = train_step(session, batch, 0.0)
    assert metrics.loss > 0
    assert [place.partition(":")[0] for place in waits.places] == ["core/step.py"]


def test_a_wait_in_a_pass_is_seen() -> None:
    """The counter itself: a loss that is read in every pass is a wait more for each."""
    session = session_of(language_job(), GradientAccumulation(micro_batch_size=1))
    batch = next(batches(session))
    inner = session.engine.module  # type: ignore[attr-defined]
    inner.register_forward_hook(lambda module, args, out: out[0].item() and None)
    with HostWaits(session.module.parameters()) as waits:
        train_step(session, batch, 0.0)
    assert len(waits.places) == 1 + len(batch.micro_batches) > 2


def test_a_rank_among_others_waits_as_often(tmp_path: Path) -> None:
    """Counts, flags and losses of all ranks are summed on the host."""
    for rank in on_ranks(waits, tmp_path):
        for plan, places in rank.items():
            assert [place.partition(":")[0] for place in places] == ["core/step.py"], plan


def test_a_step_makes_two_sums_of_its_numbers(tmp_path: Path) -> None:
    """Counts, stop and passes before it; norm, flag, loss and positions before its update.

    No rank takes a step for sound whose loss is infinite on one. Partners' positions count once.
    """
    found = {"ddp": [2, False, 10.0], "fsdp2": [2, False, 10.0], "tp": [2, False, 5.0]}
    assert on_ranks(sums, tmp_path) == [found] * 2


def test_batches_for_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def to(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        calls.append(("to", str(device), non_blocking))
        return self

    def pinned(self: Tensor) -> Tensor:
        calls.append("pin")
        return self

    given = MicroBatch({"input_ids": torch.ones(1, 2), "more": [torch.ones(1)], "n": 3}, None)  # type: ignore[arg-type]
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    for device, expected in (("cuda:1", ["pin"]), ("cpu", [])):
        calls.clear()
        list(copy_to_device(iter([(given,)]), device))
        assert calls == [*expected, ("to", device, True)] * 2


@pytest.mark.parametrize("error", [ImportError, RuntimeError, type("NVMLError", (Exception,), {})])
def test_a_driver_that_says_nothing_of_its_load_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def utilization(device: Any) -> float:
        raise error("no permission")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert host.device_utilisation("cuda:0") is None
