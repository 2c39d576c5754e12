"""Checks that a worker makes of a plan: gradients, losses, and a training on eval data.

One step's gradient is compared with float64, across documents, and between optimizers. A ROUNDING
technique requires the first of these checks.

    (1) Reference: The bare model in float64, one example at a time, without packing,
    padding or accumulation.
    (2) Gradient: One step of the plan through session, feed, cut, engine and precision.
    (3) Error: |g - r| / |r| over all tensors, and of the worst tensor.

For a tensor with a gradient near zero (a key's bias: exactly zero in theory), a
relative error has no meaning. Its error is relative to a thousandth of the average for
a tensor of its size.

With several ranks, each rank compares its gradient after communication. If ranks hold
parts, these are gathered and the first rank compares.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.job import Stop, WorkCounts, with_nll_unit
from hasten.core.layout import Layout, SplitsModel
from hasten.core.loop import Evaluation, evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, Setup, in_one_piece, prepare, run_once
from hasten.core.slot import Slot
from hasten.core.step import assemble, batches, training
from hasten.errors import InputError
from hasten.machine.lazy_torch import is_dtensor
from hasten.measure.quality.bench import CheckContext, local, still, trainable
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.nn.causal_lm import causal_lm
from hasten.recipe.build import total_steps

REFERENCE = "reference.pt"
SMALL = 1e-3  # of an average tensor's gradient


class GradientRecorder(torch.optim.SGD):
    """Keeps the gradients it is given by name and moves nothing."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pairs = [(n, p) for n, p in named if p.requires_grad]
        self.names = [n.removeprefix("module.") for n, _ in pairs]
        self.weights: list[Tensor] = []  # the true weights, as a precision or a layout has them
        self.gradients: dict[str, Tensor] = {}
        super().__init__([p for _, p in pairs], lr=0.0)

    def step(self, closure: Any = None) -> None:
        self.weights = [p for group in self.param_groups for p in group["params"]]
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in zip(self.names, self.weights, strict=True)
        }

    def gather_full(self, layout: Layout) -> dict[str, Tensor]:
        """The gradients in whole tensors, on the first rank at least; all ranks call it.

        Raises:
            InputError: the layout can't bring them together.
        """
        if layout.replicated:
            return self.gradients
        if not isinstance(layout, SplitsModel):
            raise InputError(
                "this layout has no way to bring its ranks' gradients together for a comparison"
            )
        gathered = {}
        for (name, gradient), weight in zip(self.gradients.items(), self.weights, strict=True):
            placed = layout.placed(weight, gradient)
            full = placed.full_tensor() if is_dtensor(placed) else placed
            if layout.keeps and name not in layout.copies:
                gathered[name] = full.cpu()
        # Stages have other names.
        rows: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(gathered, rows if not dist.get_rank() else None)
        return {name: tensor for row in rows if row for name, tensor in row.items()}


def reference(bench: CheckContext, plan: Plan) -> dict[str, Any]:
    """Write the float64 gradient of the proof's examples; what was taken, and the loss.

    Of the plan only the adapter is heeded: it decides which parameters there are.
    """
    (bench.folder / REFERENCE).unlink(missing_ok=True)  # of an earlier verification that was killed
    job = bench.small(plan)
    adapter = prepare(job, plan, bench.context, bench.folder).adapter or job.adapter
    torch.manual_seed(job.seed)  # as `assemble` does
    model = adapter(job.build_model())
    if hasattr(model, "set_experts_implementation"):
        causal_lm(model).set_experts_implementation("eager")  # the grouped product has no float64
    module = job.loss(model).double().to(torch.device(job.device)).train()
    still(module)
    examples = [job.examples[i] for i in range(len(job.examples))]
    batches = [job.collate([example]) for example in examples]
    counts = sum((batch.counts for batch in batches), WorkCounts())
    if job.unit == "pairs":
        batches = [with_nll_unit(batch, counts) for batch in batches]
    total = 0.0
    for batch in batches:
        loss, _ = module(**batch.to(job.device).inputs)
        (loss / counts.units).backward()
        total += float(loss.detach())
    gradients = {n: _cpu(p.grad if p.grad is not None else p * 0) for n, p in trainable(module)}
    torch.save({"loss": total / counts.units, "gradients": gradients}, bench.folder / REFERENCE)
    return {"loss": total / counts.units, **bench.taken(examples)}


def gradient(
    bench: CheckContext, plan: Plan, cut: str = "planned", padded: bool = False, step: int = 1
) -> dict[str, Any]:
    """Errors of one step of the plan against the reference.

    Args:
        cut: as the plan cuts, all examples in one micro-batch, or one example in each.
        padded: rows laid out as the job does without a technique, whatever the plan's collator.
        step: which one with a finite gradient; no weight moves, so that all should have the same.
    """
    job = replace(bench.small(plan), optimizer=GradientRecorder, max_grad_norm=None)
    setup = prepare(job, plan, bench.context, bench.folder)
    if cut != "planned":
        setup.split_micro_batches = (
            in_one_piece if cut == "whole" else lambda examples: [[r] for r in examples]
        )
        setup.run_passes = run_once
    if padded:
        setup.collate = job.collate
    session = assemble(setup)
    still(session.loss_module)
    finite = (m for m in training(session) if not m.skipped)
    metrics = next(itertools.islice(finite, step - 1, None), None)
    if metrics is None or not isinstance(session.optimizer, GradientRecorder):
        raise RuntimeError("no step of the plan had a finite gradient that could be looked at")
    passes = session.progress.micro_batches / max(session.progress.step, 1)
    report = {"loss": metrics.loss, "micro_batches": passes, "ranks": setup.layout.size}
    gradients = session.optimizer.gather_full(setup.layout)
    if not (setup.layout.replicated or bench.context.world.is_main):
        return report  # it has brought its part
    expected = torch.load(bench.folder / REFERENCE, mmap=True)
    loss = abs(metrics.loss - expected["loss"]) / max(abs(expected["loss"]), 1e-30)
    return {**errors(gradients, expected["gradients"]), "loss_error": loss, **report}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """``error`` over all tensors, and the ``worst`` tensor's with its ``name``.

    Raises:
        RuntimeError: other parameters learn than in the reference.
    """
    if {n: g.shape for n, g in actual.items()} != {n: g.shape for n, g in expected.items()}:
        differ = sorted(set(actual) ^ set(expected)) or ["their shapes"]
        raise RuntimeError(f"other parameters learn than without techniques: {differ[0]}")
    square = sum(float(g.double().square().sum()) for g in expected.values())
    numbers = sum(g.numel() for g in expected.values())
    missed, worst, name = 0.0, 0.0, ""
    for key, right in expected.items():
        off = float((_cpu(actual[key]) - right).norm())
        floor = SMALL * math.sqrt(square * right.numel() / numbers)
        share = off / max(float(right.norm()), floor, 1e-300)
        missed += off**2
        if not share <= worst:  # NaN is the worst
            worst, name = share, key
    return {"error": math.sqrt(missed / max(square, 1e-300)), "worst": worst, "name": name}


def _cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


# Whether one document's loss depends on another: change all others and look.
#
# The documents are laid out together, as the plan does it. Loss is asked of one alone; then every
# token of the others becomes another token, lengths kept, and the loss of that one has to stay.
# Bits may differ where experts multiply the tokens of several documents in one product, so a
# difference within rounding is none.

DOCUMENTS = 4  # of the proof's examples, laid out together


def leak(bench: CheckContext, plan: Plan) -> dict[str, Any]:
    """The largest relative change of a document's loss by changes of the others."""
    job = bench.small(plan)
    session = assemble(prepare(job, plan, bench.context, bench.folder))
    still(session.loss_module)
    examples = [job.examples[i] for i in range(min(DOCUMENTS, len(job.examples)))]
    changed = others(examples)
    worst, where = 0.0, 0
    for index, example in enumerate(examples):
        before = _loss(session, examples, index)
        after = _loss(session, [example if i == index else c for i, c in enumerate(changed)], index)
        change = abs(after - before) / max(abs(before), 1e-30)
        if not change <= worst:
            worst, where = change, index
    return {"change": worst, "document": where, "documents": len(examples)}


def others(examples: Sequence[Any]) -> list[Any]:
    """The same lengths with another token at every position, of those that occur."""
    rows = [row for example in examples for row in example.rows]
    low = min(int(r.input_ids.min()) for r in rows)
    span = max(int(r.input_ids.max()) for r in rows) - low + 1
    step = max(span // 3, 1)

    def change(r: TokenizedExample) -> TokenizedExample:
        return TokenizedExample(
            (low + (r.input_ids - low + step) % span).astype(np.int32), r.trained
        )

    return [example.mapped(change) for example in examples]


def _loss(session: Session, examples: Sequence[Any], index: int) -> float:
    """The loss of one document in a batch; the tokens of the others have no loss."""
    setup = session.setup

    def without_loss(r: TokenizedExample) -> TokenizedExample:
        return TokenizedExample(r.input_ids, np.zeros_like(r.trained))

    silent = [r if i == index else r.mapped(without_loss) for i, r in enumerate(examples)]
    batch = (setup.collate or setup.job.collate)(silent).to(setup.job.device)
    with setup.precision.region():
        loss, _ = session.module(**batch.inputs)
    return float(loss.detach())


# The same gradients through two optimizers: the proof that another form of one update rule owes.
#
# A gradient says nothing of an optimizer. So the plan without it makes some steps, its gradients
# are kept, and the plan with it is given the same ones, tensor by tensor. What the weights have
# moved by is compared. A weight of size w in float32 can't show a move finer than w / 2^23, so that
# a small learning rate is known less exactly; the floor that follows is part of the answer.

STEPS = 3
Named = dict[str, Tensor]


def update(bench: CheckContext, plan: Plan, without: list[Any]) -> dict[str, Any]:
    """Relative difference of what the weights moved by, and the floor that float32 sets.

    ``without`` is the plan without its optimizer, in its stored form.
    """
    usual = _session(bench, bench.read(without))
    start = _weights(usual)
    step_gradients = [_step(usual, None, number) for number in range(STEPS)]
    ended = _weights(usual)
    del usual
    ours = _session(bench, plan)
    for number, gradients in enumerate(step_gradients):
        _step(ours, gradients, number)
    weights = _weights(ours)
    moved = _norm({n: ended[n] - w for n, w in start.items()})
    difference = _norm({n: weights[n] - w for n, w in ended.items()})
    floor = torch.finfo(torch.float32).eps * _norm(ended) / max(moved, 1e-300)
    return {"error": difference / max(moved, 1e-300), "floor": floor, "steps": STEPS}


def _session(bench: CheckContext, plan: Plan) -> Session:
    session = assemble(prepare(bench.small(plan), plan, bench.context, bench.folder))
    still(session.loss_module)
    return session


def _step(session: Session, gradients: Named | None, number: int) -> Named:
    """One update, with its own gradients or with those given; the gradients."""
    setup, parameters = session.setup, dict(trainable(session.module))
    loss_sum = torch.zeros(())  # of gradients that are given, nothing is known
    if gradients is None:
        loss_sum, _ = setup.run_passes(session.engine, next(batches(session)))
        gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None
    session.engine.norm(loss_sum, 0)
    session.engine.update(setup.job.schedule(number))
    session.progress.step += 1
    return gradients


def _weights(session: Session) -> Named:
    return {n: p.detach().double().cpu().clone() for n, p in trainable(session.module)}


def _norm(tensors: Named) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))


# Whole steps of the job itself: losses and weights to the bit, and a training on eval data.


def losses(bench: CheckContext, plan: Plan, steps: int) -> dict[str, Any]:
    """The losses of the job's first steps, no bit lost, and a digest of the weights after them."""
    job = replace(bench.job_of(plan, None, None), stop=Stop(steps=steps))
    session = assemble(prepare(job, plan, bench.context, bench.folder / f"variant-{plan.key}"))
    hex_losses = [m.loss.hex() for m in itertools.islice(training(session), steps)]
    effective = [{"technique": t.name(), **asdict(t.check_effect(session))} for t in plan]
    # Of every local weight: equal losses can hide a difference that only later steps show.
    digest = hashlib.sha256()
    for name, parameter in sorted(trainable(session.module), key=lambda pair: pair[0]):
        digest.update(name.encode())
        shard = local(parameter.detach())
        digest.update(shard.float().cpu().contiguous().numpy().tobytes())
    return {"losses": hex_losses, "weights": digest.hexdigest(), "effective": effective}


def train(bench: CheckContext, plan: Plan, seed: int, tokens: int) -> dict[str, Any]:
    """Train until so many tokens; the eval loss and the job's own measures then.

    Ranks that train apart end after as many steps as take so many tokens on the average.
    """
    session = assemble(_until(bench, plan, seed, tokens))
    before, largest = None, 0
    for metrics in training(session):
        done, largest = session.progress.tokens, max(largest, metrics.tokens)
        near = done < tokens <= done + 1.5 * largest  # perhaps the last step that ends before
        if near and not session.setup.rank_sync.diverged:  # those wouldn't all look at once
            before = evaluate(session)
    last = evaluate(session)
    loss, job_metrics = _at(tokens, before, last)
    ends = last.tokens if before is None else min(tokens, last.tokens)
    return {"eval_loss": loss, "metrics": job_metrics, "tokens": ends, "steps": last.step}


def _until(bench: CheckContext, plan: Plan, seed: int, tokens: int) -> Setup:
    context, folder = bench.context, bench.folder / f"variant-{plan.key}-{seed}"
    try:
        return prepare(bench.job_of(plan, seed, tokens), plan, context, folder)
    except InputError:
        if context.world.size == 1:
            raise
    # Ranks that train apart can't stop at a number of tokens: so after the steps that it makes.
    usual = Plan(t for t in plan if t.slot is not Slot.COMMUNICATION)
    job = bench.job_of(usual, seed, tokens)
    sampler = prepare(job, usual, context, folder).sampler
    if sampler is None:
        raise InputError("the examples' order isn't known, so that no number of tokens can be met")
    job = replace(job, stop=Stop(steps=total_steps(job, sampler)))
    return prepare(job, plan, context, folder)


def _at(
    tokens: int, before: Evaluation | None, last: Evaluation
) -> tuple[float | None, Mapping[str, float | None]]:
    """Eval loss and the job's own measures after exactly so many tokens."""
    if before is None or not before.tokens < tokens <= last.tokens:
        return last.eval_loss, last.metrics
    # Plans have steps of different sizes; a step more or less would be taken for better or worse.
    share = (tokens - before.tokens) / (last.tokens - before.tokens)

    def between(first: float | None, second: float | None) -> float | None:
        return second if first is None or second is None else first + share * (second - first)

    metrics = {name: between(before.metrics[name], last.metrics[name]) for name in last.metrics}
    return between(before.eval_loss, last.eval_loss), metrics
