"""First use of a GPU: tests kernels before use, and the devices of ranks.

    verdicts stored for this GPU, driver and versions? -- yes --> refuse failed ones
                       | no
    a child process compares each kernel with float64, small (parts/kernels/registry.py)
                       |
    a kernel that is wrong, fails, hangs or kills its process is refused: another kernel
    runs instead, and one sentence reports the kernel, the reason and the cost

None of this runs on a processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hasten.core.context import JobContext, ModelFacts
from hasten.errors import InputError
from hasten.machine import host
from hasten.machine.environment import World
from hasten.parts.comm.topology import host_name
from hasten.parts.kernels import registry
from hasten.parts.kernels.registry import Sizes, Verdict
from hasten.parts.nn import gpu_kernels  # noqa: F401  # registers them
from hasten.parts.nn.causal_lm import causal_lm

Tell = Callable[[str], None]


def check_kernels(context: JobContext, tell: Tell, *, again: bool = False) -> dict[str, Verdict]:
    """Tests this rank's GPU kernels without a verdict, and refuses those that don't work.

    Ranks of a machine take turns. The first rank of each kind of GPU tests; the others read
    its verdicts.

    Args:
        ``tell``: receives a sentence for each refused kernel, and one before the tests.
        again: test refused kernels again.
    """
    listed = registry.gpu_kernels() if context.on_gpu else []
    kernels = [kernel for kernel in listed if not kernel.why_not(context.device)]
    if not kernels:
        return {}
    sizes, gpu = sizes_of(context.model), host.accelerator_words(context.device)

    def before(count: int) -> None:
        tell(f"trying {count} kernels on {gpu}, once for it and these versions")

    figures = registry.figures_of(kernels, context.device, sizes, retry=again, before=before)
    verdicts = {
        each.key: figures.proofs[each.key] for each in kernels if each.key in figures.proofs
    }
    for sentence in apply(verdicts, gpu):
        tell(sentence)
    if len(verdicts) < len(kernels):
        request = json.dumps({"kernels": [each.key for each in kernels], "device": context.device})
        command = " ".join(registry.COMMAND[1:])
        tell(f"no kernel could be tried on {gpu}; for the error, run {command} '{request}'")
    return verdicts


def apply(verdicts: Mapping[str, Verdict], gpu: str) -> list[str]:
    """Refuses failed kernels; returns a sentence for each with reason, replacement and cost."""
    sentences, instead = [], {kernel.key: kernel.instead for kernel in registry.gpu_kernels()}
    for name, verdict in verdicts.items():
        if verdict.failed:
            registry.refuse(name, verdict.failed)
            sentences.append(f"{name} isn't used on {gpu}: {verdict.failed}; {instead[name]}")
    return sentences


def sizes_of(model: ModelFacts) -> Sizes:
    """Returns the widths of a model; unknown ones are typical sizes."""
    usual = Sizes()
    hidden, heads = model.hidden_size or usual.hidden, model.heads or usual.heads
    return Sizes(
        hidden=hidden,
        between=4 * hidden,
        heads=heads,
        groups=model.key_value_heads or heads,
        head=max(hidden // heads // 8 * 8, 16),
    )


def without_refused(model: torch.nn.Module) -> None:
    """Changes how a model computes its experts if the kernel ``grouped_mm`` is refused."""
    if registry.is_refused("grouped_mm"):
        inner = causal_lm(model)
        if getattr(inner.config, "_experts_implementation", None) == "grouped_mm":
            inner.set_experts_implementation("eager")


def check_ranks(world: World, device: str) -> None:
    """Checks that each rank computes on its own device and communicates with the others.

    All ranks must call it.

    Raises:
        InputError: two ranks have one GPU, a rank's GPU isn't its current device, a product
            fails, or a sum over ranks is wrong.
    """
    if world.size == 1:
        return
    torch_device = torch.device(device)
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, (host_name(), device, _fault(torch_device)))
    for rank, (machine, its, fault) in enumerate(reports):
        if fault:
            raise InputError(f"rank {rank} ({its} of {machine}): {fault}")
        shared = [r for r, other in enumerate(reports) if other[:2] == (machine, its)]
        if torch_device.type != "cpu" and len(shared) > 1:
            raise InputError(
                f"ranks {shared[0]} and {shared[1]} have the same GPU, {its} of {machine}: start "
                "no more ranks than GPUs there, and let the launcher set LOCAL_RANK"
            )
    one = torch.ones(1, device=torch_device)
    dist.all_reduce(one)
    if one.item() != world.size:
        raise InputError(
            f"a sum of 1 over {world.size} ranks came out as {one.item():g} on rank {world.rank}: "
            "the GPUs' link carries wrong numbers; see NCCL_DEBUG=INFO, or try NCCL_P2P_DISABLE=1"
        )


def _fault(torch_device: torch.device) -> str:
    """Returns the error of a rank's device; empty without an error."""
    if (
        torch_device.type != "cpu"
        and torch_device.index != torch.accelerator.current_device_index()
    ):
        return (
            f"its current device is number {torch.accelerator.current_device_index()}; call "
            "torch.accelerator.set_device_index before the ranks meet"
        )
    try:
        side = torch.ones(64, 64, device=torch_device)
        total = (side @ side).sum().item()
    except RuntimeError as error:
        return f"it can't multiply two matrices: {str(error).splitlines()[0]}"
    return "" if total == 64**3 else f"a product of ones came out as {total:g}, not {64**3}"
