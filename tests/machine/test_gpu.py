"""GPUs by NVML: against a driver made of Python, as there is none on most machines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hasten.machine.gpu import Description, GpuReading, Gpus
from hasten.measure.energy import open_meter
from hasten.parts.comm.topology import NVLINK, gpu_link

Pretend = Callable[..., None]


def refuse(*arguments: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Two GPUs of a kind; its arguments replace what NVML's functions answer."""

    def change(**answers: Any) -> None:
        for name, answer in answers.items():
            function = answer if callable(answer) else lambda *arguments, answer=answer: answer
            monkeypatch.setattr(pynvml, f"nvml{name}", function)

    change(
        Init=None,
        SystemGetDriverVersion="570.1",
        DeviceGetCount=2,
        DeviceGetHandleByIndex=lambda index: f"handle {index}",
        DeviceGetHandleByUUID=lambda uuid: uuid,
        DeviceGetName="NVIDIA H100",
        DeviceGetUUID="GPU-1",
        DeviceGetUtilizationRates=SimpleNamespace(gpu=87),
        DeviceGetMemoryInfo=SimpleNamespace(total=80 * 2**30, used=5 * 2**30),
        DeviceGetTemperature=61,
        DeviceGetPowerUsage=312_500,
        DeviceGetEnforcedPowerLimit=700_000,
        DeviceGetCudaComputeCapability=(9, 0),
        DeviceGetMigMode=[0, 1],
        DeviceGetNvLinkState=lambda handle, link: int(link < 4) if link < 18 else refuse(),
        DeviceGetTopologyCommonAncestor=30,
        **{f"DeviceGet{which}PcieLinkGeneration": 5 for which in ("Curr", "Max")},
        **{f"DeviceGet{which}PcieLinkWidth": 16 for which in ("Curr", "Max")},
    )
    return change


def test_gpus_are_read_and_described(pretend: Pretend) -> None:
    gpus = Gpus()
    assert len(gpus) == 2
    assert gpus.driver == "570.1"
    assert gpus.readings() == [GpuReading(0.87, 5 * 2**30, 61, 312.5)] * 2
    described = Description(
        "NVIDIA H100", "GPU-1", 80 * 2**30, "9.0", 700.0, "PCIe 5.0 x16", 4, False
    )
    assert gpus.descriptions() == [described] * 2
    assert gpus.paths() == [["-", "PHB"], ["PHB", "-"]]
    pretend(DeviceGetUtilizationRates=SimpleNamespace(gpu=0))
    assert gpus.readings()[0].utilisation == 0


def test_a_link_below_its_best_is_told(pretend: Pretend) -> None:
    pretend(DeviceGetCurrPcieLinkWidth=8)
    assert Gpus().descriptions()[0].pcie == "PCIe 5.0 x8 (at most 5.0 x16)"


def test_only_the_named_gpus_are_read(pretend: Pretend) -> None:
    asked: list[str] = []
    pretend(DeviceGetHandleByUUID=asked.append)
    Gpus(["abc", "MIG-d"])
    assert asked == ["GPU-abc", "MIG-d"]
    pretend(DeviceGetHandleByUUID=lambda uuid: uuid if uuid == "GPU-abc" else refuse())
    assert len(Gpus(["abc", "d"])) == 1


def test_what_a_driver_does_not_tell_is_none(pretend: Pretend) -> None:
    names = ("Temperature", "PowerUsage", "UtilizationRates", "MemoryInfo", "MigMode", "Name")
    names += ("CudaComputeCapability", "MaxPcieLinkWidth", "TopologyCommonAncestor")
    pretend(**{f"DeviceGet{name}": refuse for name in names})
    gpus = Gpus()
    assert gpus.readings()[0] == GpuReading(None, None, None, None)
    assert gpus.descriptions()[0] == Description("", "GPU-1", None, None, 700.0, None, 4, None)
    assert gpus.paths() == [["-", "?"], ["?", "-"]]


def test_without_a_driver_there_are_no_gpus(pretend: Pretend) -> None:
    pretend(DeviceGetCount=0)
    gpus = Gpus()
    assert (gpus.readings(), gpus.descriptions(), gpus.paths(), gpus.driver) == ([], [], [], None)
    pretend(Init=refuse)
    assert len(Gpus()) == 0
    assert len(Gpus(["GPU-1"])) == 0
    assert gpu_link() is None


def test_nvlinks_that_are_up_are_counted_and_without_them_it_is_pcie(pretend: Pretend) -> None:
    pretend(DeviceGetNvLinkState=lambda handle, link: int(link < 12))
    link = gpu_link()
    assert link is not None
    assert link.bandwidth == 12 * NVLINK == 300e9
    pretend(DeviceGetNvLinkState=refuse, DeviceGetMaxPcieLinkGeneration=4)
    link = gpu_link()
    assert link is not None
    assert link.bandwidth == pytest.approx(31.5e9, rel=0.01)


def test_one_gpu_or_an_unknown_bus_has_no_link_to_others(pretend: Pretend) -> None:
    pretend(DeviceGetCount=1)
    assert gpu_link() is None
    pretend(DeviceGetCount=2, DeviceGetNvLinkState=refuse, DeviceGetMaxPcieLinkGeneration=99)
    assert gpu_link() is None


def test_energy_of_a_gpu_without_a_driver_or_names_is_not_measured(pretend: Pretend) -> None:
    assert open_meter("cuda:0").source == "not measured: which GPUs train is not known"

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    pretend(Init=absent)
    assert open_meter("cuda:0", ["GPU-1"]).source.startswith("not measured: libnvidia-ml.so.1: ")


def test_a_gpu_s_millijoules_are_counted_from_the_start(pretend: Pretend) -> None:
    pretend(DeviceGetTotalEnergyConsumption=10**9)
    meter = open_meter("cuda:0", ["ab", "GPU-cd"])
    assert meter.read() == 0
    pretend(DeviceGetTotalEnergyConsumption=10**9 + 2500)
    assert meter.read() == pytest.approx(5.0)
    pretend(DeviceGetTotalEnergyConsumption=refuse)
    assert meter.read() is None
    assert "Not Supported" in meter.source
