"""GPUs by NVML: against a driver made of Python, as there is none on most machines."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hasten.machine.gpu import Description, GpuReading, Gpus

WRONG = 3  # NVML_ERROR_NOT_SUPPORTED


def number(value: int | None) -> Any:
    """A function that writes a number behind its last argument."""

    def call(*arguments: Any) -> int:
        if value is None:
            return WRONG
        arguments[-1]._obj.value = value
        return 0

    return call


def text(value: bytes) -> Any:
    def call(*arguments: Any) -> int:
        arguments[-2].value = value
        return 0

    return call


class Driver:
    """Two GPUs of a kind; ``changes`` replaces functions, None takes one away."""

    def __init__(self, **changes: Any) -> None:
        self.nvmlInit_v2 = lambda: 0
        self.nvmlDeviceGetCount_v2 = number(2)
        self.nvmlDeviceGetHandleByIndex_v2 = self._handle
        self.nvmlDeviceGetHandleByUUID = self._by_uuid
        self.nvmlSystemGetDriverVersion = lambda buffer, size: text(b"570.1")(buffer, size)
        self.nvmlDeviceGetName = text(b"NVIDIA H100")
        self.nvmlDeviceGetUUID = text(b"GPU-1")
        self.nvmlDeviceGetUtilizationRates = self._use
        self.nvmlDeviceGetMemoryInfo = self._memory
        self.nvmlDeviceGetTemperature = number(61)
        self.nvmlDeviceGetPowerUsage = number(312_500)
        self.nvmlDeviceGetEnforcedPowerLimit = number(700_000)
        self.nvmlDeviceGetCudaComputeCapability = self._capability
        self.nvmlDeviceGetMigMode = lambda h, now, then: number(0)(now)
        self.nvmlDeviceGetNvLinkState = lambda h, link, out: number(int(link < 4))(out)
        for which in ("Curr", "Max"):
            setattr(self, f"nvmlDeviceGet{which}PcieLinkGeneration", number(5))
            setattr(self, f"nvmlDeviceGet{which}PcieLinkWidth", number(16))
        self.nvmlDeviceGetTopologyCommonAncestor = number(30)
        for name, function in changes.items():
            if function is None:
                delattr(self, name)
            else:
                setattr(self, name, function)

    asked: bytes = b""

    def _handle(self, index: int, out: Any) -> int:
        out._obj.value = index + 1
        return 0

    def _by_uuid(self, name: bytes, out: Any) -> int:
        self.asked = name
        out._obj.value = 7
        return 0

    def _use(self, handle: ctypes.c_void_p, out: Any) -> int:
        out._obj.gpu = 87
        return 0

    def _memory(self, handle: ctypes.c_void_p, out: Any) -> int:
        out._obj.total, out._obj.used = 80 * 2**30, 5 * 2**30
        return 0

    def _capability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0


def test_gpus_are_read_and_described() -> None:
    gpus = Gpus(library=Driver())
    assert len(gpus) == 2
    assert gpus.driver == "570.1"
    assert gpus.readings() == [GpuReading(0.87, 5 * 2**30, 61, 312.5)] * 2
    described = Description(
        "NVIDIA H100", "GPU-1", 80 * 2**30, "9.0", 700.0, "PCIe 5.0 x16", 4, False
    )
    assert gpus.descriptions() == [described] * 2
    assert gpus.paths() == [["-", "PHB"], ["PHB", "-"]]


def test_a_link_below_its_best_is_told() -> None:
    gpus = Gpus(library=Driver(nvmlDeviceGetCurrPcieLinkWidth=number(8)))
    assert gpus.descriptions()[0].pcie == "PCIe 5.0 x8 (at most 5.0 x16)"


def test_only_the_named_gpus_are_read() -> None:
    driver = Driver()
    assert len(Gpus(["abc"], driver)) == 1
    assert driver.asked == b"GPU-abc"
    assert Gpus(["abc"], driver).paths() == []


@pytest.mark.parametrize("gone", [None, number(None)], ids=["missing", "unsupported"])
def test_what_a_driver_does_not_tell_is_none(gone: Any) -> None:
    names = ("Temperature", "PowerUsage", "UtilizationRates", "MemoryInfo", "MigMode")
    gpus = Gpus(library=Driver(**{f"nvmlDeviceGet{name}": gone for name in names}))
    assert gpus.readings()[0] == GpuReading(None, None, None, None)
    assert gpus.descriptions()[0].mig is None


def test_without_a_driver_there_are_no_gpus() -> None:
    assert len(Gpus(library=Driver(nvmlInit_v2=lambda: 9))) == 0
    gpus = Gpus(library=Driver(nvmlDeviceGetCount_v2=number(0)))
    assert (gpus.readings(), gpus.descriptions(), gpus.paths(), gpus.driver) == ([], [], [], None)
