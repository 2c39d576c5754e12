"""Effect check on the first step: removes techniques that change the host's result.

The first optimizer step is the host's own, without techniques. After the backward pass of
each of its micro-batches the check runs it twice: once as the host runs it, and once with
the techniques. Both runs have the same random state and no dropout. If the loss is a
library's, it is called again. If it is the user's, only the model's recorded calls are
repeated (:mod:`hasten.measure.quality.replay`):

    1. float32: Autocast is off and half-precision weights are widened. The loss and the
       gradient of each parameter must agree: |g - g'| is at most 0.1 % of |g|.
    2. Own format: If the run is not in float32, the cosine of each pair of gradients
       must be above 0.99.
    3. Removal: If they differ, one technique at a time is removed until they agree.
    4. Noise: If a host differs from itself (another random state, the same batch), that
       difference sets the bound. In the run's own format its inputs are also rounded
       otherwise. A router then sends some tokens to other experts, in one layer or another.
       So the noise of a parameter is the largest of its kind in all layers.

The training's own pass is the host's pass where its gradients are known: one process, no
dropout, the run's own format. If they differ, the host's pass runs again.

All ranks decide together. Afterwards random state, buffers, gradients and counters are
restored. If a host's batch has no padding, or only one document, two short documents of
different length are checked as well. They reveal a dropped mask or a leak between
documents. If recorded calls can't be repeated, no technique of the model stays.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.machine import environment, memory
from hasten.measure.quality.preserved import nothing_else_changes, seed_all, without_dropout
from hasten.measure.quality.probe_batches import (
    SEED,
    cut,
    document_calls,
    short_documents,
    token_count,
)
from hasten.measure.quality.replay import (
    CannotReplayError,
    Outputs,
    ReplayPasses,
    TrainedPass,
)
from hasten.parts.comm.groups import gathered_objects

LOSS_BOUND = 2e-5  # relative; sums of float32 in another order differ by some 1e-7
GRADIENT_BOUND = 1e-3  # of a parameter's norm
# Of the norm of all gradients. A gradient that is zero in exact arithmetic (the bias of a key) is
# rounding alone, and has no relative accuracy.
GRADIENT_FLOOR = 1e-6
COSINE_BOUND = 0.99
NOISE_FACTOR = 4.0  # two draws of a host's noise may differ more than the two that were measured
ROUNDING = 2.0**-8  # of a number in bf16
ROUNDINGS = 2  # other roundings of the host's inputs that are measured
SKETCH = 64  # numbers kept of a gradient where memory is short: its norm is then right to 18 %
SHORT_ROWS, SHORT_TOKENS = 2, 128  # of a batch that is cut because memory is short
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """Where two passes differ: the place, by how much, and the bound."""

    where: str
    size: float
    bound: float

    def __str__(self) -> str:
        if math.isinf(self.size):
            return self.where
        return f"{self.where} differs by {self.size:.2g} (bound {self.bound:.2g})"


@dataclass(frozen=True)
class Removal:
    """A technique that was taken away, and the difference that it had made."""

    technique: Technique
    difference: Difference


class TechniquePasses(Protocol):
    """The passes that a host supplies for the check."""

    @property
    def model(self) -> nn.Module:
        """The model with the compared gradients, without its wrapper for replicas."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """That model, and others that the pass calls."""

    def loss(self, batch: Any) -> Tensor | Outputs:
        """The loss of a batch as the host computes it, a number with a gradient; or several."""

    def active(self, techniques: Sequence[Technique]) -> contextlib.AbstractContextManager[Any]:
        """The techniques' edits of the model hold inside."""

    def batch(self, host_batch: Any, techniques: Sequence[Technique]) -> Any:
        """The host's batch as the techniques lay it out."""

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        """The host's own autocast is off inside."""

    @property
    def is_mixed(self) -> bool:
        """True if the host trains under autocast."""


class _ShortOfMemoryError(Exception):
    """Some rank ran out of memory."""


class _HostFailsError(Exception):
    """The host's own pass fails, which its training will report itself."""


class _NoLossError(Exception):
    """The host's own loss is no number, as that of a batch without labels."""


class GradientRecord:
    """Gradients of one pass, complete or as sketches, for comparisons.

    A sketch adds each element, with a random sign, to one of :data:`SKETCH` numbers. This
    map is linear: the sketch of a difference is the difference of sketches. Its norm is an
    unbiased estimate (Charikar, Chen and Farach-Colton, 2002).
    """

    def __init__(
        self, gradients: Mapping[str, Tensor | None], sketched: bool, on_device: bool = False
    ) -> None:
        self.sketched, self.on_device = sketched, on_device
        self.norms = {name: _norm(g) for name, g in gradients.items()}
        self.norm = math.sqrt(sum(n * n for n in self.norms.values()))
        self._compared = {name: self._form(name, g) for name, g in gradients.items()}

    def distance(self, name: str, other: Tensor | None) -> float:
        """|g - g'| of one parameter; a missing gradient is zero."""
        recorded, theirs = self._compared.get(name), self._form(name, other)
        if recorded is None or theirs is None:
            return _norm(theirs) if recorded is None else _norm(recorded)
        return _norm(recorded - theirs)

    def cosine(self, name: str, other: Tensor | GradientRecord | None) -> float:
        """Cosine of the angle between the gradients of one parameter."""
        recorded = self._compared.get(name)
        theirs = (
            other._compared.get(name)
            if isinstance(other, GradientRecord)
            else self._form(name, other)
        )
        if recorded is None or theirs is None:
            return 1.0 if recorded is None and theirs is None else 0.0
        scale = _norm(recorded) * _norm(theirs)
        return float((recorded * theirs).sum()) / scale if scale else 0.0

    def _form(self, name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        flat = gradient.detach().flatten().float()
        if not self.sketched:
            return flat if self.on_device else flat.cpu()
        sums = torch.zeros(SKETCH, device=flat.device)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        for chunk in flat.split(2**22):
            buckets = torch.randint(2 * SKETCH, (len(chunk),), generator=generator)
            buckets = buckets.to(flat.device)
            signs = 1 - 2 * (buckets >= SKETCH).to(chunk.dtype)
            sums.index_add_(0, buckets % SKETCH, chunk * signs)
        return sums.cpu()


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor.detach().float()))


Sums = Mapping[str, tuple[float, float]]  # of outputs, with their scales


@dataclass
class _Pass:
    sums: Sums
    gradients: dict[str, Tensor | None]


@dataclass
class _HostVariation:
    """By how much the host differs from itself."""

    sums: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Trial:
    """The difference that is left without one technique."""

    without: Technique
    difference: Difference | None
    differs: bool

    @property
    def size(self) -> float:
        return 0.0 if self.difference is None else self.difference.size


class FirstStepProof:
    """Compares the passes of the first step; ``techniques`` are those that are left.

    Args:
        passes: what the host lends.
        techniques: those that change the passes of training.
        host_name: for the lines that are logged.
        pad_id: filler of the documents that are added.
    """

    def __init__(
        self,
        passes: TechniquePasses,
        techniques: Sequence[Technique],
        host_name: str,
        pad_id: int = 0,
    ) -> None:
        self.passes, self.techniques = passes, list(techniques)
        self.removals: list[Removal] = []
        self.largest = 0.0  # of the relative differences that were accepted
        self.batches = 0  # that were compared to the end
        self.was_complete = False
        self.awaits_loss = False  # no batch so far had a loss: the host trains by itself
        self.seconds = 0.0  # that the check took
        self._name, self._pad_id = host_name, pad_id
        self._has_probed = self._is_over = False
        self._is_noisy = False

    def __str__(self) -> str:
        return (
            "first step: loss and gradients equal to "
            f"{max(self.largest, torch.finfo(torch.float32).eps):.1e} of those without hasten"
        )

    @property
    def is_settled(self) -> bool:
        """True after a batch that was compared, or if there is nothing to compare."""
        return self._is_over or self.batches > 0 or not self.techniques

    def check(
        self, host_batch: Any, *host_objects: Any, trained: TrainedPass | None = None
    ) -> list[Removal]:
        """Runs a batch of the first step both ways; returns the techniques removed for it.

        Args:
            host_batch: the host's batch, or the recorded calls of its pass.
            host_objects: of the host; their counters and buffers are restored afterwards.
            trained: the training's own pass of this batch. If the techniques agree with it, the
                host's pass isn't repeated.
        """
        if self._is_over or not self.techniques:
            return []
        before, began = len(self.removals), time.perf_counter()
        try:
            with nothing_else_changes(self.passes.model, *host_objects):
                with without_dropout(self.passes.model) as had_dropout:
                    trained = None if had_dropout else trained
                self._require(host_batch, repeatable=trained is None or self._is_narrow)
                with without_dropout(self.passes.model):
                    for batch in self._batches(host_batch):
                        with contextlib.suppress(_NoLossError):
                            self._check(batch, trained if batch is host_batch else None)
                            self.batches += 1
            self.awaits_loss = self.batches == 0
        except (_ShortOfMemoryError, _HostFailsError, CannotReplayError) as error:
            self._is_over, self.awaits_loss = True, False
            is_short = isinstance(error, _ShortOfMemoryError)
            reason = "memory ran out" if is_short else str(error)
            if isinstance(self.passes, ReplayPasses):  # a user's loss: what is unproven goes
                difference = Difference(f"it can't be compared: {reason}", math.inf, 0.0)
                self.removals += [Removal(technique, difference) for technique in self.techniques]
                self.techniques = []
            elif is_short:
                _LOG.warning(
                    "speed_up: the proof on the first step ended because memory ran out; the "
                    "techniques stay, unproven on this batch"
                )
            else:
                _LOG.info("the proof on the first step ended: %s", reason)
        self.seconds = time.perf_counter() - began
        return self.removals[before:]

    @property
    def _is_narrow(self) -> bool:
        """True if the run has a format of half precision."""
        narrow = (torch.bfloat16, torch.float16)
        return self.passes.is_mixed or any(
            p.dtype in narrow for p in self.passes.model.parameters()
        )

    def _require(self, calls: Any, repeatable: bool) -> None:
        """Raises CannotReplayError if recorded calls can't be compared, or differ again."""
        if not isinstance(self.passes, ReplayPasses):
            return
        reason: CannotReplayError | None = None
        try:
            self.passes.require_recorded(calls)
            if repeatable:
                self.passes.require_repeatable(calls)
        except CannotReplayError as error:
            reason = error
        if on_any_rank(reason is not None):
            raise reason or CannotReplayError("because those of another rank can't")

    def _batches(self, host_batch: Any) -> list[Any]:
        """The batch, and once two documents in its form.

        The batch is cut if the host's pass wouldn't fit into the free memory.
        """
        is_long = on_any_rank(not self._fits(host_batch, copies=2))
        is_recorded = isinstance(self.passes, ReplayPasses)
        if is_long and is_recorded:  # the gradients of its outputs belong to this batch
            raise _ShortOfMemoryError
        batches = [cut(host_batch, SHORT_ROWS, SHORT_TOKENS) if is_long else host_batch]
        if not self._has_probed:
            self._has_probed = True
            documents = document_calls if is_recorded else short_documents
            batches.append(documents(host_batch, self._pad_id))
        return [batch for batch in batches if batch is not None]

    def _fits(self, batch: Any, copies: int) -> bool:
        """True if a pass and so many float32 copies of the gradients fit into the free memory."""
        model, tokens = self.passes.model, token_count(batch)
        config = getattr(model, "config", None)
        sizes = [getattr(config, name, 0) or 0 for name in ("vocab_size", "hidden_size")]
        layers = getattr(config, "num_hidden_layers", 0) or 0
        # Three copies of the logits, and 34 numbers a layer of each hidden one (arXiv:2205.05198).
        each = 4 * (3 * sizes[0] + 34 * sizes[1] * layers)
        free = memory.free_bytes(_device(model)) - copies * _trained_bytes(model)
        return bool(tokens * each <= 0.8 * free)

    def _check(self, batch: Any, trained: TrainedPass | None) -> None:
        model, size = self.passes.model, _trained_bytes(self.passes.model)
        # Gradients stay on a GPU that has room for them, without copies to the host.
        has_room = 6 * size <= memory.free_bytes(_device(model)) and self._fits(batch, copies=5)
        on_device = has_room and _device(model).type != "cpu"
        sketched = not on_device and 3 * size > memory.free_bytes("cpu")
        record = partial(GradientRecord, sketched=sketched, on_device=on_device)
        wide: GradientRecord | None = None
        is_narrow = self._is_narrow  # not once the weights are widened
        with _float32(self.passes) as possible:
            if possible:
                wide = self._agree(batch, self._near, record, None if is_narrow else trained)
        if is_narrow:
            compare = partial(self._alike, wide)
            self._agree(batch, compare, record, trained, rounded=True)

    def _agree(
        self,
        batch: Any,
        compare: Callable[..., Difference | None],
        record: Callable[[Mapping[str, Tensor | None]], GradientRecord],
        trained: TrainedPass | None,
        rounded: bool = False,
    ) -> GradientRecord:
        """Take techniques away until their pass agrees with the host's; the host's gradients."""
        if trained is not None:
            example = record(trained.gradients)
            with contextlib.suppress(_PassError):
                if (
                    compare(
                        trained.sums, example, _HostVariation(), self._run(batch, self.techniques)
                    )
                    is None
                ):
                    self.was_complete = True
                    return example
            self._require(batch, repeatable=True)
        host = self._run(batch, [], is_host=True)
        if on_any_rank(not all(math.isfinite(total) for total, _ in host.sums.values())):
            raise _NoLossError
        sums, example, noise = host.sums, record(host.gradients), _HostVariation()
        del host

        def difference(techniques: Sequence[Technique]) -> tuple[Difference | None, bool]:
            try:
                mismatch = compare(sums, example, noise, self._run(batch, techniques))
            except _PassError as error:
                mismatch = Difference(f"its pass ends with {error}", math.inf, 0.0)
            return mismatch, on_any_rank(mismatch is not None)

        now, differs = difference(self.techniques)
        if differs:
            self._measure(noise, batch, sums, example)
            if rounded:
                self._add_rounding(noise, batch, example)
            now, differs = difference(self.techniques)
        self._remove_differing(difference, now, differs)
        return example

    def _remove_differing(
        self,
        difference: Callable[[Sequence[Technique]], tuple[Difference | None, bool]],
        now: Difference | None,
        differs: bool,
    ) -> None:
        """Removes techniques until those that are left agree with the host."""
        while differs and self.techniques:
            reason = now or Difference("a pass on another rank differs", math.inf, 0.0)
            if on_any_rank(math.isinf(reason.size)) and len(self.techniques) > 1:
                # A pass that fails hides other differences: which techniques fail by themselves?
                alone = [(t, *difference([t])) for t in self.techniques]
                failing = {t: mismatch or reason for t, mismatch, fails in alone if fails}
                if failing:
                    self.removals += [Removal(t, mismatch) for t, mismatch in failing.items()]
                    self.techniques = [t for t in self.techniques if t not in failing]
                    now, differs = difference(self.techniques)
                    continue
            trials: list[_Trial] = []
            # Packing is the last to go: where either of two would do, the other one is at fault,
            # because a packed batch is the host's own in another layout.
            for technique in sorted(self.techniques, key=lambda t: t.slot is Slot.COLLATE):
                remaining = [t for t in self.techniques if t is not technique]
                trials.append(_Trial(technique, *difference(remaining)))
                if not trials[-1].differs:
                    break
            best = trials[-1]
            if best.differs:  # each rank must choose the same one, and sizes differ between ranks
                shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
                best = trials[0] if shared else min(trials, key=lambda t: t.size)
            self.removals.append(Removal(best.without, reason))
            self.techniques = [t for t in self.techniques if t is not best.without]
            now, differs = best.difference, best.differs
        self.was_complete = not differs

    def _measure(self, noise: _HostVariation, batch: Any, sums: Sums, host: GradientRecord) -> None:
        """By how much the host differs from itself with another random state."""
        again = self._run(batch, [], is_host=True, seed=SEED + 1)
        noise.sums = {name: abs(again.sums[name][0] - total) for name, (total, _) in sums.items()}
        noise.gradients = {n: host.distance(n, g) for n, g in again.gradients.items()}
        share = max(noise.sums[name] / max(scale, 1e-12) for name, (_, scale) in sums.items())
        if on_any_rank(share > LOSS_BOUND) and not self._is_noisy:
            self._is_noisy = True
            _LOG.warning(
                "speed_up: %s differs from itself by %.1e of the loss on the same batch. "
                "Differences up to %g times that can't be distinguished from its noise",
                self._name,
                share,
                NOISE_FACTOR,
            )

    def _add_rounding(self, noise: _HostVariation, batch: Any, host: GradientRecord) -> None:
        """Adds to the noise by how much other roundings change the host's gradients."""
        largest: dict[str, float] = {}  # relative to the norm, by kind of parameter
        kinds = {name: re.sub(r"\d+", "*", name) for name in host.norms}  # in all layers, experts
        weight = _input_embedding(self.passes.model)
        for draw in range(ROUNDINGS):
            with _rounded_otherwise(weight, SEED + draw):
                other = self._run(batch, [], is_host=True)
            for name, gradient in other.gradients.items():
                share = host.distance(name, gradient) / (host.norms[name] or 1.0)
                largest[kinds[name]] = max(largest.get(kinds[name], 0.0), share)
        for name, norm in host.norms.items():
            noise.gradients[name] = max(noise.gradients[name], largest[kinds[name]] * norm)

    def _near(
        self, sums: Sums, host: GradientRecord, noise: _HostVariation, other: _Pass
    ) -> Difference | None:
        for name, (total, size) in sums.items():
            bound = LOSS_BOUND * max(size, 1e-3) + NOISE_FACTOR * noise.sums.get(name, 0.0)
            gap = abs(other.sums[name][0] - total)
            if not gap <= bound:  # not a number, too
                scale = max(size, 1e-12)
                return Difference(name, _number(gap / scale), bound / scale)
        worst: Difference | None = None
        for name, gradient in other.gradients.items():
            distance, norm = host.distance(name, gradient), host.norms[name]
            slack = GRADIENT_BOUND * norm + GRADIENT_FLOOR * host.norm
            slack += NOISE_FACTOR * noise.gradients.get(name, 0.0)
            scale = max(norm, GRADIENT_FLOOR * host.norm, 1e-30)
            size, limit = distance / scale, slack / scale
            if distance <= slack:
                if norm > 1e-3 * host.norm:  # smaller ones are rounding for a good part
                    self.largest = max(self.largest, size)
            elif worst is None or _number(size) > worst.size:
                worst = Difference(f"the gradient of {name}", _number(size), limit)
        return worst

    def _alike(
        self,
        wide: GradientRecord | None,
        sums: Sums,
        host: GradientRecord,
        noise: _HostVariation,
        other: _Pass,
    ) -> Difference | None:
        """The gradient with the lowest cosine, in the run's own format.

        Gradients are skipped as rounding if the host's own gradient exceeds the bound relative
        to its float32 gradient.
        """
        worst: Difference | None = None
        for name, gradient in other.gradients.items():
            norm = host.norms[name]
            if norm <= 1e-3 * host.norm and wide is None:
                continue
            if wide is not None and wide.cosine(name, host) <= COSINE_BOUND:
                continue
            cosine_gap = 1 - host.cosine(name, gradient)
            # Gradients that differ by a share s of their norm have a cosine of about 1 - s²/2.
            share = NOISE_FACTOR * noise.gradients.get(name, 0.0) / (norm or 1.0)
            bound = max(1 - COSINE_BOUND, share**2 / 2)
            if not cosine_gap < bound and (worst is None or _number(cosine_gap) > worst.size):
                where = f"1 - cosine of the gradients of {name}"
                worst = Difference(where, _number(cosine_gap), bound)
        return worst

    def _run(
        self,
        batch: Any,
        techniques: Sequence[Technique],
        is_host: bool = False,
        seed: int = SEED,
    ) -> _Pass:
        error: BaseException | None = None
        made: _Pass | None = None
        try:
            made = self._pass(batch, techniques, seed)
        except Exception as raised:
            error = raised
        short = error is not None and memory.is_out_of_memory(error)
        if on_any_rank(short):
            raise _ShortOfMemoryError from error
        if is_host and on_any_rank(error is not None):
            text = f"{self._name}'s own pass ends with {_error_text(error)}"
            raise _HostFailsError(text) from error
        if made is None:
            raise _PassError(_error_text(error)) from error
        return made

    def _pass(self, batch: Any, techniques: Sequence[Technique], seed: int) -> _Pass:
        model = self.passes.model
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        seed_all(seed)
        inputs = copy.copy(self.passes.batch(batch, techniques))  # hosts add keys to it
        with self.passes.active(techniques), torch.enable_grad():
            outputs = self.passes.loss(inputs)
            if isinstance(outputs, Tensor):
                number = float(outputs.detach())
                outputs = Outputs([outputs], [None], {"the loss": (number, abs(number))})
            if not outputs.tensors:  # nothing was trained by these calls
                return _Pass({"the loss": (math.nan, math.nan)}, {})
            gradients = _gradients(outputs, list(named.values()))
        return _Pass(outputs.sums, dict(zip(named, gradients, strict=True)))


class _PassError(Exception):
    """A pass with techniques has failed."""


def _error_text(error: BaseException | None) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _gradients(outputs: Outputs, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Gradients without touching ``.grad``, unless reentrant checkpoints leave no other way."""
    tensors, start = outputs.tensors, outputs.gradients
    try:
        return list(torch.autograd.grad(tensors, parameters, start, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error) or any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters
        ):
            raise
    before = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(tensors, start)
        return [p.grad for p in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def proof_is_on() -> bool:
    """False if the variable HASTEN_PROOF is ``off``."""
    return environment.variable("HASTEN_PROOF") != "off"


def on_any_rank(happened: bool) -> bool:
    """The same answer on all ranks: true if it holds on one of them."""
    return any(gathered_objects(bool(happened)))


# The formats of the two looks.


@contextlib.contextmanager
def _float32(passes: TechniquePasses) -> Iterator[bool]:
    """Half-precision weights are widened inside; False if there is no memory for that."""
    narrow: dict[int, Tensor] = {
        id(t): t
        for model in passes.models
        for t in (*model.parameters(), *model.buffers())
        if t.dtype in (torch.bfloat16, torch.float16)
    }
    need = sum(4 * t.numel() for t in narrow.values())
    if on_any_rank(2 * need > memory.free_bytes(_device(passes.model))):
        _LOG.info("memory is short: the proof compares the run's own format alone")
        yield False
        return
    originals = [(t, t.data) for t in narrow.values()]
    try:
        for tensor, narrow_data in originals:
            tensor.data = narrow_data.float()
        torch.set_float32_matmul_precision("highest")
        with passes.in_float32():
            yield True
    finally:
        for tensor, narrow_data in originals:
            tensor.data = narrow_data


def _input_embedding(model: nn.Module) -> Tensor | None:
    """The weight of the input embeddings, if it is whole on this rank."""
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)
    try:
        weight = getattr(embedding(), "weight", None)
    except NotImplementedError:  # transformers' word for a model without one
        return None
    return weight if isinstance(weight, nn.Parameter) and type(weight.data) is Tensor else None


@contextlib.contextmanager
def _rounded_otherwise(weight: Tensor | None, seed: int) -> Iterator[None]:
    """Each number of the weight differs by up to one rounding inside.

    Raises:
        _ShortOfMemoryError: no memory for a copy of it, on some rank.
    """
    original: Tensor | None = None
    error: BaseException | None = None
    try:
        original = None if weight is None else weight.detach().clone()
    except Exception as raised:
        error = raised
    if on_any_rank(error is not None and memory.is_out_of_memory(error)):
        raise _ShortOfMemoryError from error
    if error is not None:
        raise error
    if weight is None or original is None:
        yield
        return
    generator = torch.Generator(weight.device).manual_seed(seed)
    try:
        with torch.no_grad():
            for rows in weight.detach().split(4096):  # the draws need no memory worth mentioning
                draw = torch.rand(rows.shape, generator=generator, device=rows.device)
                rows.mul_(1 + ROUNDING * (2 * draw - 1))
        yield
    finally:
        with torch.no_grad():
            weight.copy_(original)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _trained_bytes(model: nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
