"""INDEXER: what the indexers of sparse attention learn."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch, NamedParameters, OptimizerFactory
from hasten.core.setup import CLIP_APART, SeparateLoss, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, setting
from hasten.errors import InputError
from hasten.parts.nn.causal_lm import is_indexer
from hasten.parts.nn.sparse_attention import STAGES, IndexerLearning, indexed_attentions, learn

ARCHITECTURES = ("deepseek_v32",)
LISTED_LAYERS = 8  # most layers whose KL is listed one by one
NEEDED = {
    Slot.ATTENTION: "document_attention, which computes it in its own passes",
    Slot.COLLATE: "packed, because padding would be learnt from",
}


@dataclass(frozen=True)
class IndexerLoss(Technique):
    """Trains the indexers that choose the keys of sparse attention, by a loss in each layer.

    The loss of a query is KL(attention of the layer's heads || softmax(index scores)), of which
    only the indexers get a gradient: DeepSeek-V3.2, arXiv:2512.02556, eq. 3 (``warmup``) and 4
    (``sparse``). They have a learning rate and a clip of their own, so the model's step is what it
    would be without the loss.
    """

    slot = Slot.INDEXER
    stage: str = setting(
        "sparse",
        "warmup: attention over all keys, nothing but indexers learns; sparse: over the chosen "
        "keys, all learn",
        only=STAGES,
    )
    weight: float = setting(1.0, "of the loss; 0: the indexers stay as they are", least=0)
    learning_rate: float | None = setting(None, "peak rate of the indexers; null: the job's")
    clip: float = setting(1.0, "largest norm of the indexers' gradient; 0: unlimited", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.learning_rate
        if rate is not None and (not isinstance(rate, int | float) or not 0 < rate < math.inf):
            raise ValueError(f"learning_rate is {rate!r}; it must be a number above 0, or null")
        for name in ("weight", "clip"):
            if not getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY if self.weight else Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        refuse_company(setup, self.stage)
        if self.weight:
            setup.indexer = _Learning(self, setup)
            setup.optimizer = _grouped(setup.optimizer, self.learning_rate)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reasons, topk = context.model.why_not_of(ARCHITECTURES), context.model.index_topk
        if not reasons and self.stage == "sparse" and 0 < context.examples.longest <= topk:
            return (
                f"the longest example has {context.examples.longest} tokens and an indexer chooses "
                f"{topk} keys, so it would choose all of them and learn nothing about its choice; "
                "give longer examples (cutoff_len), or take stage: warmup",
            )
        return reasons

    def check_effect(self, session: Session) -> EffectCheck:
        learning = session.setup.indexer
        if not isinstance(learning, _Learning):
            return EffectCheck(False, "no indexer learns")
        return learning.proof()


def refuse_company(setup: Setup, stage: str) -> None:
    """Raises InputError for a job or plan with which the loss can't be computed."""
    name, plan = IndexerLoss.name(), setup.plan
    for slot, needed in NEEDED.items():
        if slot not in plan:
            raise InputError(f"plan: {name} needs {needed}; add it to the plan")
    for technique in plan:
        kind = technique.name()
        if kind in ("tensor_parallel", "deep_speed") or technique.settings().get("tp", 1) > 1:
            raise InputError(
                f"plan: {name} can't go with {kind}, which splits an attention's heads or has an "
                "engine of its own; take ddp, fsdp2, expert_parallel or pipeline"
            )
        if technique.slot is Slot.COMPILE:
            raise InputError(f"plan: {name} isn't tested with {kind}; leave one of them out")
        if technique.slot is Slot.ROUTING and stage == "warmup":
            raise InputError(
                f"plan: {kind} moves the routers' biases, and in {name}'s stage warmup nothing but "
                f"the indexers learns; leave {kind} out"
            )
    if setup.job.unit == "pairs" or not setup.job.counted:
        raise InputError(
            f"plan: {name} isn't tested with preference pairs or a loss of your own; leave it out"
        )


class _Learning(SeparateLoss):
    """The indexers of a run that learn, and what they have learnt.

    Args:
        learnings: the state of each indexer's loss, of all layers of the model.
        table: per layer the sums of ``IndexerLearning`` at the last call of ``metrics``.
    """

    def __init__(self, technique: IndexerLoss, setup: Setup) -> None:
        self.technique, self.setup, self.clip = technique, setup, technique.clip
        self.learnings: list[IndexerLearning] = []
        # Weak, because a pipeline's rank frees the layers of other stages.
        self._of: weakref.WeakKeyDictionary[Any, IndexerLearning] = weakref.WeakKeyDictionary()
        self.table = torch.zeros(0, 5, dtype=torch.float64)

    def prepare(self, loss_module: nn.Module) -> None:
        if self.technique.stage == "warmup":
            loss_module.requires_grad_(False)
        ahead: Any = getattr(loss_module, "ahead", None)
        rests = set() if ahead is None or ahead.weight else {*ahead.modules()}
        for _, attention in indexed_attentions(loss_module):
            if attention not in rests:
                indexer: Any = attention.indexer
                indexer.requires_grad_(True)
                self.learnings.append(IndexerLearning(self.technique.stage))
                self._of[attention] = self.learnings[-1]
        self._attach()

    def _attach(self) -> None:
        for attention, learning in self._of.items():
            learn(attention, learning)

    def begin(self, tokens: int) -> None:
        setup = self.setup
        scale = self.technique.weight * setup.layout.averages * setup.loss_factor
        for learning in self.learnings:
            learning.factor = scale / (tokens or 1)

    def marked(self, micro_batch: MicroBatch) -> MicroBatch:
        if micro_batch.counts.tokens:  # filler behind examples is marked already
            return micro_batch
        fillers = len(micro_batch.inputs["document_lengths"])
        return replace(micro_batch, inputs={**micro_batch.inputs, "fillers": fillers})

    def metrics(self) -> dict[str, float]:
        sums = self._taken()
        layout = self.setup.layout
        if self.setup.rank_sync.diverged:
            summed = self.setup.rank_sync.sum(sums.flatten())
        else:  # layers of other stages too; ranks with the same layer and examples change no ratio
            summed = layout.all_reduce_world(sums.flatten())
        sums = summed.view(-1, 5)
        if not bool(sums[:, 1].any()):
            return {}
        self.table = sums
        metrics = {"indexer_kl": float(_kl(sums).mean())}
        if float(sums[:, 4].sum()):
            metrics["indexer_captured"] = float(sums[:, 2].sum() / sums[:, 3].sum())
        return metrics

    def _taken(self) -> Tensor:
        device = torch.device(self.setup.job.device)
        rows = torch.stack([learning.sums.to(device) for learning in self.learnings])
        for learning in self.learnings:
            learning.sums = torch.zeros_like(learning.sums)
        return rows.cpu()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        weights = [p for attention in self._of for p in attention.indexer.parameters()]
        learns = [p.requires_grad for p in weights]
        for attention in self._of:
            learn(attention, None)
        for weight in weights:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight, learnt in zip(weights, learns, strict=True):
                weight.requires_grad_(learnt)
            self._attach()

    def proof(self) -> EffectCheck:
        """Returns the KL of each layer, and the captured share, as they were in the last step."""
        if not len(self.table):
            return EffectCheck(False, "no query has been counted")
        kl = _kl(self.table).tolist()
        listed = ", ".join(f"{value:.3g}" for value in kl[:LISTED_LAYERS])
        if len(kl) > LISTED_LAYERS:
            listed = f"{min(kl):.3g} to {max(kl):.3g}, mean {sum(kl) / len(kl):.3g}"
        evidence = f"{self.technique.stage}: KL of {len(kl)} indexers {listed}"
        measured = float(self.table[:, 4].sum())
        if not measured:
            return EffectCheck(
                True,
                f"{evidence}; nothing was tested of their choice, as no document of the last step "
                "has more tokens than they choose",
            )
        captured = float(self.table[:, 2].sum() / self.table[:, 3].sum())
        return EffectCheck(
            True, f"{evidence}; the chosen keys have {captured:.1%} of the best possible attention"
        )


def _kl(table: Tensor) -> Tensor:
    """Returns the mean KL of a query, by layer."""
    return table[:, 0] / table[:, 1].clamp(min=1)


def _grouped(job_factory: OptimizerFactory | None, rate: float | None) -> OptimizerFactory:
    """Returns a factory of the job's optimizer, with the indexers in groups of their own."""

    def factory(named: NamedParameters) -> Optimizer:
        pairs = list(named)
        assert job_factory is not None  # set by prepare()
        optimizer = job_factory(pairs)
        ids = {id(p) for name, p in pairs if is_indexer(name)}
        changes: dict[str, Any] = {CLIP_APART: True, **({} if rate is None else {"lr": rate})}
        groups: list[dict[str, Any]] = []
        for is_own in (False, True):
            for group in optimizer.param_groups:
                members = [p for p in group["params"] if (id(p) in ids) == is_own]
                if members:
                    groups.append({**group, "params": members, **(changes if is_own else {})})
        optimizer.param_groups[:] = groups
        return optimizer

    return factory
