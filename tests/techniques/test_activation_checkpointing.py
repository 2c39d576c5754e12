"""ActivationCheckpointing on whole jobs: together with the other slots, and what its probe says."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hasten.core.technique import Technique
from hasten.parts.nn.recompute import BlockRecompute
from hasten.techniques import batch
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import Autocast, BF16MasterWeights
from tiny import ARCHITECTURES, job_context, language_job, run, session_of, tiny_model

OTHERS: dict[str, tuple[Technique, ...]] = {
    "packed": (Packed(), DocumentAttention(), LabelledTokenLoss(chunk=16)),
    "lora": (LoRA(dropout=0.1),),
    "masters": (BF16MasterWeights(), GradientAccumulation(micro_batch_size=3)),
    "autocast": (Autocast(),),
}


@functools.cache
def losses(architecture: str, *techniques: Technique) -> list[float]:
    job = language_job(lambda: tiny_model(architecture), steps=2)
    return [m.loss for m in run(session_of(job, *techniques, architecture=architecture))]


SETTINGS: tuple[dict[str, Any], ...] = ({}, {"segments": 2}, {"budget": 0.5})


def products() -> Iterator[Any]:
    """Every architecture beside all others; of the three settings one in turn, the rest is long."""
    for first, architecture in enumerate(ARCHITECTURES):
        for second, others in enumerate(OTHERS):
            for third, settings in enumerate(SETTINGS):
                is_usual = (first + second) % len(SETTINGS) == third
                marks = [] if is_usual else [pytest.mark.long]
                yield pytest.param(architecture, others, settings, marks=marks)


@pytest.mark.parametrize(("architecture", "others", "settings"), products(), ids=str)
def test_losses_keep_their_bits_beside_other_techniques(
    architecture: str, others: str, settings: dict[str, Any]
) -> None:
    plain = losses(architecture, *OTHERS[others])
    assert losses(architecture, ActivationCheckpointing(**settings), *OTHERS[others]) == plain


def test_the_probe_tells_bytes_and_disturbs_nothing() -> None:
    session = session_of(language_job(), ActivationCheckpointing())
    run(session)
    names = [p.grad for p in session.module.parameters()]
    proof = ActivationCheckpointing().check_effect(session)
    assert proof.effective
    assert "MB of activations where" in proof.evidence
    assert ActivationCheckpointing().check_effect(session) == proof
    assert all(grad is None for grad in names)


def test_memory_that_cannot_keep_everything_leaves_out_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keeps(self: BlockRecompute, *given: Any) -> int:
        if self.resting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1000

    session = session_of(language_job(), ActivationCheckpointing())
    run(session)
    monkeypatch.setattr(BlockRecompute, "saved_bytes", keeps)
    proof = ActivationCheckpointing().check_effect(session)
    assert proof.effective
    assert proof.evidence.endswith("passes of blocks again")
    needs: list[float] = []  # of this rank, for the answer of all
    monkeypatch.setattr(batch, "fits", lambda session, more: needs.append(more))
    assert ActivationCheckpointing().live_settings(session) == ()
    assert needs == [math.inf]


def test_the_probe_runs_no_more_examples_than_a_pass_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_of(
        language_job(), ActivationCheckpointing(), GradientAccumulation(micro_batch_size=1)
    )
    run(session)
    sizes: list[int] = []
    forward = type(session.loss_module).forward

    def counted(self: Any, labels: torch.Tensor, *given: Any, **named: Any) -> Any:
        sizes.append(len(labels))
        return forward(self, labels, *given, **named)

    monkeypatch.setattr(type(session.loss_module), "forward", counted)
    ActivationCheckpointing().check_effect(session)
    assert sizes == [1, 1]


def test_on_a_processor_there_is_nothing_to_move_to_the_host() -> None:
    context = job_context(language_job())
    assert (
        "in host memory already"
        in ActivationCheckpointing(offload=True).unsupported_reasons(context)[0]
    )
    on_gpu = dataclasses.replace(context, device="cuda:0")
    assert ActivationCheckpointing(offload=True).unsupported_reasons(on_gpu) == ()


def test_more_segments_than_blocks_are_an_obstacle() -> None:
    context = job_context(language_job())
    assert "has 2 blocks" in ActivationCheckpointing(segments=3).unsupported_reasons(context)[0]


def test_the_forecast_counts_the_forward_pass_again() -> None:
    context = job_context(language_job())
    assert ActivationCheckpointing().forecast(context).flops == pytest.approx(4 / 3)
    assert ActivationCheckpointing(segments=2).forecast(context).flops == pytest.approx(1 + 1 / 6)
