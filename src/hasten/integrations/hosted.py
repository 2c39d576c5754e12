"""Techniques in a host's training passes: the moments of a training, the same for each host.

A host's file calls these moments, in this order:

    (1) :meth:`HostedTraining.begin`: the model is built. COMMUNICATION hooks into its replicas.
    (2) :meth:`~HostedTraining.open`: a pass begins. In the first step it runs without techniques
        and is recorded; later the model's edits are active until :meth:`~HostedTraining.close`.
    (3) :meth:`~HostedTraining.prove`: its backward pass is done. In the first step it is compared
        with one that has the techniques.
    (4) :meth:`~HostedTraining.before_update`, :meth:`~HostedTraining.after_update`: a step ends.
    (5) :meth:`~HostedTraining.after_epoch`, :meth:`~HostedTraining.end`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.setup import Setup
from hasten.core.slot import CHANGES_A_PASS
from hasten.core.technique import Technique
from hasten.integrations.adapt import HostedTechniques, TrainerAdapter, attach_communication
from hasten.integrations.batches import batch_for, packed_batch, packs
from hasten.integrations.checkpoints import CheckpointSchedule
from hasten.machine import memory
from hasten.measure.quality.first_step import LOSS_BOUND, FirstStepProof, proof_is_on
from hasten.measure.quality.replay import (
    Outputs,
    OwnPass,
    Recorder,
    ReplayPasses,
    detached,
    recorded_gradient,
)
from hasten.parts.nn.causal_lm import callable_modules

# Of the terms of a sum in float32: 8 roundings, in units of the bound of a loss.
SUM_ROUNDING = 8 * torch.finfo(torch.float32).eps / LOSS_BOUND
_LOG = logging.getLogger(__name__)


class HostedTraining:
    """The techniques of one host, through all its trainings.

    Args:
        host: answers what is asked of the host.
        setup: with the techniques that fit it.

    Raises:
        InputError: an earlier run's checkpoints are in the folder.
    """

    def __init__(self, host: TrainerAdapter, setup: Setup) -> None:
        self.host, self.setup = host, setup
        self.techniques: list[Technique] = []  # that change the training passes
        self.proof: FirstStepProof | None = None
        self.passes: LossPasses | ReplayPasses
        self._saves = CheckpointSchedule(setup)
        self._hosted: HostedTechniques | None = None
        self._recorder: Recorder
        self._own_pass: OwnPass | None = None  # the gradients of a pass that is to be proven
        self._window = contextlib.ExitStack()
        self._is_open = self._has_opened = False
        self._plain_until = 0  # the step after which techniques act
        self._attached: Any = None
        self._reported: set[str] = set()

    @property
    def model(self) -> nn.Module | None:
        """The model of the current training."""
        return None if self._hosted is None else self._hosted.model

    def begin(self, restore: Callable[[], None], **objects: Any) -> None:
        """A training begins, perhaps with a new model.

        Args:
            restore: gives the communication method its memory of an earlier training.
            objects: for checkpoints, next to the model.
        """
        host, replicas = self.host, self.host.replicas()
        if replicas is not self._attached:  # DDP takes one hook in its life
            attach_communication(self.setup, replicas)
            self._attached = replicas
        restore()
        model = host.model()
        self._saves.begin(model=model, **objects)
        if self.model is not model:
            hosted = self._hosted = HostedTechniques(host)
            self._recorder = Recorder(callable_modules(model), replicas)
            loss, is_mixed = host.loss(), host.autocast() is not None
            self.passes = (
                ReplayPasses(hosted, packed_batch, packs, hosted.in_float32, is_mixed)
                if loss is None
                else LossPasses(hosted, loss, is_mixed)
            )
            self.techniques = [t for t in self.setup.plan if t.slot in CHANGES_A_PASS]
            self._fit()
            if proof_is_on() and self.techniques:
                pad_id = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
                name = host.slots.name
                self.proof = FirstStepProof(self.passes, self.techniques, name, pad_id)

    # Passes.

    def open(self, packs_calls: bool = False) -> Sequence[Technique]:
        """A pass begins, or another loss in it: returns the techniques that act in it.

        Args:
            packs_calls: calls of the model are packed, because the host's code has the batch.
        """
        hosted = self._hosted
        if hosted is None:  # no training has begun
            return ()
        is_plain = self.host.step() < self._plain_until
        if not self._is_open:
            self._is_open = self._has_opened = True
            self._fit()
            if self.proof is not None:
                room = memory.free_bytes(self.host.run().device)
                self._own_pass = OwnPass(hosted.model, room)
                if isinstance(self.passes, ReplayPasses):
                    self._window.enter_context(self._recorder.active())
            elif not is_plain:
                self._window.enter_context(hosted.active(self.techniques))
                if packs_calls and packs(self.techniques):
                    self._window.enter_context(self._packed_calls(hosted.model))
        return () if self.proof is not None or is_plain else self.techniques

    def around_loss(self) -> AbstractContextManager[None]:
        """The techniques act inside; the loss of the following pass reads the results."""
        is_plain = self.proof is not None or self.host.step() < self._plain_until
        if self._hosted is None or self._is_open or is_plain:
            return contextlib.nullcontext()
        self._fit()
        return self._hosted.active(self.techniques)

    def loss(self, batch: Any, compute: Callable[[Any], Any]) -> Any:
        """Returns the host's loss of a batch as the techniques lay it out."""
        is_first = not self._is_open
        acting = self.open()
        if packs(acting) and self._hosted is not None and not self._hosted.packs_calls:
            batch = self._packed(batch) or batch
        if is_first and self.proof is not None and isinstance(self.passes, LossPasses):
            return self.passes.recorded(batch, compute)
        return compute(batch)

    def close(self) -> None:
        """The pass is over, the model is plain again."""
        self._window.close()
        self._is_open = False

    def prove(self) -> None:
        """Compares the pass that has ended with one that has the techniques."""
        own_pass, self._own_pass = self._own_pass, None
        if self.proof is None or own_pass is None:
            return
        self.close()  # calls of the model are recorded in the pass alone
        objects = [one.count for one in self.host.evidence()]
        if isinstance(self.passes, ReplayPasses):
            batch: Any = self._recorder.calls
            sums = self.passes.recorded_sums(batch)
        else:
            batch, sums = self.passes.real, self.passes.sums
            objects.append(self.host.trainer)
        removed = self.proof.check(batch, *objects, trained=own_pass.ended(sums))
        self._recorder.calls, self.techniques = [], self.proof.techniques
        for one in self.host.evidence():
            one.lines.exclude(self.proof.seconds)
        for removal in removed:
            self.report(f"{removal.technique.name()} was taken out: {removal.difference}")

    def _fit(self) -> None:
        """Removes techniques that don't fit the host and the model as they are now."""
        assert self._hosted is not None  # the training has begun
        self.techniques = self._hosted.fitting(self.techniques, self.report)
        if self.proof is not None:
            self.proof.techniques = list(self.techniques)

    def _packed(self, batch: Any) -> dict[str, Any] | None:
        packed = packed_batch(batch)
        if not isinstance(packed, str):
            return packed
        self.report(f"packed: left out for some batches: {packed}")
        return None

    @contextlib.contextmanager
    def _packed_calls(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the model are packed; only the loss leaves them."""
        packed_depth = 0

        def pack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal packed_depth
            inputs = dict(zip(("input_ids",), args, strict=False)) | kwargs
            trains = torch.is_grad_enabled() and len(args) < 2
            packed = self._packed(inputs) if trains else None
            if packed is None:
                return None
            packed_depth += 1
            return (), packed

        def keep_loss(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal packed_depth
            if not packed_depth:
                return None
            packed_depth -= 1
            return type(output)(loss=output.loss)

        handles = [
            model.register_forward_pre_hook(pack, with_kwargs=True),
            model.register_forward_hook(keep_loss),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Steps.

    def before_update(self) -> None:
        """All passes of a step are done, the weights have not moved."""
        self._end_first_step()
        self.setup.communication.before_update(self._trained())

    def after_update(self, step: int) -> None:
        """The weights have moved."""
        self.setup.communication.after_update(self._trained())
        self._saves.after_step(step)

    def after_epoch(self, step: int) -> None:
        """An epoch has ended."""
        self._saves.after_epoch(step)

    def end(self) -> None:
        """The training is over."""
        self.close()
        self._saves.close()

    def _end_first_step(self) -> None:
        proof, host = self.proof, self.host
        if proof is None or proof.awaits_loss:
            return
        if not proof.is_settled:
            if self._has_opened:
                return  # no pass had a loss
            self.report(
                "this trainer's steps don't call compute_loss; techniques of the model and its "
                "batches are left out"
            )
            self.techniques = []
        if proof.batches and self.techniques:
            slots = self.host.slots.offers - {*CHANGES_A_PASS}
            count = len(self.techniques) + sum(t.slot in slots for t in self.setup.plan)
            self.report(f"{proof}; {count} technique{'s' if count != 1 else ''} joined")
        compared = max((one.lines.steps_to_compare for one in host.evidence()), default=0)
        if proof.batches and 0 < compared <= host.steps() - host.step():
            self._plain_until = host.step() + 2
        self.proof = None

    def report(self, text: str) -> None:
        """Logs a sentence once, on the first rank."""
        if text not in self._reported and self.setup.context.world.is_main:
            _LOG.warning("speed_up: %s", text)
        self._reported.add(text)

    def _trained(self) -> list[Any]:
        return [p for p in self.host.model().parameters() if p.requires_grad]


class LossPasses:
    """Passes for the check of a library's loss, which is computed again.

    Args:
        hosted: edits the model for techniques.
        compute: the loss of a batch; its second argument is True for the batch of the pass that
            is compared.
        is_mixed: the host has an autocast.
    """

    def __init__(
        self, hosted: HostedTechniques, compute: Callable[[Any, bool], Tensor], is_mixed: bool
    ) -> None:
        self.is_mixed = is_mixed
        self.real: Any = None  # the batch of the training's own pass
        self.sums: dict[str, tuple[float, float]] = {}  # sums of that pass
        self._hosted, self._compute = hosted, compute
        self._gradient: Tensor | None = None  # gradient of its loss: accumulation divides there
        self._is_real = False

    def recorded(self, batch: Any, compute: Callable[[Any], Any]) -> Any:
        """Returns the loss of the training's own pass, with its number and gradient recorded."""
        self.real, self._gradient = detached(batch), None
        with self._scored() as scored:
            returned = compute(batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        if not isinstance(loss, Tensor):
            return returned
        self.sums = self._sums(loss, scored, True)
        loss = recorded_gradient(loss, self._keep_gradient)
        return (loss, *returned[1:]) if isinstance(returned, tuple) else loss

    def _keep_gradient(self, gradient: Tensor | None) -> None:
        self._gradient = gradient

    @property
    def model(self) -> nn.Module:
        return self._hosted.model

    @property
    def models(self) -> list[nn.Module]:
        return self._hosted.models

    def loss(self, batch: Any) -> Outputs:
        self.model.train()
        with self._scored() as scored:
            loss = self._compute(batch, self._is_real)
        sums = self._sums(loss, scored, self._is_real)
        return Outputs([loss], [self._gradient if self._is_real else None], sums)

    def batch(self, host_batch: Any, techniques: Sequence[Technique]) -> Any:
        self._is_real = host_batch is self.real
        return host_batch if self._hosted.packs_calls else batch_for(host_batch, techniques)

    def active(self, techniques: Sequence[Technique]) -> AbstractContextManager[None]:
        return self._hosted.active(techniques)

    def in_float32(self) -> AbstractContextManager[None]:
        return self._hosted.in_float32()

    @contextlib.contextmanager
    def _scored(self) -> Iterator[list[Tensor]]:
        """Yields a list of the labels' log-probabilities, (B, T - 1), of each call inside."""
        scored: list[Tensor] = []

        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            log_probs = getattr(output, "log_probs", None)
            if isinstance(log_probs, Tensor):
                scored.append(log_probs)

        handles = [model.register_forward_hook(record) for model in self.models]
        try:
            yield scored
        finally:
            for handle in handles:
                handle.remove()

    def _sums(
        self, loss: Tensor, scored: Sequence[Tensor], is_real: bool
    ) -> dict[str, tuple[float, float]]:
        """Returns the loss and each row's (or call's) summed log-probability, with their scales.

        A row's sum of float32 may differ by :data:`SUM_ROUNDING` of its terms. The loss may
        differ by what its derivative makes of that, for the reference's sums too.
        """
        number = float(loss.detach())
        sums = {"the loss": (number, abs(number))}
        for call, log_probs in enumerate(scored, 1):
            rows = log_probs.detach().double()
            # A batch that is packed before the call has other rows than the host's.
            compared = rows if self._hosted.packs_calls else rows.reshape(1, -1)
            totals, scales = compared.sum(-1), compared.abs().sum(-1) * SUM_ROUNDING
            sums |= {
                f"the log-probability of row {row} in call {call} of a model": (total, scale)
                for row, (total, scale) in enumerate(
                    zip(totals.tolist(), scales.tolist(), strict=True), 1
                )
            }

            if log_probs.requires_grad:
                log_probs.register_hook(functools.partial(self._widen, sums, rows, is_real))
        return sums

    def _widen(
        self, sums: dict[str, tuple[float, float]], rows: Tensor, is_real: bool, gradient: Tensor
    ) -> None:
        """Widens the scale of the loss by what roundings of the sums make of it."""
        share = float((gradient.double() * rows).abs().sum()) * 2 * SUM_ROUNDING
        if is_real and self._gradient is not None:  # the host may have scaled its loss
            share /= float(self._gradient.abs()) or 1.0
        total, scale = sums["the loss"]
        sums["the loss"] = total, scale + share
