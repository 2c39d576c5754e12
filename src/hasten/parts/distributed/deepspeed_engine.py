"""DeepSpeed's ZeRO as four calls: send gradients, norm, update, full weights.

The caller controls the loop. It marks which backward pass is a step's last and reads
the norm of the whole gradient before anything moves. Then it moves the weights or skips
the step. ZeRO (Rajbhandari et al., arXiv:1910.02054) shards optimizer state (1),
gradients too (2), weights too (3). Offload keeps optimizer state in host memory (Ren et
al., arXiv:2101.06840). This is made for DeepSpeed 0.19: norm and skipping use methods
of its optimizers that its documentation doesn't list.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.errors import pip_install

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
OLD_LOCK_SECONDS = 600.0  # DeepSpeed's largest operator compiles in less


@dataclass(frozen=True)
class ZeroShard:
    """This rank's shard of a trained weight, in one of ZeRO's float32 tensors for many weights.

    Args:
        flat: that tensor; the optimizer has moments for it as a whole.
        offset, count: of the shard's elements in it; none on a rank without a shard.
        start: number of the first of them in the weight.
    """

    flat: Tensor
    offset: int
    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the shard of a tensor that is as long as ``flat``."""
        return tensor.narrow(0, self.offset, self.count)


class ZeroTrainer:
    """Trains a module under ZeRO inside a process group, on every rank with the same arguments.

    Args:
        config: without any "auto"; batch sizes, optimizer and scheduler are the caller's.
        max_norm: gradients are clipped to it in the update; None: never.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        max_norm: float | None,
    ) -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        self.module = module
        self.engine: Any = deepspeed.initialize(
            model=module, optimizer=optimizer, config=_settings(config, max_norm)
        )[0]
        self.stage = int(self.engine.zero_optimization_stage())

    def local_weight_count(self) -> int:
        """Returns the number of trained weights with optimizer state on this rank, with padding."""
        if self.stage < 3:
            pieces = self.engine.optimizer.single_partition_of_fp32_groups
            return sum(partition.numel() for partition in pieces)
        learned: list[Any] = [p for p in self.module.parameters() if p.requires_grad]
        return sum(weight.ds_tensor.numel() for weight in learned)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the loss's gradients, averaged over ranks; ``last``: the last pass of this step."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def norm(self) -> float:
        """Returns the L2 norm of the full gradient on every rank; infinite if it isn't finite."""
        zero = self.engine.optimizer
        if self.stage == 3:
            norms = [float(norm) for norm in zero._get_norm_groups()]
        else:
            norms = [float(zero.scaled_global_norm())]
        if any(norm < 0 or not math.isfinite(norm) for norm in norms):  # -1: not finite
            return math.inf
        return math.hypot(*norms) / float(zero.loss_scale)

    def update(self) -> None:
        """Clips, moves the weights, clears the gradients."""
        self.engine.step()

    def discard_gradients(self) -> None:
        """Discards the gradients as DeepSpeed does after overflow; with fp16 the loss scale
        falls.
        """
        zero = self.engine.optimizer
        name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        setattr(zero, name, lambda: [torch.tensor(torch.inf)] if self.stage == 3 else torch.inf)
        self.engine.set_gradient_accumulation_boundary(True)
        try:
            self.engine.step()
        finally:
            delattr(zero, name)

    def shard_of(self, weight: Any) -> ZeroShard:
        """Returns this rank's shard of a trained weight."""
        zero = self.engine.optimizer
        if self.stage < 3:
            mapping = weight._hp_mapping
            if mapping is None:
                return ZeroShard(zero.single_partition_of_fp32_groups[0], 0, 0, 0)
            flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
            source = mapping.lp_fragment_address
            return ZeroShard(flat, mapping.hp_fragment_address.start, source.start, source.numel)
        group, offset, padded = zero.grad_position[zero.get_param_id(weight)]
        start = min(padded * zero._get_param_partition_rank(weight), weight.ds_numel)
        count = min(padded, weight.ds_numel - start)
        return ZeroShard(zero.fp32_partitioned_groups_flat[group], offset, start, count)

    def frozen_shard(self, weight: Any) -> tuple[Tensor, int]:
        """Returns this rank's elements of a ZeRO-3 weight that isn't trained, and the first's
        number.
        """
        padded = weight.ds_tensor.numel()
        start = min(
            padded * self.engine.optimizer._get_param_partition_rank(weight), weight.ds_numel
        )
        return weight.ds_tensor.view(-1)[: weight.ds_numel - start], start

    def moments(self, flat: Tensor) -> dict[str, Any]:
        """Returns the optimizer's state of one of ZeRO's float32 tensors; it can be filled."""
        state: dict[str, Any] = self.engine.optimizer.optimizer.state[flat]
        return state

    def refresh(self) -> None:
        """Makes the module's weights from the float32 ones. All ranks call it."""
        zero = self.engine.optimizer
        if self.stage < 3:
            zero.update_lp_params()
            return
        for flat, shards in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True
        ):
            shards.data.copy_(flat.data)
        small = zero.persistent_parameters  # every rank has all of them
        if small:
            small[0].partition(small)
            small[0].all_gather(small)

    @property
    def loss_scale(self) -> dict[str, Any]:
        """The numbers of a loss scale that adapts itself; none if it is fixed."""
        scaler = self.engine.optimizer.loss_scaler
        return {name: vars(scaler)[name] for name in SCALE} if scaler.dynamic else {}

    @loss_scale.setter
    def loss_scale(self, numbers: Mapping[str, Any]) -> None:
        scaler = self.engine.optimizer.loss_scaler
        if scaler.dynamic and numbers:
            vars(scaler).update({name: numbers[name] for name in SCALE})

    def gather_weight(self, weight: Tensor) -> Tensor:
        """Returns the full tensor of a true weight; every rank calls it, in the same order."""
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        full_weight: Tensor | None = None
        if weight.requires_grad:
            full_weight = safe_get_full_fp32_param(weight)
        if full_weight is not None:
            return full_weight.detach().to("cpu", copy=True)
        if not hasattr(weight, "ds_id"):
            return weight.detach().to("cpu", copy=True)
        with zero.GatheredParameters([weight]):
            return weight.detach().to("cpu", copy=True)


def _settings(config: Mapping[str, Any], max_norm: float | None) -> dict[str, Any]:
    """Removes or neutralises the settings that belong to the caller."""
    owned = ("train_batch_size", "optimizer", "scheduler")
    settings = {key: value for key, value in config.items() if key not in owned}
    settings |= {
        "train_micro_batch_size_per_gpu": 1,  # used only for its logs
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's optimizer needs no compiler
    }
    for name in ("bf16", "bfloat16"):
        if name in settings:
            settings[name] = {**settings[name], "check_grad_overflow": True}
    return settings


def why_not(on_cpu: bool, folder: Path) -> str | None:
    """Returns why DeepSpeed can't run here, in one sentence; ``folder`` has compiled operators."""
    if util.find_spec("deepspeed") is None:
        return f"DeepSpeed isn't installed: {pip_install('deepspeed')}"
    if on_cpu and not (shutil.which("c++") and shutil.which("ninja")):
        missing = "c++" if shutil.which("c++") is None else "ninja"
        return (
            f"DeepSpeed compiles what carries messages between processes on a processor, and "
            f"{missing} isn't on the path: install a C++ compiler and ninja"
        )
    old = stale_locks(folder)
    if old:
        return (
            f"a build of DeepSpeed's that was killed left {old[0]}, and the next one would wait "
            "for it for ever: delete that file"
        )
    return None


def stale_locks(folder: Path) -> list[Path]:
    """Returns locks of builds without any write in their folder for ten minutes.

    torch.utils.cpp_extension makes one per operator and waits while it exists.
    """
    locks = []
    for lock in sorted(folder.glob("**/lock")):
        with contextlib.suppress(OSError):  # another process may change the folder
            newest = max((p.lstat().st_mtime for p in lock.parent.iterdir()), default=math.inf)
            if time.time() - newest > OLD_LOCK_SECONDS:
                locks.append(lock)
    return locks
