"""The assembly of a run, and one step, in the order in which it runs.

An *example* is read from an Arrow file on disk, tokenised once and memory-mapped
afterwards. The *sampler* chooses the examples of a step. The *collator* lays them out
as one tensor. It counts the positions that are tokens and the tokens that carry loss.
The *feeder* brings the micro-batches to the device.

The model turns tokens into *loss*, summed over trained tokens. It is divided by the
trained tokens of the whole step, over all micro-batches and ranks. So micro-batch size,
padding and rank count don't change its meaning. With preference pairs it is summed over
pairs, and divided by their number.

Backward turns loss into *gradients*. They are sent over the *network* while earlier
layers still compute. When the last one has arrived, the norm is computed. If every rank
has finite numbers, the norm is clipped and the *optimizer* moves the weights. Then the
step's cost is recorded.

The functions follow in this order: ``assemble``, ``training``, ``batches``, ``train_step``, and the
plain engine with the step's three verbs. A pipeline schedule or a DeepSpeed engine
replaces the engine and nothing else.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.health import NotFiniteError, StepChecks
from hasten.core.job import MicroBatch, Routing, StepBatch, WorkCounts, with_nll_unit
from hasten.core.layout import SplitsModel, gradients_of, local_state, rank_rows
from hasten.core.setup import CLIP_APART, EngineParts, RankSync, Session, Setup, StepNumbers
from hasten.core.timing import (
    BACKWARD,
    BETWEEN,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    IDLE,
    OPTIMIZER,
    StepMetrics,
    preference_metrics,
)
from hasten.errors import InputError, as_input_error
from hasten.machine import host
from hasten.machine.memory import release_freed
from hasten.machine.processes import running_time


def assemble(setup: Setup) -> Session:
    """Builds the run that a setup describes; only here is the order that PyTorch requires.

        LAYOUT.build (without memory, if it reads weights later) -> ADAPTER, ROUTING
        -> EXPERTS, ATTENTION, LAYERS, LOSS, OBJECTIVE, INDEXER
        -> LAYOUT.apply_model_parallel -> ACTIVATION_CHECKPOINTING -> COMPILE
        -> PRECISION -> LAYOUT.apply_data_parallel on the device, with COMMUNICATION
        -> OPTIMIZER over the parameters as they are now -> engine -> batches

    - Adapters come before anything that replaces modules. Otherwise the replacements would
      not be adapted.
    - Precision comes before replication. Otherwise replicas would reduce in the wrong
      format.
    - The optimizer comes last, because every earlier line may exchange parameters.
    """
    job, layout = setup.job, setup.layout
    if setup.adapter is None or setup.loss is None or setup.optimizer is None:
        raise InputError("a setup comes from hasten.core.setup.prepare(job, plan, facts)")
    setup.step_checks = StepChecks()
    setup.allocator()
    torch.manual_seed(job.seed)
    began = time.perf_counter()
    model = setup.adapter(layout.build(job))
    built = time.perf_counter()
    if setup.routing is not None:
        setup.routing.prepare(model)
    for edit in (setup.experts, setup.attention, setup.layers):
        edit(model)
    loss_module = setup.loss(model)
    setup.objective(loss_module)
    if setup.indexer is not None:
        setup.indexer.prepare(loss_module)
    frozen = None
    if setup.checkpoint is not None:  # weights as they were loaded: later lines cut or cast them
        name = next(name for name, part in loss_module.named_modules() if part is model)
        prefix = f"{name}." if name else ""
        frozen = setup.checkpoint.frozen(model, prefix)
        own_names = [name.removeprefix(prefix) for name in frozen.names]
        frozen.hash = frozen.hash or layout.late_hash(model, own_names)
    loss_module = layout.apply_model_parallel(loss_module)
    setup.recompute(loss_module)
    setup.compile(loss_module)
    setup.precision.prepare(loss_module)
    device = torch.device(job.device)
    module = layout.apply_data_parallel(loss_module.train(), device, setup.communication)
    optimizer = setup.optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
    weight_names = _names_of(optimizer, loss_module)  # before precision puts in its own tensors
    with as_input_error("plan"):
        setup.precision.attach_optimizer(optimizer)
    if setup.average is not None:
        copies = layout.copies if isinstance(layout, SplitsModel) else {}
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        true_ids = {id(p) for p in setup.precision.parameters()}
        named = zip(weight_names, weights, strict=True)
        setup.average.attach({copies.get(n, n): w for n, w in named if id(w) in true_ids}, layout)
    engine = (setup.engine or PlainEngine)(EngineParts(setup, module, optimizer))
    if frozen is not None:
        frozen.watch(local_state(layout, loss_module))
    seconds = {"model": built - began, "assembly": time.perf_counter() - built}
    # Ranks share the weights' seed. Dropout must differ between ranks with different examples or
    # layers, and be equal on ranks with pieces of the same layers.
    torch.manual_seed(job.seed + 1 + layout.data_rank + layout.stage * layout.data_size)
    release_freed()
    return Session(
        setup, model, loss_module, module, optimizer, engine, seconds, weight_names, frozen
    )


def _names_of(optimizer: Optimizer, loss_module: nn.Module) -> list[str]:
    """Returns the names of an optimizer's weights; one that isn't the module's has a number."""
    names = {id(weight): name for name, weight in loss_module.named_parameters()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [names.get(id(weight), f"weight.{i}") for i, weight in enumerate(weights)]


__all__ = ["NotFiniteError", "StepMetrics", "train_step", "training"]


def training(session: Session) -> Generator[StepMetrics, None, None]:
    """Trains until the job's stop or until ``session.stop_requested`` is set.

    To continue at another position of the data, change ``session.progress`` between two
    steps.

    Raises:
        NotFiniteError: several steps in a row had no finite loss and gradient.
        StoppedError: another check of the setup shows that the run is lost.
    """
    setup, clock = session.setup, session.setup.clock
    with nullcontext() if setup.checkpoint is None else setup.checkpoint.running(session):
        moved = True
        while moved:  # repeated when ``session.progress`` was moved
            moved, progress = False, session.progress
            started = running_time()  # before the clock starts, so parts never exceed the step
            clock.begin()
            for batch in batches(session):
                metrics = train_step(session, batch, started)
                setup.step_checks.after_step(session, batch, metrics)
                back = setup.spike_policy is not None and setup.spike_policy.rollback_if_spike(
                    session, metrics
                )
                clock.mark(BETWEEN)
                # A checkpoint must be a sound state, so none is written in a spike.
                suspect = back or (setup.spike_policy is not None and setup.spike_policy.in_spike)
                if setup.checkpoint is not None and not suspect:
                    setup.checkpoint.after_step(session)
                clock.mark(CHECKPOINT)
                position = progress.epoch, progress.step_in_epoch
                yield metrics
                if back or (progress.epoch, progress.step_in_epoch) != position:
                    moved = True
                    break
                if setup.live_tuner is not None:
                    setup.live_tuner.after_step(metrics)
                started = running_time()
                clock.begin()


def batches(session: Session) -> Iterator[StepBatch]:
    """Yields complete steps on the device from position ``progress`` until the job's stop.

    Every rank gets the same number of steps. The counts are sums over all ranks.
    """
    setup, progress = session.setup, session.progress
    job, clock = setup.job, setup.clock
    while job.stop.epochs is None or progress.epoch < job.stop.epochs:
        step_count = 0
        source = clock.reading(_local_steps(setup, progress.epoch, progress.step_in_epoch))
        for micro_batches in setup.feed(source, job.device):
            step_count += 1
            clock.fed()
            if job.stop.reached(progress.step, progress.tokens):
                return
            # Before the first backward pass: counts over all ranks, and True if any rank stops.
            local_counts = WorkCounts()
            for micro_batch in micro_batches:
                local_counts += micro_batch.counts
            rank_sync = setup.rank_sync
            counts, stop, most = rank_sync.counts(
                local_counts, session.stop_requested, len(micro_batches)
            )
            if stop:
                session.stop_requested = True
                clock.mark(COMMUNICATION)
                return
            if not counts.units and not rank_sync.diverged:
                raise InputError(
                    "a step has no trained token: look at the examples and their loss mask"
                )
            if most > len(micro_batches) or job.unit == "pairs":
                micro_batches = _complete(session, micro_batches, counts, most)
            clock.mark(COMMUNICATION)
            progress.step_in_epoch += 1
            yield StepBatch(micro_batches, counts, progress.epoch)
        if not step_count and not progress.step_in_epoch:
            raise InputError("the data has no steps: the loader or the examples are empty")
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        clock.mark(DATA)  # time until the loader ended
        if setup.checkpoint is not None:
            setup.checkpoint.after_epoch(session)
        clock.mark(CHECKPOINT)


def _local_steps(setup: Setup, epoch: int, first: int) -> Iterator[tuple[MicroBatch, ...]]:
    """Yields this rank's micro-batches of the epoch, from step ``first`` on."""
    job, layout = setup.job, setup.layout
    collate = setup.collate or job.collate
    steps: Iterator[Sequence[Any]] = iter(())
    if job.stream is not None:
        steps = job.stream(epoch)
    elif setup.sampler is not None:
        steps = setup.sampler.local_steps(epoch, layout.data_rank, layout.data_size)
    for step in itertools.islice(steps, first, None):
        parts: list[list[Any]] = []
        for group in step if job.stream is None else [step]:
            examples = [job.examples[i] for i in group] if job.stream is None else group
            if examples:
                parts += setup.split_micro_batches(examples)
        if parts:
            yield tuple([replace(collate(part), examples=part) for part in parts])
        elif job.stream is not None:
            raise InputError("the loader gave a batch without examples; leave it out")
        else:  # fewer examples than ranks: this rank takes part without loss
            yield (without_loss(collate([job.examples[0]])),)


def _complete(
    session: Session, local: tuple[MicroBatch, ...], counts: WorkCounts, most: int
) -> tuple[MicroBatch, ...]:
    """Returns this rank's micro-batches with all inputs of pairs, as many as any rank has.

    Its smallest one is repeated without loss, so that all ranks run equally often.
    """
    job = session.setup.job
    if most > len(local):
        smallest = min(local, key=lambda m: m.counts.positions)
        local = (*local, *[without_loss(smallest)] * (most - len(local)))
    if job.reference is not None:
        local = job.reference.complete(session, local)
    return tuple(with_nll_unit(m, counts) for m in local) if job.unit == "pairs" else local


def most_on_a_rank(setup: Setup, count: int) -> int:
    """Returns the largest count of any rank; every rank calls it with its own."""
    return int(rank_rows(setup.layout, setup.context.world, count).max())


def step_outside(session: Session) -> tuple[MicroBatch, ...] | None:
    """Returns the micro-batches of the epoch's first step, on the device.

    They don't count as progress. Returns None if the user's own loader brings the batches,
    because it would have to start again.
    """
    setup = session.setup
    if setup.job.stream is not None:
        return None
    micro_batches = next(_local_steps(setup, session.progress.epoch, 0), None)
    return None if micro_batches is None else tuple(m.to(setup.job.device) for m in micro_batches)


def without_loss(micro_batch: MicroBatch) -> MicroBatch:
    """Returns the same tensors without loss, for a rank without examples."""
    inputs = dict(micro_batch.inputs)
    if "weights" in inputs:  # the examples are preference pairs
        for name in inputs.keys() & {"weights", "reference"}:
            inputs[name] = torch.zeros_like(inputs[name])
    else:
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
    return replace(
        micro_batch,
        inputs=inputs,
        counts=WorkCounts(positions=micro_batch.counts.positions),
    )


def train_step(session: Session, batch: StepBatch, started: float) -> StepMetrics:
    """Computes gradients and norm, then updates; ``started`` is when the wait for data began."""
    setup, clock = session.setup, session.setup.clock
    factor = setup.job.schedule(session.progress.step)
    if setup.spike_policy is not None:
        factor *= setup.spike_policy.rate
    if setup.indexer is not None:
        setup.indexer.begin(batch.counts.tokens)
    loss_sum, batch = setup.run_passes(session.engine, batch)
    clock.mark(BACKWARD)
    positions = 0
    for micro_batch in batch.micro_batches:  # as they ran: BATCH may have cut them
        positions += micro_batch.counts.positions
    step_numbers = session.engine.norm(loss_sum, positions)
    if step_numbers.finite:
        session.engine.update(factor)
    else:
        session.engine.zero_grad()
        setup.rank_sync.skipped()
        setup.step_checks.store_loss(step_numbers.loss_sum)
    clock.mark(OPTIMIZER)
    return _note(session, batch, step_numbers, started)


def _note(
    session: Session, batch: StepBatch, step_numbers: StepNumbers, started: float
) -> StepMetrics:
    setup, clock, progress = session.setup, session.setup.clock, session.progress
    layout = setup.layout
    traffic = layout.traffic() if layout.size > 1 else None
    if traffic is not None and traffic.exposed is not None:
        clock.exposed(traffic.during, traffic.exposed)
    counts = replace(batch.counts, positions=int(step_numbers.positions))
    seconds = running_time() - started
    clock.mark(IDLE)
    parts = clock.end()
    flops = session.meter.flops(counts)
    progress.step += 1
    progress.tokens += counts.tokens
    progress.positions += counts.positions
    progress.micro_batches += len(batch.micro_batches)
    progress.trained_tokens += counts.trained_tokens
    progress.examples += counts.examples
    # The exchange of gradients, and the sums over ranks of counts and losses.
    exposed = hidden = None
    if traffic is not None and traffic.exposed is not None:
        exposed, hidden = traffic.exposed + parts.get(COMMUNICATION, 0.0), traffic.hidden
    groups = session.optimizer.param_groups
    rates = [group["lr"] for group in groups if not group.get(CLIP_APART)]
    return StepMetrics(
        step=progress.step,
        epoch=batch.epoch,
        loss=step_numbers.total_loss / (counts.units or 1),
        learning_rate=max(rates or [group["lr"] for group in groups]),  # nothing else learns
        grad_norm=step_numbers.norm,
        tokens=counts.tokens,
        trained_tokens=counts.trained_tokens,
        positions=counts.positions,
        examples=counts.examples,
        step_seconds=seconds,
        tokens_per_second=counts.tokens / seconds,
        padding_share=counts.padding_share,
        peak_memory_bytes=host.memory_peak(setup.job.device),
        model_flops=flops,
        mfu=session.meter.mfu(flops, seconds),
        skipped=not step_numbers.finite,
        expert_load_ratio=None if setup.routing is None else setup.routing.load_ratio(),
        data_seconds=parts.get(DATA),
        passes_seconds=parts.get(FORWARD, 0.0) + parts[BACKWARD] if parts else None,
        optimizer_seconds=parts.get(OPTIMIZER),
        comm_seconds=None if exposed is None or hidden is None else exposed + hidden,
        exposed_comm_seconds=exposed,
        hidden_communication_seconds=hidden,
        comm_bytes=None if traffic is None else traffic.sent_bytes,
        **(preferences(session) if setup.job.unit == "pairs" else {}),
        **({} if setup.indexer is None else setup.indexer.metrics()),
    )


def preferences(session: Session) -> dict[str, float]:
    """Returns the metrics of the preference pairs since the last call; {} for other examples.

    Every rank calls it.
    """
    if session.setup.job.unit != "pairs":
        return {}
    sums = session.loss_module.take_statistics()
    metrics = preference_metrics(session.setup.rank_sync.sum(sums.cpu()).tolist())
    if session.setup.job.reference is None:  # there is nothing to compare with
        metrics.pop("log_ratio", None)
    return metrics


# The engine: turns micro-batches into updated weights.
#
# The plain engine runs the full model in this process, replicated or not.

Sums = tuple[Tensor, Tensor]  # sum of the loss, and the number of trained tokens


@runtime_checkable
class SumsWithNorm(Protocol):
    """A layout that may sum its norm over all ranks, together with the other sums."""

    def norm_and_sums(
        self, parameters: Sequence[Tensor], loss_sum: Tensor, positions: int
    ) -> tuple[Tensor, StepNumbers] | None:
        """Returns ``norm`` on the gradients' device, and all numbers on the host, in one sum.

        None: the norm isn't such a sum.
        """


class PlainEngine:
    """Runs forward and backward of one module in this process."""

    def __init__(self, assembly: EngineParts) -> None:
        self.setup = assembly.setup
        self.module = assembly.module
        self.optimizer = assembly.optimizer
        self.max_norm = assembly.setup.job.max_grad_norm
        self.loss_count: float | None = None  # last step's count over all ranks; None: known before
        self._norm = self._norm_apart = torch.tensor(0.0)
        self.sum_loads = assembly.setup.rank_sync.sum  # load of experts, over all ranks
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        schedule = assembly.setup.job.schedule
        self._is_fixed = schedule.kind == "constant" and not schedule.warmup_steps
        self._last_factor: float | None = None  # learning rates that were set

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        layout, last, device = self.setup.layout, len(micro_batches), self.setup.job.device
        # Created on the device: copying a zero there would make the host wait.
        sums = torch.zeros((), device=device), torch.zeros((), device=device)
        for index, micro_batch in enumerate(micro_batches, start=1):
            self.setup.precision.before_backward(reduces=index == last and layout.averages > 1)
            with layout.sync(self.module, index == last):
                sums = self._pass(self.module, micro_batch, denominator, sums)
        return sums[0] if self.setup.job.counted else self._recounted(sums, denominator)

    def gradients_apart(
        self, micro_batches: Sequence[MicroBatch], denominator: float
    ) -> Callable[[], Tensor]:
        """Splits the pass in two: passes without communication, then the returned function.

        The layout is replicated. If the first half fails, only this rank is concerned: clear the
        gradients and repeat it.
        """
        layout, device = self.setup.layout, self.setup.job.device
        inner = layout.alone(self.module)
        sums = torch.zeros((), device=device), torch.zeros((), device=device)
        for micro_batch in micro_batches:
            self.setup.precision.before_backward(reduces=False)
            sums = self._pass(inner, micro_batch, denominator, sums)

        def last_pass() -> Tensor:
            self.setup.precision.before_backward(reduces=True)
            layout.send(self.module)
            self.setup.precision.accumulate_gradients()
            return sums[0] if self.setup.job.counted else self._recounted(sums, denominator)

        return last_pass

    def _pass(
        self, module: nn.Module, micro_batch: MicroBatch, denominator: float, sums: Sums
    ) -> Sums:
        """One forward and backward pass; returns ``sums`` with those of the pass added."""
        setup = self.setup
        if setup.indexer is not None:
            micro_batch = setup.indexer.marked(micro_batch)
        # Replicas average gradients, but the step needs a sum. norm() removes the loss scale again.
        scale = setup.loss_factor * setup.layout.averages / (denominator or 1.0)
        with setup.precision.region():
            loss, labels = forward_of(setup.routing, module, micro_batch)
        setup.clock.mark(FORWARD)
        (loss * scale).backward()
        setup.precision.accumulate_gradients()
        setup.clock.mark(BACKWARD)
        total, count = sums
        return total + loss.detach(), count + labels

    def _recounted(self, sums: Sums, denominator: float) -> Tensor:
        """Divides by the count of the forward passes, which replaces the earlier estimate."""
        total, count = sums
        true_count: float = self.setup.rank_sync.sum(count.double().cpu()).item()
        self.loss_count = true_count
        factor = denominator / true_count if true_count else 0.0
        gradients = gradients_of(self.setup.precision.parameters())
        if not gradients:
            raise InputError(
                "no weight has a gradient after the backward pass: take a loss that depends on "
                "them, and an optimizer that steps after the pass"
            )
        torch._foreach_mul_(gradients, factor)
        return total * factor

    def norm(self, loss_sum: Tensor, positions: int) -> StepNumbers:
        setup, parameters = self.setup, self.setup.precision.parameters()
        if setup.loss_scale is not None:
            setup.loss_scale.unscale(gradients_of(parameters))
        layout, summed, norm_apart = setup.layout, None, 0.0
        if setup.indexer is not None:
            parameters, of_indexers = self._parted(parameters)
            self._norm_apart = layout.norm(of_indexers)
            norm_apart = self._norm_apart.item()
        if isinstance(layout, SumsWithNorm):
            summed = layout.norm_and_sums(parameters, loss_sum, positions)
        if summed is not None:
            self._norm, numbers = summed
            if not math.isfinite(norm_apart):
                numbers = numbers._replace(norm=norm_apart, finite=False)
        else:
            self._norm = layout.norm(parameters)
            # The step's only wait for the device that holds both numbers: may the weights move?
            if self._norm.device == loss_sum.device:  # in a type that is wide enough for both
                dtype = torch.promote_types(self._norm.dtype, loss_sum.dtype)
                both = torch.stack([self._norm.to(dtype), loss_sum.detach().to(dtype)])
                value, loss = both.tolist()
            else:
                value, loss = self._norm.item(), loss_sum.item()
            setup.clock.mark(OPTIMIZER)
            value = value if math.isfinite(norm_apart) else norm_apart
            numbers = summed_numbers(setup.rank_sync, value, loss, positions)
        setup.clock.mark(COMMUNICATION)
        if setup.loss_scale is not None:
            setup.loss_scale.judge(numbers.finite)
        return numbers

    def _parted(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the true weights of the model, and those with a norm of their own."""
        groups = [group for group in self.optimizer.param_groups if group.get(CLIP_APART)]
        ids = {id(p) for group in groups for p in group["params"]}
        return [p for p in parameters if id(p) not in ids], [p for p in parameters if id(p) in ids]

    def _clip_apart(self, divisor: Tensor | None) -> None:
        """Clips the indexers' gradient, which the optimizer will divide by ``divisor`` too."""
        indexer, (_, weights) = self.setup.indexer, self._parted(self.setup.precision.parameters())
        if indexer is not None and indexer.clip:
            torch.nn.utils.clip_grads_with_norm_(weights, indexer.clip, self._norm_apart)
        if divisor is not None and weights:
            torch._foreach_mul_(gradients_of(weights), divisor)

    def update(self, rate_factor: float) -> None:
        setup, parameters = self.setup, self.setup.precision.parameters()
        of_model = parameters if setup.indexer is None else self._parted(parameters)[0]
        divisor = None
        if self.max_norm is not None:
            # Clips in the optimizer's own pass if it accepts a divisor, as torch's fused ones do
            # (``grad_scale``, which loss scaling uses too).
            if getattr(self.optimizer, "_step_supports_amp_scaling", False):
                divisor = ((self._norm + 1e-6) / self.max_norm).clamp_min(1.0).float()
                self.optimizer.grad_scale = divisor
            else:
                torch.nn.utils.clip_grads_with_norm_(of_model, self.max_norm, self._norm)
        if setup.indexer is not None:
            self._clip_apart(divisor)
        # A spike policy may load the rates of an earlier step.
        keeps = self._is_fixed and setup.spike_policy is None and rate_factor == self._last_factor
        if not keeps:
            for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
                group["lr"] = peak * rate_factor
            self._last_factor = rate_factor  # inside this context, other code may set the rates
        setup.communication.before_update(parameters)
        self.optimizer.step()
        setup.precision.update_model_weights()
        setup.communication.after_update(parameters)
        if setup.average is not None:
            setup.average.after_update(parameters)
        if setup.routing is not None:
            setup.routing.after_update(self.sum_loads)
        self.zero_grad()

    @contextmanager
    def holding_still(self) -> Iterator[None]:
        """Inside, updates run with a learning rate of zero, so no weight changes."""
        rates, self._peak_rates = self._peak_rates, [0.0] * len(self._peak_rates)
        self._last_factor = None
        try:
            yield
        finally:
            self._peak_rates, self._last_factor = rates, None

    def zero_grad(self) -> None:
        if self.setup.routing is not None:
            self.setup.routing.discard()
        for parameter in self.setup.precision.parameters():
            parameter.grad = None
        self.module.zero_grad(set_to_none=True)


def forward_of(
    routing: Routing | None, module: nn.Module, micro_batch: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Runs the forward pass of a micro-batch: (loss summed over trained tokens, their number)."""
    if routing is not None:
        return routing.forward(module, micro_batch)
    loss, labels = module(**micro_batch.inputs)
    return loss, labels


def summed_numbers(rank_sync: RankSync, norm: float, loss: float, positions: int) -> StepNumbers:
    """Returns a step's numbers from those of each rank, in one sum; every rank calls it.

    The sum has its own flag for numbers that aren't finite, for two reasons. A communication
    method need not carry one rank's overflow to the others. An infinite loss need not appear in
    the gradients.
    """
    wrong = not (math.isfinite(norm) and math.isfinite(loss))
    local = torch.tensor([wrong, loss, positions], dtype=torch.float64)
    wrong_ranks, total_loss, total_positions = rank_sync.sum(local).tolist()
    return StepNumbers(norm, loss, not wrong_ranks, total_loss, total_positions)
