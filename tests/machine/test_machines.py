"""Devices and clusters: known figures, near names for unknown ones, and machines of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.launch.cluster import TOPOLOGIES, CloudConfig
from hasten.machine.accelerators import DEVICES, datasheet, device
from hasten.planner.cluster import Cluster, own_machine

# The driver's names of presets.
SAME = {
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "a6000": "NVIDIA RTX A6000",
    "a40": "NVIDIA A40",
    "v100-32gb": "Tesla V100-SXM2-32GB",
    "l40s": "NVIDIA L40S",
    "mi300x": "AMD Instinct MI300X",
}


def rates(**changes: Any) -> dict[str, Any]:
    product = {"what": "1x1 by 1x1", "dtype": "bf16", "best": 2e12, "median": 1e12, "repeats": 3}
    copy = {"what": "copy", "dtype": "", "best": 5e10, "median": 4e10, "repeats": 3}
    found = {"kind": "hasten machine rates", "device": "cpu", "device_name": "A processor"}
    return {**found, "products": [product], "copies": [copy], "measured_at": "today", **changes}


def test_twenty_devices_and_the_articles_are_known() -> None:
    assert len(DEVICES) >= 20
    for name in ("A100", "H100", "A6000", "A40", "V100"):
        assert device(name).peak16 > 0


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        *((driver, name) for name, driver in SAME.items()),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_a_device_is_known_by_its_drivers_name(driver: str, name: str) -> None:
    assert device(driver).name == name
    sheet = datasheet(driver)
    assert (sheet is None) == (name in ("t4", "gh200"))
    assert sheet is None or replace(sheet, name=name) == device(driver)


UNKNOWN = "H100 NVL", "H100 80GB HBM2e", "A100-PCIE-40GB", "H800 80GB PCIe"
LIKE = "GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "L40", "A4000", ""


@pytest.mark.parametrize("driver", [*UNKNOWN, *LIKE])
def test_a_variant_with_other_figures_is_not_taken_for_a_known_one(driver: str) -> None:
    assert datasheet(f"NVIDIA {driver}") is None
    if driver in UNKNOWN:
        with pytest.raises(InputError, match="no figures are known"):
            device(f"NVIDIA {driver}")


def test_no_device_reaches_more_than_it_promises() -> None:
    for chip in DEVICES.values():
        assert 0.3 * chip.peak16 < chip.best16 <= chip.peak16
        assert chip.best8 <= chip.peak8


@pytest.mark.parametrize("spelling", ["h100_80gb", "H100-80GB", "NVIDIA H100 80GB", "h100 sxm"])
def test_a_name_is_known_however_it_is_spelt(spelling: str) -> None:
    assert device(spelling).name == "h100-80gb"


def test_a_name_may_say_the_memory_but_not_another_one() -> None:
    assert device("h200_141gb").name == "h200"
    with pytest.raises(InputError, match="h200"):
        device("h200_64gb")


def test_an_unknown_device_asks_for_its_figures_and_offers_near_ones() -> None:
    with pytest.raises(InputError, match=r"peak16.*h100"):
        device("h10")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_of_a_cloud_config_is_a_cluster(topology: str) -> None:
    cluster = Cluster.preset(topology, nodes=2, per_node=4, device_name="a100")
    assert cluster.devices == 8
    assert cluster.inter <= cluster.intra


@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_over_ethernet_a_nodes_devices_share_its_one_card(per_node: int) -> None:
    cluster = Cluster.preset("ethernet", 2, per_node, "h100")
    assert cluster.inter * per_node == pytest.approx(100e9 / 8)


def test_a_dgx_says_its_device_and_a_fat_tree_must_be_told() -> None:
    assert Cluster.preset("dgx_h100", 2).device.name == "h100-80gb"
    with pytest.raises(InputError, match="give the argument device_name"):
        Cluster.preset("fat_tree", 2)


def test_a_cheap_network_is_slower() -> None:
    dear, cheap = (
        Cluster.of(CloudConfig(4, 8, "fat_tree", priority), "h100")
        for priority in ("low_latency", "low_cost")
    )
    assert cheap.inter < dear.inter
    assert cheap.inter_latency > dear.inter_latency


def test_a_file_of_the_bench_is_a_machine() -> None:
    cluster = own_machine(rates(), memory_bytes=64e9, link=1e9, devices=2)
    assert cluster.device.best16 == 2e12
    assert cluster.device.memory_rate == 5e10
    assert cluster.devices == 2


def test_a_processor_that_is_slow_in_16_bits_is_taken_as_slow_in_16_bits() -> None:
    products = [{"dtype": "fp32", "best": 2e12}, {"dtype": "bf16", "best": 3e11}]
    chip = own_machine(rates(products=products), memory_bytes=64e9, link=1e9).device
    assert (chip.best16, chip.own_peak32, chip.best32) == (3e11, 2e12, 2e12)
    single = own_machine(rates(products=products[:1]), memory_bytes=64e9, link=1e9).device
    assert single.best16 == 2e12


@pytest.mark.parametrize("wrong", [{}, {"kind": "else"}, rates(products=[]), rates(copies=[{}])])
def test_a_file_that_isnt_the_benchs_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="hasten env --bench"):
        own_machine(wrong, memory_bytes=64e9, link=1e9)


def test_a_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="inter"):
        Cluster(device("h100"), 1, 8, 1e9, 0)
