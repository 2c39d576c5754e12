"""LAYOUT: DeepSpeed's ZeRO, run by DeepSpeed itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch
from hasten.core.setup import EngineParts, Session, Setup, StepNumbers
from hasten.core.slot import Slot
from hasten.core.step import forward_of, summed_numbers
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.core.timing import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER
from hasten.errors import InputError, as_input_error
from hasten.machine import environment
from hasten.parts.checkpoint.chunks import local_part
from hasten.parts.checkpoint.flat import FlatShard
from hasten.parts.distributed.deepspeed_config import (
    BATCH_KEYS,
    TrainerSettings,
    batch_sizes,
    fill_auto,
    read_config,
    section_enabled,
)
from hasten.parts.distributed.deepspeed_engine import ZeroTrainer, why_not
from hasten.techniques.layout.ranks import RanksLayout

EXTENSIONS = "TORCH_EXTENSIONS_DIR"
# Slots that DeepSpeed's config decides.
DECIDED_BY_DEEPSPEED = {
    Slot.PRECISION: "its number format is its config's (bf16, fp16), or this technique's dtype",
    Slot.COMMUNICATION: "gradients travel in ZeRO's own reduce-scatter; its own way of making them "
    "small is zero_quantized_gradients in its config (ZeRO++)",
    Slot.OPTIMIZER: "it gives the job's AdamW flat pieces of many weights, which other rules can't "
    "separate",
    Slot.AVERAGE: "it keeps the true weights in pieces",
}
TWICE = (
    "its modules need the whole model, which DeepSpeed splits. Releases 0.18.3 to 0.19.3 have "
    "wrong gradients if a module runs twice in a step (ZeRO-2, bf16)"
)
JOBS = ("optimizer", "scheduler", *BATCH_KEYS)
OFFLOADED = ("optimizer", "param")
DTYPES = ("float32", "bf16", "fp16")


@dataclass(frozen=True)
class DeepSpeed(Technique):
    """ZeRO-1, 2 or 3 of the separate package DeepSpeed, from a DeepSpeed config."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    config: str = setting("", "a ds_config.json; without one, ZeRO at this stage")
    stage: int = knob(2, "1 deals out optimizer state, 2 gradients, 3 weights", only=(1, 2, 3))
    offload: bool = setting(False, "optimizer state in host memory; without a config")
    dtype: str = setting(
        "float32", "float32, bf16 or fp16, if the config has no format", only=DTYPES
    )

    def settings_of(self, trainer_settings: TrainerSettings) -> dict[str, Any]:
        """Returns the config without any "auto".

        Raises:
            InputError: the file can't be used, or has no ZeRO stage.
        """
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {"zero_optimization": zero}
        with as_input_error(self.name()):
            if self.config:
                config = read_config(Path(self.config))
            enabled = {name: section_enabled(config, name) for name in DTYPES[1:]}
            if (
                self.dtype != "float32"
                and enabled[self.dtype] is None
                and True not in enabled.values()
            ):
                config[self.dtype] = {"enabled": True}
            # DeepSpeed doesn't decide the other settings of the job
            batch_sizes(config, trainer_settings)
            filled = fill_auto({k: v for k, v in config.items() if k not in JOBS}, trainer_settings)
        if not (filled.get("zero_optimization") or {}).get("stage"):
            raise InputError(
                f"{self.name()}: {self.config} has no zero_optimization stage above 0; set 1, 2 "
                "or 3, or take ddp as the layout"
            )
        return filled

    def apply(self, setup: Setup) -> None:
        if setup.context.world.size == 1:
            return
        if setup.job.unit == "pairs":
            raise InputError(
                f"plan: {self.name()} isn't tested with preference pairs; take fsdp2 instead"
            )
        for technique in setup.plan:
            if technique.slot in DECIDED_BY_DEEPSPEED:
                raise InputError(
                    f"plan: {self.name()} can't go with {technique.name()}, as under DeepSpeed "
                    f"{DECIDED_BY_DEEPSPEED[technique.slot]}; leave {technique.name()} out, or "
                    "take fsdp2"
                )
            if technique.slot is Slot.OBJECTIVE:
                raise InputError(
                    f"plan: {self.name()} can't go with {technique.name()}: {TWICE}. Take ddp as "
                    "the layout, or leave one of them out"
                )
        if not setup.job.counted:
            raise InputError(
                f"plan: {self.name()} needs the number of a step's trained tokens before its "
                "passes; take ddp or fsdp2 with a loss of your own"
            )
        job = setup.job
        config = self.settings_of(
            TrainerSettings(
                world=setup.context.world.size,
                batch=job.batch.examples,
                clipping=job.max_grad_norm,
                hidden=setup.context.model.hidden_size,
                fp16=self.dtype == "fp16",
                bf16=self.dtype == "bf16",
            )
        )
        clipping, max_norm = config.get("gradient_clipping"), job.max_grad_norm
        if clipping is not None and clipping != (max_norm or 0.0):
            raise InputError(
                f"{self.name()}: gradient_clipping is {clipping} and max_grad_norm {max_norm}; set "
                "gradient_clipping to auto, or give both the same value"
            )
        offloads = [config["zero_optimization"].get(f"offload_{what}") for what in OFFLOADED]
        nvme = any((offload or {}).get("device") == "nvme" for offload in offloads)
        if nvme and any(technique.slot is Slot.CHECKPOINT for technique in setup.plan):
            raise InputError(
                f"plan: {self.name()} can't write checkpoints of a state that is offloaded to "
                "nvme; offload it to the device cpu, or leave checkpoints out"
            )
        setup.layout = Zero(setup)
        setup.engine = lambda assembly: ZeroEngine(assembly, config)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reason = why_not(not context.on_gpu, _extensions(context))
        missing = f"{reason} (to train this {context.model.architecture} under it)"
        return (*((missing,) if reason else ()), *context.model.why_not_float32())

    def forecast(self, context: JobContext) -> Forecast:
        ranks, stage = context.world.size, self._stage()
        dealt = {1: 8.0, 2: 12.0, 3: 16.0}[stage]  # bytes of state per weight
        gone = dealt * context.model.parameters * (1 - 1 / ranks)
        return Forecast(comm_bytes=1.5 if stage == 3 else 1.0, resident_bytes=-gone)

    def _stage(self) -> int:
        """Returns the config's stage, or this object's if ``apply`` is to report the config."""
        if not self.config:
            return self.stage
        try:
            zero = read_config(Path(self.config)).get("zero_optimization") or {}
        except ValueError:
            return self.stage
        return int(zero.get("stage") or self.stage)

    def check_effect(self, session: Session) -> EffectCheck:
        engine, steps = session.engine, session.progress.step
        if not isinstance(engine, ZeroEngine):
            return EffectCheck(False, "one rank holds everything")
        local_count = engine.zero.local_weight_count()
        return EffectCheck(
            steps > 0 and session.setup.layout.size > 1,
            f"ZeRO-{engine.zero.stage} on {session.setup.layout.size} ranks; the optimizer of this "
            f"one moves {local_count:,} weights; {steps} steps",
        )


def _extensions(context: JobContext) -> Path:
    """Returns the folder for DeepSpeed's compiled operators, one for each torch."""
    folder = environment.variable(EXTENSIONS)
    name = f"torch-{context.versions.get('torch', torch.__version__)}"
    return Path(folder) if folder else Path.home() / ".cache" / "hasten" / "deepspeed" / name


class Zero(RanksLayout):
    """Ranks over which ZeRO shards the model's state; each has its own examples.

    The engine has the true weights and moments: see ``hasten.core.layout.KeepsState``.
    """

    replicated = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.context.world)
        self.zero: ZeroTrainer | None = None  # set when the engine is built

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        assert self.zero is not None  # the engine reads it itself
        return torch.tensor(self.zero.norm())

    def all_modules(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def full_like(self, weight: Tensor) -> Tensor:
        shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 leaves a weight without numbers
        trained = isinstance(weight, nn.Parameter) and weight.is_floating_point()
        dtype = torch.float32 if trained else weight.dtype  # the true weights are float32
        return torch.empty(shape, dtype=dtype, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.zero is not None  # set when the engine is built
        return self.zero.gather_weight(weight).to(dtype)

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FlatShard) or not tensor.ndim or not isinstance(weight, nn.Parameter):
            return tensor
        assert self.zero is not None  # set when the engine is built
        shape = tuple(getattr(weight, "ds_shape", weight.shape))
        if weight.requires_grad:
            shard = self.zero.shard_of(weight)
            return FlatShard(shard.of(shard.flat.detach()), shape, shard.start)
        if self.zero.stage < 3:
            return tensor
        values, start = self.zero.frozen_shard(weight)
        return FlatShard(values.detach(), shape, start)

    def moments(self, weights: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        assert self.zero is not None
        states: dict[int, dict[str, Any]] = {}
        for index, weight in enumerate(weights):
            shard = self.zero.shard_of(weight)
            states[index] = self.zero.moments(shard.flat).copy() if shard.count else {}
            shape = tuple(getattr(weight, "ds_shape", weight.shape))
            for key, moment in states[index].items():
                if isinstance(moment, Tensor) and moment.shape == shard.flat.shape:
                    states[index][key] = FlatShard(shard.of(moment), shape, shard.start)
        return states

    def check_moments(self, moments: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> None:
        assert self.zero is not None
        counts: dict[int, dict[str, Any]] = {}  # by the tensor of ZeRO's that a weight is in
        for weight, state in moments:
            shard = self.zero.shard_of(weight)
            count = {key: None if _is_shard(moment) else moment for key, moment in state.items()}
            if shard.count and counts.setdefault(id(shard.flat), count) != count:
                raise InputError(
                    "the checkpoint has weights with different numbers of updates, and DeepSpeed "
                    "counts those of many weights as one; resume with the layout that wrote it"
                )

    def load(
        self,
        values: Sequence[tuple[Tensor, Tensor]],
        moments: Sequence[tuple[Tensor, Mapping[str, Any]]],
    ) -> None:
        assert self.zero is not None
        for weight, saved in values:
            local_part(self.placed(weight, weight.detach())).copy_(saved)
        for weight, state in moments:
            shard = self.zero.shard_of(weight)
            if not shard.count:
                continue
            current = self.zero.moments(shard.flat)
            for key, moment in state.items():
                if not _is_shard(moment):
                    current[key] = moment
                    continue
                if key not in current:
                    current[key] = torch.zeros_like(shard.flat, dtype=moment.dtype)
                shard.of(current[key]).copy_(moment)
        self.zero.refresh()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.zero is None else self.zero.loss_scale

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.zero is not None
        self.zero.loss_scale = state


def _is_shard(moment: Any) -> bool:
    return isinstance(moment, Tensor) and moment.ndim > 0


class ZeroEngine:
    """Runs a step's methods on DeepSpeed's engine."""

    def __init__(self, assembly: EngineParts, config: dict[str, Any]) -> None:
        setup = assembly.setup
        assert isinstance(setup.layout, Zero)  # set by the technique
        missing = {EXTENSIONS: str(_extensions(setup.context))}
        if not setup.context.on_gpu:
            missing["DS_ACCELERATOR"] = "cpu"  # otherwise it would use a GPU that the job doesn't
        environment.take_over({k: v for k, v in missing.items() if environment.variable(k) is None})
        self.setup, self.optimizer = setup, assembly.optimizer
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.zero = ZeroTrainer(
            assembly.module, assembly.optimizer, config, setup.job.max_grad_norm
        )
        setup.layout.zero = self.zero

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        scale, last = self.setup.layout.averages / (denominator or 1.0), len(micro_batches)
        total = torch.zeros((), device=self.setup.job.device)
        for index, micro_batch in enumerate(micro_batches, start=1):
            loss, _ = forward_of(self.setup.routing, self.zero.engine, micro_batch)
            self.setup.clock.mark(FORWARD)
            self.zero.backward(loss * scale, index == last)
            self.setup.clock.mark(BACKWARD)
            total = total + loss.detach()
        return total

    def norm(self, loss_sum: Tensor, positions: int) -> StepNumbers:
        value, loss = self.zero.norm(), loss_sum.item()
        self.setup.clock.mark(OPTIMIZER)
        numbers = summed_numbers(self.setup.rank_sync, value, loss, positions)
        self.setup.clock.mark(COMMUNICATION)
        return numbers

    def update(self, rate_factor: float) -> None:
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * rate_factor
        self.zero.update()
        if self.setup.routing is not None:
            self.setup.routing.after_update(self.setup.rank_sync.sum)
            self.setup.routing.discard()

    def zero_grad(self) -> None:
        if self.setup.routing is not None:
            self.setup.routing.discard()
        self.zero.discard_gradients()
