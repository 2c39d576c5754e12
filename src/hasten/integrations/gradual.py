"""``gradual_optimize``: adds one technique at a time and keeps only those that help.

For a recipe it is :func:`hasten.report.speedup.greedy_recipe`. For a model and a
loader:

  1. Batches are drawn from the loader once; the last of them are for the eval loss.
  2. The search is that of `hasten.report.speedup.Greedy`. For each technique two copies of
     model and optimizer train on the same batches. One has the techniques kept until then,
     the other also the new one. They take turns, a round of some steps each.
  3. A technique is kept if it is significantly faster, its effect was detected, and the
     eval loss isn't worse after the same examples.
  4. The model itself trains an epoch with the techniques that were kept.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import Session
from hasten.core.slot import Slot
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import context_of
from hasten.integrations.given_loader import GivenLoader, examples_in, split_batch
from hasten.integrations.optimized_trainer import USUAL, OptimizedTrainer
from hasten.integrations.throughput import loss_of, moved
from hasten.launch.ranks import process_group
from hasten.measure.ablation import Design, Variant
from hasten.measure.search import Proposal, search
from hasten.parts.distributed.pipeline.model import usual_loss
from hasten.parts.nn.torch_means import with_sum
from hasten.report.speedup import CumulativeStep, Greedy, GreedySearch, greedy_recipe

SWITCHES = {
    Slot.PRECISION: "mixed_precision",
    Slot.COMMUNICATION: "compress_gradients",
    Slot.BATCH: "dynamic_batch",
}
EVAL_DATA = 0.2  # share of the drawn batches for the eval loss
KINDS = "gradual_optimize takes a recipe, or a model and its loader"
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class GradualResult:
    """Techniques that were kept and the reasons; printed, it is a table.

    ``trainer`` continues with these techniques. ``summary`` is that of the epoch that it
    has trained.
    """

    climb: GreedySearch
    trainer: OptimizedTrainer = field(repr=False)
    summary: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return str(self.climb)


def gradual_optimize(
    job: Any,
    dataloader: Iterable[Any] | None = None,
    *,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | None = None,
    techniques: Sequence[Technique] | None = None,
    order: Literal["slots", "gain"] = "slots",
    rounds: int = 8,
    steps: int = 4,
    **experiment: Any,
) -> Any:
    """Adds techniques one at a time, measures each, and keeps those that pay.

    With a recipe (or its path) it returns a :class:`~hasten.report.speedup.GreedySearch` and takes
    ``order`` and the further arguments of :func:`hasten.report.speedup.greedy_recipe`.

    Args:
        job: a model, which is trained one epoch with what was kept; or a recipe, or its path.
        dataloader: gives (inputs, target) pairs, or dictionaries with ``labels`` and a ``loss_fn``.
        loss_fn: ``loss_fn(output, target)``, a mean over examples; cross-entropy for a target of
            whole numbers and the mean squared error for others, if left out.
        optimizer: over the model's parameters; AdamW if left out.
        techniques: of the slots PRECISION, COMMUNICATION and BATCH; mixed precision, compressed
            gradients and growing batches, if left out.
        order: in that of the list, or by the gain each has alone, which is measured first.
        rounds, steps: rounds of a comparison, and batches of a round.

    Returns:
        A :class:`GradualResult` for a model.

    Raises:
        TypeError: something else was given.
        InputError: the loader has too few batches or gives them once, or a technique no switch
            takes.
    """
    if isinstance(job, nn.Module) and dataloader is not None and not experiment:
        return _of_model(
            *(job, dataloader, optimizer, loss_fn, techniques, order, rounds, steps),
        )
    other = (loss_fn, optimizer, techniques) != (None, None, None) or (rounds, steps) != (8, 4)
    if isinstance(job, str | Path | BaseModel) and dataloader is None and not other:
        return greedy_recipe(job, order=order, **experiment)  # type: ignore[arg-type]  # it checks
    raise TypeError(KINDS)


def _of_model(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer | None,
    loss_fn: Loss | None,
    techniques: Sequence[Technique] | None,
    order: Literal["slots", "gain"],
    rounds: int,
    steps: int,
) -> GradualResult:
    if rounds < 2 or steps < 1:
        raise InputError("gradual_optimize needs rounds=2 and steps=1 at least")
    context = context_of(model, next((str(p.device) for p in model.parameters()), "cpu"))
    if optimizer is None:
        _say(context, "AdamW(lr=0.001) is used; give optimizer= for another")
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    usual = [USUAL[name] for name in SWITCHES.values()]
    candidates, skipped = _usable(usual if techniques is None else techniques, context)
    with process_group(context.world, context.device), torch.random.fork_rng():
        measure = _Comparison(model, optimizer, loader, loss_fn, rounds, steps, context)
        rules = Greedy(candidates, Design(rounds=rounds, steps=steps), order)
        search(rules, measure)
        greedy = rules.result
        rungs = [replace(r, why=r.why.replace(" tokens", " examples")) for r in greedy.rungs]
        trainer = measure.trainer(model, optimizer, greedy.plan)
        summary = trainer.train(loader, epochs=1)
        return GradualResult(replace(greedy, rungs=(*rungs, *skipped)), trainer, summary)


def _usable(
    techniques: Sequence[Technique], context: JobContext
) -> tuple[list[Technique], list[CumulativeStep]]:
    """The techniques in question that can work here, and why the others can't."""
    candidates, skipped = [], []
    for technique in techniques:
        if technique.slot not in SWITCHES:
            raise InputError(
                f"{technique} decides {technique.slot.name}; a trainer of your own model takes "
                f"techniques of {', '.join(slot.name for slot in SWITCHES)}"
            )
        reasons = technique.unsupported_reasons(context)
        if technique.slot is Slot.COMMUNICATION and context.world.size == 1:
            reasons = ("with one rank no gradient travels",)
        if reasons:
            skipped.append(CumulativeStep(str(technique), None, False, reasons[0]))
        else:
            candidates.append(technique)
    return candidates, skipped


class _Comparison:
    """Plans on copies of model and optimizer, round by round on the same batches.

    A round is an epoch of a copy's training. Batches repeat if there are too few.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        loss_fn: Loss | None,
        rounds: int,
        steps: int,
        context: JobContext,
    ) -> None:
        self._context, self._originals = context, (model, optimizer)
        self._rounds, self._steps, self._round = rounds, steps, 0
        if isinstance(loader, Iterator):
            raise InputError(
                "the loader gives its batches once, and both the comparison and the training need "
                "them: give a list or a DataLoader"
            )
        rank_loader = GivenLoader(loader, context.world, deal=True)
        most = int((rounds + 1) * steps / (1 - EVAL_DATA)) + 1
        drawn = [rows[0].batch for rows in itertools.islice(rank_loader.epoch(0), most)]
        if len(drawn) < 2:
            raise InputError(
                f"the loader gives {len(drawn)} batch(es); one to train on and one to hold out "
                "are the least"
            )
        eval_count = max(1, int(len(drawn) * EVAL_DATA))
        self._trained, self._eval_data = drawn[:-eval_count], drawn[-eval_count:]
        self._loss_fn = loss_fn or self._usual_loss()

    def trainer(self, model: nn.Module, optimizer: Optimizer, plan: Plan) -> OptimizedTrainer:
        switches: dict[str, Any] = {SWITCHES[t.slot]: t for t in plan}
        return OptimizedTrainer(model, optimizer, self._loss_fn, **switches)

    def set_epoch(self, epoch: int) -> None:
        self._round = epoch

    def __iter__(self) -> Iterator[Any]:
        first = self._round * self._steps
        for number in range(first, first + self._steps):
            yield self._trained[number % len(self._trained)]

    def __call__(self, proposal: Proposal[Plan]) -> list[Variant]:
        """The variants of a proposal, measured in turns."""
        plans, ranks = proposal.variants, self._context.world.size
        sessions = {
            name: self.trainer(*copy.deepcopy(self._originals), plan).session(self, epochs=2**31)
            for name, plan in plans.items()
        }
        running = {name: training(session) for name, session in sessions.items()}
        rates: dict[str, list[float]] = {name: [] for name in plans}
        examples = 0  # that each copy has trained, on all ranks
        for number in range(self._rounds + 1):  # the first warms up
            self._round = number
            of_round = ranks * sum(map(examples_in, self))
            examples += of_round
            for name in plans if number % 2 else reversed(list(plans)):
                done, seconds = 0, 0.0
                while done < of_round:
                    metrics = next(running[name])
                    done, seconds = done + metrics.examples, seconds + metrics.step_seconds
                rates[name].append(done / seconds)
        variants = []
        for name, plan in plans.items():
            session = sessions[name]
            loss = self._eval_loss(session)
            effects = [{"technique": t.name(), **asdict(t.check_effect(session))} for t in plan]
            eval_data = [(examples, loss)]
            variants.append(
                Variant(name, plan, rates[name][1:], eval_data=eval_data, effective=effects)
            )
            del running[name]  # ends the generator, and with it the contexts around its steps
            session.finish()
        if ranks > 1:  # what the first rank measured: all decide alike
            dist.broadcast_object_list(variants, src=0)
        return variants

    def _eval_loss(self, session: Session) -> float:
        """The mean over what carries loss in held-out batches, of all ranks."""
        model, device = session.model, torch.device(session.setup.job.device)
        sums, loss_fn = torch.zeros(2, dtype=torch.float64), with_sum(self._loss_fn)
        model.eval()
        with torch.no_grad():
            for batch in self._eval_data:
                loss: Any = loss_of(model, moved(batch, device), loss_fn)
                size = examples_in(batch)
                pair = loss if isinstance(loss, tuple) else (loss * size, size)
                sums += torch.tensor([float(value) for value in pair], dtype=torch.float64)
        total, count = session.setup.layout.all_reduce_data(sums).tolist()
        return float(total / count) if count else float("nan")

    def _usual_loss(self) -> Loss:
        _, named, target = split_batch(self._trained[0])
        if named:
            raise InputError(
                "batches are dictionaries; give loss_fn=, a function of (output, labels)"
            )
        loss, name = usual_loss(target)
        _say(self._context, f"no loss_fn was given, so {name} is taken")
        return loss


def _say(context: JobContext, message: str) -> None:
    if context.world.is_main:
        print(f"gradual_optimize: {message}")
