"""PRECISION: the number format of the step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hasten.core.context import JobContext
from hasten.core.setup import GivenPrecision, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import as_input_error
from hasten.machine.gain import Gain
from hasten.parts.nn.kernel_variants import bf16_gain
from hasten.parts.nn.quantised import RECIPES, SIDE, Float8Layers
from hasten.parts.optim.master_weights import LossScale, MasterWeights
from hasten.techniques.layout.ranks import LocalShards

CLAIMS = (
    Claim("tokens_per_second", 1.15, "the articles' mixed precision: +15 % speed"),
    Claim("peak_memory_bytes", 0.70, "the articles' mixed precision: -30 % memory"),
)


FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SETS = ("avx512_fp16", "amx_fp16")
BF16_KERNELS = ("avx512f", "amx_bf16", "bf16")  # torch has products for these
IF_FASTER = "leave it out where a measurement of seconds doesn't show it faster: processors alone"
EMULATE = "allow it where the format is multiplied in software: slow, anywhere"
BF16_CAPABILITY = (8, 0)
FLOAT8_CAPABILITY = (9, 0)  # torch's product with a scale for each row


def _older(context: JobContext, least: tuple[int, int]) -> str:
    """Returns a GPU of the machine with a lower compute capability; empty if there is none."""
    for gpu in context.hardware.accelerators:
        major, _, minor = gpu.capability.partition(".")
        if (int(major), int(minor or 0)) < least:
            return gpu.name
    return ""


def _slow_bf16(context: JobContext) -> tuple[str, ...]:
    if context.on_gpu and (old := _older(context, BF16_CAPABILITY)):
        return (f"{old} has no bf16 units (compute capability below 8.0)",)
    # elsewhere no list of instruction sets exists
    lists_features = context.hardware.system.startswith("Linux")
    if (
        context.on_gpu
        or not lists_features
        or set(BF16_KERNELS) & set(context.hardware.instruction_sets)
    ):
        return ()
    return (
        f"{context.hardware.cpu} multiplies bf16 in software only, many times slower than "
        "float32 (no AVX-512, AMX or Arm bf16); leave it out, or force it with emulate: true. With "
        "fused_layers it is then as fast as float32 or faster, and needs less memory",
    )


def gain_here(context: JobContext) -> Gain | None:
    """Returns bf16's measured gain on this job's device; None without products in bf16."""
    return None if _slow_bf16(context) else bf16_gain(context.device)


def why_no_gain(context: JobContext) -> str:
    """Returns why bf16 gains nothing on this job's processor.

    The result is empty if bf16 has a gain or if that is unknown. Nothing is measured on a
    GPU. With several ranks nothing is measured either, because each rank measures alone and
    their results might differ.
    """
    if slow := _slow_bf16(context):
        return slow[0]
    if context.on_gpu or context.world.size > 1:
        return ""
    gain = gain_here(context)
    if gain is None or gain.sure:
        return ""
    sentence = f"bf16 has {gain} the speed of float32 on this processor"
    return sentence if gain.lost else f"{sentence}, which leaves it open"


@dataclass(frozen=True)
class BF16MasterWeights(Technique):
    """bf16 weights, activations and gradients; the optimizer moves float32 masters."""

    slot = Slot.PRECISION
    fidelity = Fidelity.ROUNDING
    auto = "usual"
    emulate: bool = setting(False, EMULATE)
    only_if_faster: bool = setting(False, IF_FASTER)
    claims = CLAIMS

    def apply(self, setup: Setup) -> None:
        setup.precision = MasterWeights(torch.bfloat16)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        slow = () if self.emulate else _slow_bf16(context)
        why = why_no_gain(context) if self.only_if_faster else ""
        return (*context.model.why_not_float32(), *slow) or ((why,) if why else ())

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(bytes=0.5, resident_bytes=2.0 * context.model.parameters)

    def gain(self, context: JobContext) -> Gain | None:
        # with fused_layers, hasten's kernels multiply bf16 on processors without units for it
        return bf16_gain(context.device) if self.emulate else gain_here(context)

    def check_effect(self, session: Session) -> EffectCheck:
        working = {p.dtype for p in session.module.parameters() if p.requires_grad}
        precision = session.setup.precision
        if isinstance(precision, LocalShards) and precision.dtype is not None:
            # Format of gathered blocks; the shards are the masters
            working = {precision.dtype}
        masters = {p.dtype for p in precision.parameters()}
        return EffectCheck(
            effective=working == {torch.bfloat16} and masters == {torch.float32},
            evidence=f"weights {_names(working)}, masters {_names(masters)}",
        )


@dataclass(frozen=True)
class Autocast(Technique):
    """float32 weights, with matrix products in 16 bits by the rules of ``torch.autocast``.

    fp16 is for GPUs without bf16. Its range is short, so the loss is multiplied by a
    dynamic scale (Micikevicius et al., arXiv:1710.03740). A step with overflowing gradients
    is skipped.
    """

    slot = Slot.PRECISION
    fidelity = Fidelity.ROUNDING
    auto = "try"
    dtype: str = setting("bf16", "bf16, or fp16 with a dynamic loss scale", only=tuple(FORMATS))
    initial_scale: float = setting(65536.0, "the loss scale at the first step, fp16 only")
    growth_interval: int = setting(2000, "finite steps before the scale doubles, fp16 only")
    emulate: bool = setting(False, EMULATE)
    claims = CLAIMS

    def __post_init__(self) -> None:
        super().__post_init__()
        LossScale(self.initial_scale, interval=self.growth_interval)  # raises ValueError

    def apply(self, setup: Setup) -> None:
        setup.precision = AutocastRegion(setup.job.device, FORMATS[self.dtype])
        if self.dtype == "fp16":
            setup.loss_scale = LossScale(self.initial_scale, interval=self.growth_interval)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if self.emulate:
            return ()
        if self.dtype != "fp16":
            return _slow_bf16(context)
        # Every GPU that torch supports has fp16 units; few processors do.
        if context.on_gpu or set(FP16_SETS) & set(context.hardware.instruction_sets):
            return ()
        return (
            f"{context.hardware.cpu} multiplies fp16 in software only (neither avx512_fp16 nor "
            "amx_fp16): choose dtype bf16",
        )

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(bytes=0.6)

    def gain(self, context: JobContext) -> Gain | None:
        return gain_here(context) if self.dtype == "bf16" else None

    def check_effect(self, session: Session) -> EffectCheck:
        number_format = _format(session)
        dtypes = number_format.formats if isinstance(number_format, AutocastRegion) else set()
        scale = session.setup.loss_scale
        scaled = (
            f"; loss scale {scale.value:g}, {scale.skipped} steps given up for it"
            if isinstance(scale, LossScale)
            else ""
        )
        evidence = f"layers returned {_names(dtypes) or 'nothing yet'}{scaled}"
        return EffectCheck(FORMATS[self.dtype] in dtypes, evidence)


@dataclass(frozen=True)
class Float8(Technique):
    """float8 inputs for the products of linear layers, the rest under bf16 autocast.

    Weights stay float32 masters. Head, embeddings, routers and routed experts stay in bf16.
    Layers with sides that aren't multiples of 16 stay in bf16 too.
    """

    slot = Slot.PRECISION
    fidelity = Fidelity.LOSSY
    auto = "try"
    recipe: str = knob("rowwise", "what shares a scale: a row, or a block of 128", only=RECIPES)
    emulate: bool = setting(False, "round as float8 does, but multiply in float32: slow, anywhere")
    keep_weights: bool = knob(
        False,
        "round weights once a step, not in each pass: 2 bytes a weight",
        choices=(False, True),
    )

    def apply(self, setup: Setup) -> None:
        layers = Float8Layers("rowwise" if self.recipe == "rowwise" else "blockwise", self.emulate)
        setup.precision = AutocastRegion(
            setup.job.device, torch.bfloat16, layers, keep_weights=self.keep_weights
        )

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reasons = []
        if not self.emulate and not context.on_gpu:
            reasons.append(
                "a processor has no float8 products (emulate: true shows their rounding)"
            )
        elif not self.emulate and (old := _older(context, FLOAT8_CAPABILITY)):
            reasons.append(f"{old} has no float8 products (compute capability below 9.0)")
        if not self.emulate and self.recipe == "blockwise":
            reasons.append(
                "the blockwise recipe exists emulated only; set rowwise, or emulate: true"
            )
        if context.model.hidden_size % SIDE:
            reasons.append(
                f"float8 products need sides that are multiples of {SIDE}, and this "
                f"{context.model.architecture} is {context.model.hidden_size} wide"
            )
        if not context.model.hidden_size:
            reasons.append(
                f"needs a language model's linear layers; {context.model.architecture} is none"
            )
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        copy_bytes = 2.0 * context.model.parameters if self.keep_weights else 0.0
        return Forecast(bytes=1.0 if self.emulate else 0.4, resident_bytes=copy_bytes)

    def check_effect(self, session: Session) -> EffectCheck:
        number_format = _format(session)
        layers = number_format.layers if isinstance(number_format, AutocastRegion) else None
        if layers is None:
            return EffectCheck(False, "no layer computes in float8")
        how = "emulated" if layers.emulate else "in hardware"
        ran, names = len(layers.ran), len(layers.names)
        evidence = f"{ran} of {names} linear layers ran in float8 {layers.recipe}, {how}"
        if self.keep_weights:
            frequency = "once a step" if layers.have_kept else "in each pass all the same"
            evidence += f", their weights rounded {frequency}"
        return EffectCheck(ran == names, f"{evidence}; {len(layers.left)} left out for their sides")


class AutocastRegion(GivenPrecision):
    """The unchanged model, with its forward pass under ``torch.autocast``.

    If ``layers`` exist, they are also converted to float8. With ``keep_weights`` their
    weights are rounded once for the passes of a step. This lasts from ``before_backward``
    until other code requests the true weights, which it may write to. With sharded weights
    it is never called, and each pass gathers weights in memory of its own.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        layers: Float8Layers | None = None,
        keep_weights: bool = False,
    ) -> None:
        super().__init__()
        self._device_type = torch.device(device).type
        self._dtype = dtype
        self.layers = layers
        self._keep_weights = keep_weights
        self._hooks: list[RemovableHandle] = []
        self.formats: set[torch.dtype] = set()  # formats in which linear layers returned results

    def prepare(self, module: nn.Module) -> None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        if linear is not None:
            self._hooks.append(linear.register_forward_hook(self._look))
        if self.layers is not None:
            with as_input_error("float8"):
                self.layers.attach(module)

    def region(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any] = torch.autocast(self._device_type, self._dtype)
        return region

    def before_backward(self, reduces: bool) -> None:
        if self.layers is not None and self._keep_weights:
            self.layers.keep_weights(True)

    def parameters(self) -> list[Tensor]:
        self.update_model_weights()
        return super().parameters()

    def update_model_weights(self) -> None:
        if self.layers is not None:
            self.layers.keep_weights(False)

    def finish(self, module: nn.Module) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.layers is not None:
            self.layers.detach()

    def _look(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.formats.add(out.dtype)


def _format(session: Session) -> object:
    """Returns the number format without the wrapper for sharded weights."""
    precision = session.setup.precision
    return precision.inner if isinstance(precision, LocalShards) else precision


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
