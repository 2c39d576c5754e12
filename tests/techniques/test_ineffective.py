"""Techniques planted where they can have no effect: each has to say that it did not act."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.job import GlobalBatch
from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.parts.data.collate import tokenized_example
from hasten.parts.kernels import products, rowwise
from hasten.parts.nn import fused_layers, rebind
from hasten.parts.nn.causal_lm import causal_lm
from hasten.techniques import probes
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.feed import Prefetched
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import Autocast, BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from tiny import compiled_in, language_job, run, session_of, tiny_model

needs_kernels = pytest.mark.skipif(bool(rowwise.library().reason), reason="no compiler here")


def even(count: int = 16, length: int = 12) -> list[Any]:
    """Examples of one length, every token trained: nothing to pad, to pack or to leave out."""
    draw = torch.Generator().manual_seed(0)
    return [
        tokenized_example(torch.randint(3, 90, (length,), generator=draw)) for _ in range(count)
    ]


def seen(session: Session, technique: Technique) -> tuple[bool, str]:
    proof = technique.check_effect(session)
    return proof.effective, proof.evidence


def test_records_of_one_length_leave_nothing_to_pack_or_to_group() -> None:
    for technique in (Packed(), LengthGrouped()):
        session = session_of(language_job(data=even(), batch=4), technique)
        run(session)
        effective, evidence = seen(session, technique)
        assert not effective
        assert "0.0%" in evidence


def test_rows_that_hold_one_record_each_have_packed_nothing() -> None:
    job = language_job(data=even(), batch=4)
    technique = PackedEpoch(row_tokens=12)
    session = session_of(job, technique)
    run(session)
    assert seen(session, technique)[0] is False


def test_grouping_within_one_step_groups_nothing() -> None:
    technique = LengthGrouped(window=1)
    session = session_of(language_job(batch=2, steps=4), technique)
    run(session)
    assert seen(session, technique)[0] is False


def test_documents_that_are_rows_of_their_own_need_no_document_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "fits_attention", lambda *tensors: False)  # torch's attention
    for architecture in ("llama", "deepseek_v3"):
        job = language_job(lambda a=architecture: tiny_model(a))
        session = session_of(job, DocumentAttention(), architecture=architecture)
        run(session)
        effective, evidence = seen(session, DocumentAttention())
        assert not effective
        assert "each row is one document" in evidence


@needs_kernels
def test_fused_code_that_takes_no_tensor_has_not_acted() -> None:
    session = session_of(language_job(), FusedLayers())
    run(session)
    assert seen(session, FusedLayers())[0] is True
    session.loss_module.double()  # a format that the kernels refuse
    assert fused_layers.fused(causal_lm(session.model))  # bound as before
    effective, evidence = seen(session, FusedLayers())
    assert not effective
    assert "0 of its kernels ran" in evidence


@needs_kernels
def test_experts_that_fall_back_are_found_out() -> None:
    job = language_job(lambda: tiny_model("deepseek_v3"))
    session = session_of(job, ExpertsImplementation(), architecture="deepseek_v3")
    run(session)
    assert seen(session, ExpertsImplementation())[0] is True
    for module in session.model.modules():
        for function in rebind.bound(module):  # the fused code is gone, the plan remains
            rebind.unbind(module, function)
    effective, evidence = seen(session, ExpertsImplementation())
    assert not effective, evidence


@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_each_kind_of_experts_is_told_by_what_runs(kind: str) -> None:
    job = language_job(lambda: tiny_model("deepseek_v3"))
    session = session_of(job, ExpertsImplementation(kind=kind), architecture="deepseek_v3")
    run(session)
    assert seen(session, ExpertsImplementation(kind=kind))[0] is True
    for other in {"eager", "batched_mm", "grouped_mm"} - {kind}:
        assert seen(session, ExpertsImplementation(kind=other))[0] is False


def test_a_loss_over_tokens_that_all_carry_loss_saves_no_row() -> None:
    def aligned(examples: Any) -> Any:
        from hasten.core.job import with_language_counts
        from hasten.parts.data.collate import padded

        batch = with_language_counts(padded)(examples)
        labels = batch.inputs["input_ids"].clone()  # even the last token has a label
        return replace(batch, inputs={**batch.inputs, "labels": labels})

    session = session_of(language_job(data=even(), collate=aligned), LabelledTokenLoss())
    run(session)
    assert seen(session, LabelledTokenLoss())[0] is False


def test_adapters_that_never_moved_have_not_acted() -> None:
    session = session_of(language_job(lr=0.0), LoRA())
    run(session)
    effective, evidence = seen(session, LoRA())
    assert not effective
    assert "0 of" in evidence


def test_a_cut_that_cuts_nothing_has_not_acted() -> None:
    for technique in (GradientAccumulation(micro_batch_size=64), AdaptiveBatch(initial_size=64)):
        session = session_of(language_job(), technique)
        run(session)
        assert seen(session, technique)[0] is False


# Before the first step nothing has effective, whatever was configured.
WITHOUT_A_STEP: tuple[Technique, ...] = (
    *(
        Packed(),
        PackedEpoch(),
        LengthGrouped(),
        Prefetched(),
        GradientAccumulation(1),
        AdaptiveBatch(2),
    ),
    *(
        LoRA(),
        LabelledTokenLoss(),
        ActivationCheckpointing(),
        Autocast(),
        DDP(),
        CompactAdamW(),
        Muon(),
    ),
    *(WeightAverage(), Checkpoints(interval=1), BalancedRouting()),
    Compiled(bucket=64, share=1.0, backend="aot_eager"),
    *(() if rowwise.library().reason else (FusedAdamW(),)),
)


@pytest.mark.parametrize("technique", WITHOUT_A_STEP, ids=str)
def test_nothing_has_acted_before_the_first_step(technique: Technique, tmp_path: Path) -> None:
    name = "deepseek_v3" if isinstance(technique, BalancedRouting) else "llama"
    job = language_job(lambda: tiny_model(name))
    session = session_of(job, technique, architecture=name, folder=tmp_path)
    assert seen(session, technique)[0] is False


def test_weights_that_are_not_in_the_format_are_told() -> None:
    session = session_of(language_job(), BF16MasterWeights())
    run(session)
    session.loss_module.float()
    assert seen(session, BF16MasterWeights())[0] is False


def test_looking_leaves_random_state_counters_and_gradients_alone() -> None:
    session = session_of(language_job(), Packed(), DocumentAttention())
    run(session)
    before = torch.get_rng_state(), replace(session.progress)
    found = probes.operators(session)
    assert found is not None
    assert probes.count(found, "aten::mm") > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert session.progress == before[1]
    assert all(p.grad is None for p in session.model.parameters())


def test_looking_counts_for_no_other_probe() -> None:
    compiled = Compiled(bucket=64, share=1.0, backend="aot_eager")
    plan = (
        Packed(),
        GradientAccumulation(micro_batch_size=1),
        DocumentAttention(),
        LabelledTokenLoss(),
    )
    job = language_job(lambda: compiled_in("mlp", tiny_model()), steps=1, batch=4)
    session = session_of(job, *plan, compiled)
    run(session)
    before = [technique.check_effect(session) for technique in (LabelledTokenLoss(), compiled)]
    assert probes.operators(session)
    assert [t.check_effect(session) for t in (LabelledTokenLoss(), compiled)] == before


def test_looking_is_no_pass_of_modules_that_predict_further_ahead() -> None:
    session = session_of(language_job(steps=2), MultiTokenPrediction())
    run(session)
    before = MultiTokenPrediction().check_effect(session)
    assert probes.operators(session)
    assert MultiTokenPrediction().check_effect(session) == before


def test_what_was_laid_out_is_counted_as_the_session_did() -> None:
    job = replace(language_job(steps=3), batch=GlobalBatch(examples=8))
    session = session_of(job, Packed())
    run(session)
    setup = session.setup
    assert setup.collate is not None
    found = probes.laid_out(session, setup.sampler, setup.collate)
    assert found is not None
    assert (found.positions, found.tokens) == (session.progress.positions, session.progress.tokens)
