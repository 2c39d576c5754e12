"""The data of a check: the user's model and first examples, within memory and time.

A check compares gradients. A float64 gradient of a large model doesn't fit on the
machine that trains it. A check may therefore use the first examples of the first step,
cut to a length, and the first layers of the model. Every result lists the part that was
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.job import GlobalBatch, Job, ShuffledOrder, Stop
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.losses import LanguageModelLoss

FEWEST = 4  # examples, so that there is something to cut, to pack and to keep apart
MOST_TOKENS = 4096
SHORTEST = 32  # tokens that an example keeps at least
# Bytes per parameter: float64 weights and gradients of the reference, or weights, gradients,
# masters and working copies of a session, beside the reference's gradients that it is held against.
BYTES = 32
CPU_WORK, GPU_WORK = 5e11, 5e13  # FLOPs of one proof: about ten seconds on two cores
SHARE = 0.5  # of the machine's memory


@dataclass(frozen=True)
class CheckBudget:
    """How much of the job a proof takes; ``layers`` None: all."""

    layers: int | None
    tokens: int
    example_tokens: int


@dataclass(frozen=True)
class CheckContext:
    """Where proofs are made.

    Args:
        job_of: the job of a plan; with a seed of its own, and to a number of tokens, where given.
        read: a plan from its stored form.
        known: facts of machine, model and examples.
        folder: for the reference's gradients and whatever a technique writes.
        ranks: of the job, in processes that work at the same time, though this may be one alone.
    """

    job_of: Callable[[Plan, int | None, int | None], Job]
    read: Callable[[list[Any]], Plan]
    context: JobContext
    folder: Path
    ranks: int = 1

    def small(self, plan: Plan) -> Job:
        """The plan's job on the proof's examples: one step holds them all."""
        job, limits = self.job_of(plan, None, None), limits_of(self.context, ranks=self.ranks)
        examples = first_examples(job, limits)

        def build() -> nn.Module:
            return shortened(job.build_model(), limits.layers)

        return replace(
            job,
            model=build,
            examples=examples,
            lengths=[r.length for r in examples],
            batch=GlobalBatch(examples=len(examples)),
            stop=Stop(steps=25),  # fp16 may give up some to find its scale
            eval_data=(),
            metrics={},
        )

    def taken(self, examples: Any) -> dict[str, Any]:
        """The part of the job that a check used: examples, tokens, layers."""
        layers = limits_of(self.context, ranks=self.ranks).layers or self.context.model.layers
        tokens = sum(r.length for r in examples)
        return {"examples": len(examples), "tokens": tokens, "layers": layers}


def limits_of(
    context: JobContext, memory: float | None = None, work: float | None = None, ranks: int = 1
) -> CheckBudget:
    """Limits by half of the memory and some seconds; ranks share a processor's memory.

    Raises:
        InputError: not even one layer fits.
    """
    model = context.model
    if memory is None:
        gpus = context.hardware.accelerators if context.on_gpu else ()
        memory = min([context.hardware.memory_limit_bytes, *(gpu.memory_bytes for gpu in gpus)])
    room = memory * SHARE / BYTES  # parameters
    room /= 1 if context.on_gpu else ranks
    outer = model.vocabulary * model.hidden_size * (1 if model.tied_head else 2)
    each = max(model.parameters - outer, 0) / max(model.layers, 1)
    layers, parameter_count = None, float(model.parameters)
    if model.parameters > room and model.layers:
        layers = int((room - outer) / each) if each else 0
        if layers < 1:
            raise InputError(
                f"a float64 gradient of one layer of this {model.architecture} takes more than "
                f"half of the memory that a process has ({room * BYTES / 1e9:.1f} GB); run the "
                "verification on a larger machine"
            )
        parameter_count = outer + layers * each
    work = work or (GPU_WORK if context.on_gpu else CPU_WORK)
    tokens = int(min(MOST_TOKENS, max(work / (6 * max(parameter_count, 1.0)), FEWEST * SHORTEST)))
    return CheckBudget(layers, tokens, max(SHORTEST, tokens // FEWEST))


def first_examples(job: Job, limits: CheckBudget) -> list[Any]:
    """The first step's examples, as many as the limits allow; more than that step's if it has few.

    Raises:
        InputError: the job has fewer than two examples that carry loss.
    """
    examples: list[Any] = []
    tokens = 0
    for number, step in enumerate(ShuffledOrder(job.lengths, job.batch, job.seed).steps(0)):
        if number and len(examples) >= FEWEST:
            break
        for index in step:
            example = job.examples[index].mapped(partial(_cut, tokens=limits.example_tokens))
            if not example.trained_tokens:
                continue
            if len(examples) >= FEWEST and tokens + example.length > limits.tokens:
                return examples
            examples.append(example)
            tokens += example.length
    if len(examples) < 2:
        raise InputError(
            "the verification needs two examples with trained tokens; this job has fewer"
        )
    return examples


def shortened(model: nn.Module, layers: int | None) -> nn.Module:
    """The model with its first layers alone, in place."""
    if layers is None:
        return model
    inner: Any = trunk(model)
    inner.layers = inner.layers[:layers]
    causal_lm(model).config.num_hidden_layers = layers
    inner.config.num_hidden_layers = layers
    return model


def still(module: nn.Module) -> None:
    """Disables dropout, because its random draws depend on the layout.

    The loss of the model's routers is disabled too: it depends on the examples that share a
    pass.
    """
    for inner in module.modules():
        if isinstance(inner, LanguageModelLoss):
            inner.form = replace(inner.form, router_weight=0.0)
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0
        if isinstance(getattr(inner, "attention_dropout", None), float):
            inner.attention_dropout = 0.0


def trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that learn, whatever replicas put before the names."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, if a layout distributes the tensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cut(example: TokenizedExample, tokens: int) -> TokenizedExample:
    """Its first tokens; where none of these is trained, those around the first that is."""
    if example.length <= tokens:
        return example
    trained = [i for i in range(1, example.length) if example.trained[i]]
    start = 0
    if trained and trained[0] >= tokens:
        start = min(trained[0] - tokens // 2, example.length - tokens)
    return TokenizedExample(
        example.input_ids[start : start + tokens], example.trained[start : start + tokens]
    )
