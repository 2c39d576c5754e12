"""The proof on the first step: a plan computes the same as plain transformers.

It runs in hasten's own trainer. Before the first step two short documents of the job's
data run both ways. One is the session as the plan has built it. The other is the plain
model of transformers with its own loss, which shares the session's weights. Loss and
gradients are compared as in :mod:`hasten.measure.quality.first_step`. If they differ,
the techniques that change a pass are removed from the plan one at a time. The session
is built again without them.

The comparison is left out if there is no reference. This holds for weights that are
sharded over ranks or stored in another form, an objective of its own, and compiled
code. Indexers that learn rest, and then compute what they do in transformers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hasten.core.plan import Plan
from hasten.core.setup import Session
from hasten.core.slot import CHANGES_A_PASS, Slot
from hasten.core.step import forward_of
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.errors import StoppedError
from hasten.machine import memory
from hasten.measure.quality.first_step import FirstStepProof, proof_is_on
from hasten.measure.quality.preserved import without_dropout
from hasten.models.load import take_own_attention
from hasten.parts.data.collate import TokenizedExample, padded, tokenized_example
from hasten.parts.data.pairs import PreferencePair
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.losses import PLAIN
from hasten.parts.nn.preference import PreferenceLoss
from hasten.parts.nn.preference_objectives import ALONE
from hasten.parts.nn.sparse_attention import indexed_attentions

SLOTS_WITHOUT_PLAIN_COUNTERPART = (Slot.OBJECTIVE, Slot.ROUTING, Slot.COMPILE)
MOST_TOKENS = 64  # tokens of a document
BEYOND = 1.5  # tokens of a document to the keys that an indexer chooses
MOST_EXAMPLES = 1024  # examples among which a document longer than that is looked for
_LOG = logging.getLogger(__name__)


def proven(
    build: Callable[[Plan], Session], plan: Plan, tell: Callable[[str], None]
) -> tuple[Session, Plan]:
    """Returns the session of the plan, without techniques that differ from the plain model."""
    session = build(plan)
    difference = _compared(session, plan) if proof_is_on() else None
    candidates = [t for t in plan if t.slot in CHANGES_A_PASS]
    while difference is not None and candidates:
        # Packing is removed last: if removing either of two helps, the other one is at fault.
        for technique in sorted(candidates, key=lambda t: t.slot is Slot.COLLATE):
            reduced_plan = Plan([t for t in plan if t is not technique])
            del session
            session = build(reduced_plan)
            remaining_difference = _compared(session, reduced_plan)
            if remaining_difference is None:
                break
        candidates.remove(technique)
        tell(f"warning: {technique.name()} was taken out of the plan: {difference}")
        plan, difference = reduced_plan, remaining_difference
    return session, plan


FIRST_LOSS = 0.01  # relative; log-ratios are rounding alone
NARROW_FIRST_LOSS = 0.1  # with weights or products in half precision


def check_first_loss(session: Session) -> Callable[[StepMetrics], None]:
    """Returns a check of a training's first loss on preference pairs.

    Before the first update, the policy is its own reference, so every log-ratio is 0 and the
    loss is known (ln 2 for DPO). Another value shows that a layout or the reference is wrong.
    """
    job, loss = session.setup.job, session.loss_module
    reference = job.reference
    if not (isinstance(loss, PreferenceLoss) and reference is not None and reference.is_start):
        return lambda metrics: None
    if session.progress.step or loss.objective.nll_weight:
        return lambda metrics: None
    zeros, labels = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)
    if loss.objective.loss in ALONE:
        if loss.objective.desirable_weight != loss.objective.undesirable_weight:
            return lambda metrics: None
        labels[0, 1] = 0  # each answer is judged alone
    expected = float(loss.objective(zeros, zeros, labels))
    is_narrow = any(p.dtype.itemsize < 4 for p in session.model.parameters())
    is_narrow |= not isinstance(session.setup.precision.region(), contextlib.nullcontext)
    bound = NARROW_FIRST_LOSS if is_narrow else FIRST_LOSS

    def check(metrics: StepMetrics) -> None:
        if metrics.step == 1 and not abs(metrics.loss - expected) <= bound * max(expected, 1e-3):
            raise StoppedError(
                f"the first loss is {metrics.loss:.6g} and must be {expected:.6g}, because the "
                "policy still equals its reference. A technique of the plan computes the two in "
                "different ways: remove techniques from plan one at a time, and report it"
            )

    return check


def _compared(session: Session, plan: Plan) -> str | None:
    """Returns how the session differs from the plain model; None: equal, or not comparable."""
    learns = {p: p.requires_grad for p in session.model.parameters()}
    devices = [p.device.index or 0 for p in itertools.islice(learns, 1) if p.is_cuda]
    indexer = session.setup.indexer
    resting = contextlib.nullcontext() if indexer is None else indexer.paused()
    try:
        with torch.random.fork_rng(devices), resting:
            passes = _SessionPasses(session)
            marker = [t for t in plan if t.slot in CHANGES_A_PASS][:1]
            proof = FirstStepProof(passes, marker, "transformers")
            routing = session.setup.routing
            host_objects = [] if routing is None else [routing]
            with without_dropout(passes.plain):  # the session's own loss is already disabled
                removed = proof.check({"documents": passes.documents}, *host_objects)
        if proof.batches and not removed:
            _LOG.info("%s", proof)
        return str(removed[0].difference) if removed else None
    except _NothingToCompareError as reason:
        _LOG.info("no proof on the first step: %s", reason)
        return None
    finally:
        for parameter, learned in learns.items():  # the plain model shares them
            parameter.requires_grad_(learned)


class _NothingToCompareError(Exception):
    """The reason why a session has no plain counterpart."""


class _SessionPasses:
    """A session and its plain counterpart, on two documents."""

    def __init__(self, session: Session) -> None:
        self._session, setup = session, session.setup
        other = [t.name() for t in setup.plan if t.slot in SLOTS_WITHOUT_PLAIN_COUNTERPART]
        if other:
            raise _NothingToCompareError(f"{', '.join(other)} has no plain counterpart")
        if not setup.layout.replicated:
            raise _NothingToCompareError("weights are dealt out over ranks")
        if not all(p.is_floating_point() for p in session.model.parameters()):
            raise _NothingToCompareError("weights are stored in another form")
        terms = getattr(session.loss_module, "terms", PLAIN)
        if terms.label_smoothing or terms.z_loss:
            raise _NothingToCompareError("the recipe adds to the loss")
        trained = sum(4 * p.numel() for p in session.model.parameters() if p.requires_grad)
        if not trained:
            raise _NothingToCompareError("nothing but the indexers learns")
        if 3 * trained > memory.free_bytes(setup.job.device):
            raise _NothingToCompareError("memory is short")
        if any(getattr(t, "budget", None) is not None for t in setup.plan):
            raise _NothingToCompareError("activation checkpointing with a budget measures a pass")
        self.documents = _documents(setup.job.examples)
        if indexed := indexed_attentions(session.model):
            self.documents[:1] = _beyond_top_k(session, indexed) or self.documents[:1]
        self.plain = _plain_model(session)
        # The job's own loss is plain too, and has no technique; of texts, transformers' is used.
        self._plain_loss = setup.job.loss(self.plain) if setup.job.unit == "pairs" else None
        self._is_plain, self._is_float32 = True, False

    @property
    def model(self) -> nn.Module:
        return self._session.model

    @property
    def models(self) -> list[nn.Module]:
        return [self.model]

    @property
    def is_mixed(self) -> bool:
        region = self._session.setup.precision.region()
        return not isinstance(region, contextlib.nullcontext)

    def loss(self, batch: Any) -> Tensor:
        session, setup = self._session, self._session.setup
        session.loss_module.train()
        region = contextlib.nullcontext() if self._is_float32 else setup.precision.region()
        with region:
            if self._is_plain and self._plain_loss is None:
                plain: Tensor = self.plain(**batch).loss
                return plain
            module = self._plain_loss if self._is_plain else session.loss_module
            assert module is not None
            total, count = forward_of(None if self._is_plain else setup.routing, module, batch)
            loss: Tensor = total / count
            return loss

    def batch(self, host_batch: Any, techniques: Sequence[Technique]) -> Any:
        setup, documents = self._session.setup, host_batch["documents"]
        if techniques:
            collate = setup.collate or setup.job.collate
            return collate(documents).to(setup.job.device)
        if self._plain_loss is not None:
            return setup.job.collate(documents).to(setup.job.device)
        batch = padded(documents)
        mask = torch.zeros_like(batch["input_ids"])
        for row, document in enumerate(documents):
            mask[row, : document.length] = 1
        batch = {**batch, "shift_labels": batch["labels"], "attention_mask": mask}
        return {k: v.to(setup.job.device) for k, v in batch.items()} | {"use_cache": False}

    @contextlib.contextmanager
    def active(self, techniques: Sequence[Technique]) -> Iterator[None]:
        self._is_plain = not techniques
        yield

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        self._is_float32 = True
        try:
            yield
        finally:
            self._is_float32 = False


def _documents(examples: Any) -> list[Any]:
    """Returns two short documents of different length, one with masked tokens; or two pairs."""
    if isinstance(examples[0], PreferencePair):
        return _short_pairs(examples)
    documents: list[TokenizedExample] = []
    for index in range(min(len(examples), 64)):
        example = examples[index]
        if not isinstance(example, TokenizedExample):
            raise _NothingToCompareError("the data isn't stored tokens")
        ids = example.input_ids[:MOST_TOKENS]
        if len(ids) >= 4:
            documents.append(tokenized_example(ids))
        if len(documents) == 2:
            break
    if len(documents) < 2:
        raise _NothingToCompareError("the data has no two documents of four tokens")
    first, second = documents
    masked = second.trained.copy()
    masked[: len(masked) // 2] = False
    longer = max(first.length * 2 // 3, 3)  # always of another length than the second
    cut = first.input_ids if first.length != second.length else first.input_ids[:longer]
    return [tokenized_example(cut), tokenized_example(second.input_ids, masked)]


def _beyond_top_k(session: Session, indexed: list[tuple[str, nn.Module]]) -> list[Any]:
    """Returns a document with more keys than an indexer chooses, in a list; empty without one."""
    job, config = session.setup.job, causal_lm(session.model).config
    tokens = int(BEYOND * config.index_topk)
    heads = 2 * config.index_n_heads + 3 * config.num_attention_heads * len(indexed)
    examples = (job.examples[index] for index in range(min(len(job.examples), MOST_EXAMPLES)))
    if 16 * heads * tokens**2 > memory.free_bytes(job.device):  # transformers' scores and weights
        reason = "memory is short for one that is"
    elif long := next((e for e in examples if _is_longer(e, config.index_topk)), None):
        return [tokenized_example(long.input_ids[:tokens])]
    else:
        reason = f"nor any of the first {MOST_EXAMPLES} examples"
    _LOG.info(
        "the proof on the first step tests nothing of the indexer's choice: no compared document "
        "is longer than index_topk (%d), %s",
        config.index_topk,
        reason,
    )
    return []


def _is_longer(example: Any, tokens: int) -> bool:
    return isinstance(example, TokenizedExample) and example.length > tokens


def _short_pairs(pairs: Any) -> list[PreferencePair]:
    """Returns two pairs of a few tokens: with a common prompt, and without one."""
    rows = [row for index in range(min(len(pairs), 64)) for row in pairs[index].rows]
    rows = [row.input_ids[:MOST_TOKENS] for row in rows if row.length >= 8]
    if len(rows) < 2:
        raise _NothingToCompareError("the data has no two answers of eight tokens")
    first, second = rows[0], next((r for r in rows if not np.array_equal(r, rows[0])), rows[1])

    def answer(ids: Any, prompt: int) -> TokenizedExample:
        return tokenized_example(ids, np.arange(len(ids)) >= prompt)

    half = len(first) // 2
    other = np.concatenate([first[:half], second[half : half + 5]])
    return [
        PreferencePair(answer(first, half), answer(other, half)),
        PreferencePair(answer(second, 1), answer(first[:-2], 1)),
    ]


def _plain_model(session: Session) -> Any:
    """Returns the model as transformers builds it, over the session's parameters and buffers."""
    job, setup = session.setup.job, session.setup
    if job.skeleton is None or setup.adapter is None:
        raise _NothingToCompareError("the model can't be built without weights")
    try:
        plain = setup.adapter(job.skeleton())
        state = session.model.state_dict(keep_vars=True)
        plain.load_state_dict(state, assign=True)
        inner, theirs = causal_lm(plain), dict(session.model.named_buffers())
    except (RuntimeError, ValueError, KeyError) as error:
        text = str(error).partition("\n")[0]
        raise _NothingToCompareError(f"the weights have another form: {text}") from error
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:
            if name not in theirs:
                raise _NothingToCompareError(f"the buffer {name} has no counterpart")
            owner, _, key = name.rpartition(".")
            plain.get_submodule(owner)._buffers[key] = theirs[name]
    if any(p.is_meta for p in plain.parameters()):
        raise _NothingToCompareError("a weight has no counterpart")
    indexer = any("Indexer" in type(module).__name__ for module in inner.modules())
    if indexer:
        inner.set_attn_implementation("eager")
    else:
        take_own_attention(inner)
    plain.train()
    return plain
