"""The link between a host's GPUs as NVIDIA's driver describes it: NVLinks that are up, or PCIe.

NVML is asked through its C library (NVML API reference, "NvLink Methods" and "Device Queries"), so
that no package is needed. The first GPU speaks for the host's others. Figures are the links' own,
without the protocol's overhead; a measurement knows better.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hasten.parts.comm.topology import Link

LIBRARY = "libnvidia-ml.so.1"
MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
NVLINK = 25e9  # bytes per second and link, each way: NVLink 2 to 4; NVLink 5 has twice that
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # by PCIe generation
NVLINK_LATENCY, PCIE_LATENCY = 5e-6, 10e-6


def gpu_link(library: Any = None) -> Link | None:
    """The link of the first GPU to the others; None without a driver, or with a single GPU."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
    if library.nvmlInit_v2():
        return None
    try:
        return _link(library)
    finally:
        library.nvmlShutdown()


def _link(library: Any) -> Link | None:
    if (_number(library.nvmlDeviceGetCount_v2) or 0) < 2:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    states = (_number(library.nvmlDeviceGetNvLinkState, handle, k) for k in range(MOST_LINKS))
    up = sum(state == 1 for state in states)
    if up:
        return Link(NVLINK_LATENCY, up * NVLINK)
    generation = _number(library.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _number(library.nvmlDeviceGetMaxPcieLinkWidth, handle)
    if generation is None or width is None or generation not in LANE or not width:
        return None
    return Link(PCIE_LATENCY, width * LANE[generation])


def _number(function: Any, *arguments: Any) -> int | None:
    """What NVML writes behind the arguments; None where it returns an error."""
    value = ctypes.c_uint()
    wrong = function(*arguments, ctypes.byref(value))
    return None if wrong else value.value
