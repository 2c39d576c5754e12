"""The links of GPUs from a stand-in for NVIDIA's library, and from the library where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.parts.comm.topology import NVLINK, gpu_link


class Driver:
    """Answers as NVML does: an error code, the value behind the last argument."""

    def __init__(self, gpus: int, nvlinks: int = 0, generation: int = 4, width: int = 16) -> None:
        self.gpus, self.nvlinks, self.generation, self.width = gpus, nvlinks, generation, width
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, found: Any) -> int:  # noqa: N802
        return self._give(found, self.gpus)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, found: Any) -> int:  # noqa: N802
        return self._give(found, 1) if link < self.nvlinks else 3  # not supported

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, found: Any) -> int:  # noqa: N802
        return self._give(found, self.generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, found: Any) -> int:  # noqa: N802
        return self._give(found, self.width)

    def _give(self, found: Any, value: int) -> int:
        found._obj.value = value
        return 0


def test_nvlinks_that_are_up_are_counted() -> None:
    driver = Driver(8, nvlinks=12)
    link = gpu_link(driver)
    assert link is not None
    assert link.bandwidth == 12 * NVLINK == 300e9
    assert driver.open == 0


def test_without_nvlink_it_is_pcie() -> None:
    link = gpu_link(Driver(2, generation=4, width=16))
    assert link is not None
    assert link.bandwidth == pytest.approx(31.5e9, rel=0.01)


def test_one_gpu_or_an_unknown_bus_has_no_link_to_others() -> None:
    assert gpu_link(Driver(1, nvlinks=18)) is None
    assert gpu_link(Driver(2, generation=99)) is None


def test_a_machine_without_a_driver_has_none() -> None:
    found = gpu_link()
    assert found is None or torch.cuda.device_count() > 1
