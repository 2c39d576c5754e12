"""A second engine takes the plain one's place; sums over ranks are the communication's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.core.job import MicroBatch, WorkCounts
from hasten.core.layout import NoCompression, OneProcess
from hasten.core.setup import RankSync, Setup, SumsEachStep
from hasten.core.slot import Slot
from hasten.core.step import PlainEngine
from hasten.core.technique import EffectCheck, Fidelity, Technique
from hasten.parts.comm import streaming_local_sgd as parts
from hasten.parts.comm.codecs import codec
from hasten.parts.nn.causal_lm import causal_lm
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.local import LocalCommunication, Stream
from hasten.techniques.precision import BF16MasterWeights
from tiny import language_job, run, session_of, tiny_model


class Stages(nn.Module):
    """A language model cut in two; what crosses the cut is detached, as between two machines."""

    def __init__(self, loss_module: nn.Module) -> None:
        super().__init__()
        self.whole = loss_module
        self.crossed = 0

    def first(self, input_ids: Tensor) -> Tensor:
        trunk = causal_lm(self.whole.model).model
        hidden = trunk.embed_tokens(input_ids)
        return self._layers(trunk, hidden, slice(0, 1))

    def second(self, hidden: Tensor, labels: Tensor) -> Tensor:
        model = causal_lm(self.whole.model)
        hidden = model.model.norm(self._layers(model.model, hidden, slice(1, None)))
        logits = model.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")

    @staticmethod
    def _layers(trunk: Any, hidden: Tensor, part: slice) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        rotary = trunk.rotary_emb(hidden, position_ids=positions)
        for layer in trunk.layers[part]:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        return hidden


class TwoStageEngine(PlainEngine):
    """All forward passes of both stages first, then all backward passes (GPipe)."""

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        stages: Any = self.module
        sent, losses = [], []
        for micro_batch in micro_batches:
            out = stages.first(micro_batch.inputs["input_ids"])
            arrived = out.detach().requires_grad_()
            sent.append((out, arrived))
            losses.append(stages.second(arrived, micro_batch.inputs["labels"]))
        for (out, arrived), loss in zip(sent, losses, strict=True):
            (loss / denominator).backward()
            out.backward(arrived.grad)
            stages.crossed += 1
            self.setup.precision.accumulate_gradients()
        return torch.stack([loss.detach() for loss in losses]).sum()


class TwoStageLayout(OneProcess):
    def apply_model_parallel(self, module: nn.Module) -> nn.Module:
        return Stages(module)


@dataclass(frozen=True)
class TwoStages(Technique):
    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING

    def apply(self, setup: Setup) -> None:
        setup.layout, setup.engine = TwoStageLayout(), TwoStageEngine

    def check_effect(self, session: Any) -> EffectCheck:
        return EffectCheck(session.module.crossed > 0, f"{session.module.crossed} crossings")


@pytest.mark.parametrize(
    "more", [(), (BF16MasterWeights(),)], ids=["float64", "bf16 with float32 masters"]
)
def test_a_pipeline_engine_trains_to_the_same_weights_without_a_change_to_the_step(
    more: Any,
) -> None:
    dtype = torch.float32 if more else torch.float64
    tolerance = 2e-2 if more else 1e-10
    job = language_job(lambda: tiny_model(dtype=dtype), steps=3)
    plain = session_of(job, GradientAccumulation(micro_batch_size=3), *more)
    piped = session_of(job, GradientAccumulation(micro_batch_size=3), TwoStages(), *more)
    for one, two in zip(run(plain), run(piped), strict=True):
        assert two.loss == pytest.approx(one.loss, rel=tolerance)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=tolerance)
    for one, two in zip(plain.finish().parameters(), piped.finish().parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
    proof = TwoStages().check_effect(piped)
    assert proof.evidence == "9 crossings"


class ThreeAlike(OneProcess):
    """A layout of three ranks that all have the same."""

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return 3 * values


def test_by_default_counts_and_the_wish_to_stop_are_summed_in_one_go() -> None:
    rank_sync = SumsEachStep(ThreeAlike())
    mine = WorkCounts(examples=1, tokens=5, positions=8, trained_tokens=4, attention_pairs=25)
    assert rank_sync.counts(mine, stop=False, passes=2) == (WorkCounts(3, 15, 24, 12, 75), False, 2)
    assert rank_sync.counts(mine, stop=True, passes=2)[1]
    assert rank_sync.sum(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_wire_that_is_an_agreement_takes_the_place_of_the_default() -> None:
    session = session_of(language_job())
    assert not session.setup.rank_sync.diverged
    session.setup.communication = LocalCommunication(
        session.setup, "stream", lambda parameters: None
    )  # type: ignore[arg-type,return-value]
    assert isinstance(session.setup.communication, RankSync)
    assert session.setup.rank_sync is session.setup.communication
    assert not isinstance(NoCompression(), RankSync)


def test_ranks_that_train_apart_take_the_others_to_have_what_they_have() -> None:
    setup = session_of(language_job()).setup
    setup.layout.size = 3  # type: ignore[misc]
    communication = LocalCommunication(
        setup, "stream", lambda weights: parts.Stream(weights, codec("int4"), 2)
    )
    counts, stop, most = communication.counts(
        WorkCounts(1, 5, 8, 4, 25, units=4), stop=True, passes=2
    )
    assert (*astuple(counts), most) == (3, 15, 24, 12, 75, 12, 0, 2)
    assert not stop  # until an exchange has told the others
    assert communication.sum(torch.ones(2)).tolist() == [3.0, 3.0]


def test_on_one_rank_nothing_is_settled_and_counts_stay() -> None:
    session = session_of(language_job(), Stream())
    run(session)
    before = session.progress.tokens
    session.synchronize()
    assert session.progress.tokens == before
    assert isinstance(session.setup.communication, NoCompression)
