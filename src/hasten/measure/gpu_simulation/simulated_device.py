"""Simulates a CUDA device in this process: the guard and the answers of `torch.cuda`.

Call `simulate_devices` before torch is imported. It changes torch for the whole
process, which must only trace. Tensors on the host are real. Tensors on the device are
fakes with a shape, a format and no memory (`hasten.measure.gpu_simulation.tracer`).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten.errors import InputError
from hasten.measure.gpu_simulation.roofline import SimulatedDevice
from hasten.parts.kernels.build import built_against_torch

if TYPE_CHECKING:
    import torch

GUARD = Path(__file__).with_name("device_guard.cpp")


def simulate_devices(device: SimulatedDevice, count: int = 1) -> None:
    """Let this process have ``count`` such devices.

    Raises:
        InputError: torch is a build for GPUs, or the guard can't be compiled.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated device has to be there before torch is imported")
    _check_build()
    guard = built_against_torch(GUARD)
    if guard.library is None:
        raise InputError(f"a step can't be simulated: {guard.reason}")
    guard.library.simulated_devices(count)
    import torch

    from hasten.parts.kernels import registry

    registry.assume_verified("cuda")  # kernels of a device that isn't there can't be tried
    # torch.tensor(.., device="cuda") asks the device for memory, unless it begins on the host.
    torch._C._set_only_lift_cpu_tensors(True)
    _answer_for_cuda(device, count)
    _answer_for_accelerators(device, count)
    _move_by_replacing()
    _list_by_one_copy()
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_TritonFinder())


def _check_build() -> None:
    """Raise InputError where torch has a CUDA or ROCm of its own, which the guard would meet."""
    package = importlib.util.find_spec("torch")
    assert package is not None  # hasten depends on it
    assert package.origin is not None
    version = runpy.run_path(str(Path(package.origin).with_name("version.py")))
    if version.get("cuda") or version.get("hip"):
        raise InputError(
            "a step is simulated with the CPU build of torch, and this is a build for GPUs. "
            "Install the CPU build in another environment (README, choosing a torch build)"
        )


def _answer_for_cuda(device: SimulatedDevice, count: int) -> None:
    import torch

    class SimulatedStream(torch.Stream):  # its work ends at once
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            where = torch.device("cuda", _index(device))
            return super().__new__(cls, where, priority=priority)

    class SimulatedEvent(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

    cuda: Any = torch.cuda
    major, minor = device.capability
    properties = SimpleNamespace(
        name=f"{device.name} (simulated)",
        total_memory=device.memory_bytes,
        major=major,
        minor=minor,
        uuid="paper",
        multi_processor_count=device.units,
        warp_size=32,
    )
    version: Any = torch.version
    version.cuda = "13.0"
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "device": torch.accelerator.device_index,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: device.capability,
        "get_device_name": lambda _=None: properties.name,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda _=None: (device.memory_bytes, device.memory_bytes),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": lambda mode: None,
        "max_memory_allocated": lambda _=None: 0,
        "memory_allocated": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
        "get_rng_state": lambda _=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "default_generators": tuple(torch.Generator(f"cuda:{index}") for index in range(count)),
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "current_stream": torch.accelerator.current_stream,
        "default_stream": torch.accelerator.current_stream,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "synchronize": torch.accelerator.synchronize,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)


def _answer_for_accelerators(device: SimulatedDevice, count: int) -> None:
    import torch

    accelerator: Any = torch.accelerator
    memory: Any = torch.accelerator.memory
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.device_count = lambda: count
    for namespace in (accelerator, memory):
        namespace.get_memory_info = lambda _=None: (device.memory_bytes, device.memory_bytes)
        for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
            setattr(namespace, name, lambda *_: 0)
        for name in ("reset_peak_memory_stats", "empty_cache", "reset_accumulated_memory_stats"):
            setattr(namespace, name, lambda *_: None)


def _exchange_device(index: int) -> int:
    import torch

    before: int = torch.accelerator.current_device_index()
    if index >= 0:
        torch.accelerator.set_device_index(index)
    return before


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    default_index: int = torch.accelerator.current_device_index()
    return default_index if index is None else index


def _move_by_replacing() -> None:
    """`nn.Module.to` can't swap a parameter's tensor for a fake: put a new parameter there.

    Multi-tensor kernels and their users ask for the exact type of a tensor, which a fake hasn't.
    """
    import torch
    from torch.nn.utils import clip_grad

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)

        def moved_parameter(weight: Any) -> Any:
            value = weight.detach().to(
                device=device, dtype=dtype if weight.is_floating_point() else None
            )
            if value.device == weight.device and value.dtype == weight.dtype:
                return weight
            return torch.nn.Parameter(value, weight.requires_grad)

        moved: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    wide = dtype if buffer.is_floating_point() else None
                    part._buffers[name] = buffer.to(device=device, dtype=wide)
            for name, weight in part._parameters.items():
                if weight is None:
                    continue
                if id(weight) not in moved:
                    moved[id(weight)] = moved_parameter(weight)
                part._parameters[name] = moved[id(weight)]
        return module

    module: Any = torch.nn.Module
    module.to = to
    clip: Any = clip_grad
    clip._has_foreach_support = lambda tensors, device: True


def _list_by_one_copy() -> None:
    """``tolist`` copies a tensor of the device once, as torch does; a fake reads each number."""
    from torch._subclasses.fake_tensor import FakeTensor

    kind: Any = FakeTensor
    usual = kind.tolist

    def tolist(tensor: Any) -> Any:
        copy = tensor.cpu()
        return usual(copy) if isinstance(copy, FakeTensor) else copy.tolist()

    kind.tolist = tolist


class _NoTriton(importlib.machinery.ModuleSpec):
    """Says that Triton is installed; a GPU machine has it, and fakes never run its kernels."""


class _TritonFinder:
    """Finds a Triton that can't be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return _NoTriton(name, self) if name == "triton" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        raise ImportError("Triton is simulated here")

    def exec_module(self, module: Any) -> None:
        raise ImportError("Triton is simulated here")
