"""COMPILE: compiled graphs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten.core.context import JobContext
from hasten.core.job import Collate, Job, MicroBatch
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob, setting
from hasten.errors import as_input_error
from hasten.parts.kernels.build import COMPILERS
from hasten.parts.nn.compile import CompiledBlocks, filled_rows

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")

# Rough estimates, within a factor of three, to decide if compiling is worthwhile.
COMPILE_SECONDS = 60.0  # one to three shapes of a block on two cores: 45 to 75 s
CORE_RATE, GPU_RATE = 5e10, 1e14  # FLOP/s of training on a core, and on a GPU


@dataclass(frozen=True)
class Compiled(Technique):
    """torch.compile for the parts of the decoder blocks, on rows of a few fixed lengths."""

    slot = Slot.COMPILE
    fidelity = Fidelity.ROUNDING
    auto = "try"
    bucket: int = knob(
        256, "rows are filled to a multiple of so many positions", choices=(128, 256), least=1
    )
    dynamic: bool = setting(False, "one translation for all lengths; slower code")
    mode: str = setting(
        "default", "torch.compile's mode; reduce-overhead: CUDA graphs (GPU)", only=MODES
    )
    shapes: int = setting(4, "shapes that are compiled; any other runs as it is", least=1)
    share: float = setting(
        0.1, "share of the run that compiling may take, by estimate; 1: compile always"
    )
    backend: str = setting(
        "inductor",
        "torch.compile's backend; aot_eager: trace alone, no gain",
        only=("inductor", "aot_eager"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic and self.mode == "reduce-overhead":
            raise ValueError("CUDA graphs need fixed shapes; leave dynamic out")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is a share, above 0 and at most 1")

    def apply(self, setup: Setup) -> None:
        expected = seconds_expected(setup.job, setup.context)
        cost = COMPILE_SECONDS
        if self.share < 1 and expected is not None and cost > self.share * expected:
            setup.compile = NotCompiled(
                f"left off: compiling takes about {cost:.0f} s, more than {self.share:.0%} of a "
                f"run of about {expected:.0f} s; share: 1 compiles all the same"
            )
            return
        blocks = CompiledBlocks(self.dynamic, self.mode, self.backend, self.shapes)
        setup.compile = Compiling(blocks)
        setup.collate = Bucketed(setup.collate or setup.job.collate, self.bucket)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        name = context.model.architecture
        reasons = []
        if self.mode == "reduce-overhead" and not context.on_gpu:
            reasons.append(
                f"reduce-overhead records CUDA graphs, and {name} trains on the processor; leave "
                "mode out"
            )
        if self.backend == "inductor" and context.on_gpu and not importlib.util.find_spec("triton"):
            reasons.append(f"compiling {name} for a GPU takes Triton, which isn't installed")
        if self.backend == "inductor" and not context.on_gpu:
            if not any(shutil.which(compiler) for compiler in COMPILERS):
                reasons.append(
                    f"compiling {name} takes a C++ compiler, and none was found "
                    f"({', '.join(COMPILERS)}); install one"
                )
            if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
                reasons.append(
                    f"compiling {name} takes Python's headers (Python.h), and they aren't "
                    "installed; on Debian and Ubuntu the package is python3-dev"
                )
            # Inductor writes these into the compiler's command without quotes (torch 2.13).
            folder = next((p for p in (torch.__path__[0], _cache_dir()) if " " in p), None)
            if folder:
                reasons.append(
                    f"torch.compile can't call the C++ compiler if a path has a space, and "
                    f"{folder} has one; install torch in a folder without spaces"
                )
        if self.backend == "inductor" and (shared := _shared_cache()):
            reasons.append(
                f"torch.compile runs the code in {shared}, and other users may write to it; "
                "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
            )
        if context.model.layers == 1:
            reasons.append(
                f"this {name} has one block, so there is nothing to share between blocks"
            )
        return tuple(reasons)

    def check_effect(self, session: Session) -> EffectCheck:
        compiling = session.setup.compile
        if isinstance(compiling, NotCompiled):
            return EffectCheck(False, compiling.reason)
        if not isinstance(compiling, Compiling):
            return EffectCheck(False, "every operator runs by itself")
        blocks = compiling.blocks
        evidence = [
            f"{blocks.passes:,} passes of {blocks.parts} parts through graphs of {self.backend}",
            f"compiled for {blocks.compiled_shapes} shapes in {blocks.seconds:.1f} s",
        ]
        if blocks.eager_passes:
            evidence.append(
                f"{blocks.eager_passes:,} passes ran as they are, their shapes beyond the first "
                f"{self.shapes}: a larger bucket, or dynamic, would compile them"
            )
        return EffectCheck(blocks.passes > 0, "; ".join(evidence))


class NotCompiled:
    """Compiles nothing, and stores the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, module: nn.Module) -> None:
        return None


class Compiling:
    """Binds the blocks; raises InputError on the plan if one can't be compiled."""

    def __init__(self, blocks: CompiledBlocks) -> None:
        self.blocks = blocks

    def __call__(self, module: nn.Module) -> None:
        with as_input_error("plan: compiled"):
            self.blocks(module)


class Bucketed:
    """Pads a collator's rows to a few lengths; counts the filler as padding."""

    def __init__(self, collate: Collate, bucket: int) -> None:
        self.bucket = bucket
        self._collate = collate

    def __call__(self, examples: Sequence[Any]) -> MicroBatch:
        batch = self._collate(examples)
        inputs = filled_rows(batch.inputs, self.bucket)
        if "input_ids" not in inputs:
            return batch
        positions = inputs["input_ids"].numel()
        return replace(batch, inputs=inputs, counts=replace(batch.counts, positions=positions))


def seconds_expected(job: Job, context: JobContext) -> float | None:
    """Returns a rough estimate of the run's time without compilation; None if unknown."""
    limits = [float(job.stop.tokens)] if job.stop.tokens else []
    if len(job.lengths):
        epoch = float(sum(job.lengths))
        if job.stop.epochs:
            limits.append(job.stop.epochs * epoch)
        if job.stop.steps:
            examples = (job.batch.examples or 0) * epoch / len(job.lengths)
            limits.append(job.stop.steps * (job.batch.tokens or examples))
    tokens = min(limits, default=None)
    if tokens is None or not context.model.parameters:
        return None
    rate = GPU_RATE if context.on_gpu else CORE_RATE * context.hardware.usable_cores
    return 6 * context.model.parameters * tokens / context.world.size / rate


def _shared_cache() -> str | None:
    """Returns the folder of torch's cache if other users may write to it: it begins in /tmp.

    A group may write to it: with the usual umask of some systems, a user is a group alone.
    """
    folder = _cache_dir()
    status = os.stat(folder)
    safe = status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH
    return None if safe else folder


def _cache_dir() -> str:
    """Returns the folder of torch's compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder: str = cache_dir()
    return folder
