"""What a machine has is read from its files; peaks of memory are the named device's."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hasten.machine import host
from hasten.machine.host import (
    NetworkCard,
    NumaNode,
    SystemLimits,
    doubles_bf16,
    hardware,
    interfaces,
    isa_limit,
    limits,
    mounts,
    numa_nodes,
    processor_flags,
    rdma_devices,
)
from hasten.machine.memory import free_bytes, memory_meter
from hasten.parts.comm.topology import interface_speeds

linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads Linux's files")


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_numa_nodes_have_cores_memory_and_distances(tmp_path: Path) -> None:
    node = "sys/devices/system/node"
    files = {}
    for number in (0, 1, 10):
        files[f"{node}/node{number}/cpulist"] = f"{number}-{number + 7}"
        files[f"{node}/node{number}/meminfo"] = f"Node {number} MemTotal:       1024 kB"
        files[f"{node}/node{number}/distance"] = "10 21 31"
    found = numa_nodes(write(tmp_path, **files))
    assert [n.number for n in found] == [0, 1, 10]
    assert found[1] == NumaNode(1, "1-8", 2**20, (10, 21, 31))


def test_cards_that_are_up_are_listed_with_rate_and_kind(tmp_path: Path) -> None:
    net, rdma = "sys/class/net", "sys/class/infiniband"
    files = {
        f"{net}/lo/operstate": "unknown",
        f"{net}/eth0/operstate": "up",
        f"{net}/eth0/speed": "100000",
        f"{net}/eth0/device/numa_node": "1",
        f"{net}/eth1/operstate": "down",
        f"{net}/veth/operstate": "up",
        f"{net}/veth/speed": "-1",
        f"{net}/wlan/operstate": "up",
        f"{net}/wlan/wireless/x": "",
        f"{rdma}/mlx5_0/ports/1/link_layer": "InfiniBand",
        f"{rdma}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        f"{rdma}/mlx5_1/ports/1/link_layer": "Ethernet",
    }
    assert interfaces(write(tmp_path, **files)) == [
        NetworkCard("eth0", "ethernet", 100e9, None, 1),
        NetworkCard("veth", "virtual", None, None, None),
        NetworkCard("wlan", "wireless", None, None, None),
    ]
    assert interface_speeds(tmp_path) == {"eth0": 12.5e9, "veth": None, "wlan": None}
    assert rdma_devices(tmp_path) == [
        NetworkCard("mlx5_0", "infiniband", 400e9, None, None),
        NetworkCard("mlx5_1", "roce", None, None, None),
    ]


def test_the_strictest_group_above_a_process_limits_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/pod/box",
        f"{group}/cpu.max": "max 100000",
        f"{group}/pod/cpu.max": "150000 100000",
        f"{group}/pod/box/cpu.max": "400000 100000",
        f"{group}/pod/memory.max": "2048",
        f"{group}/pod/box/memory.max": "max",
        f"{group}/pod/box/pids.max": "99",
        "proc/1/cgroup": "0::/kubepods/x",
    }
    found = limits(write(tmp_path, **files))
    assert (found.cpus, found.memory_bytes, found.processes) == (1.5, 2048, 99)
    assert found.container == "kubepods"


def test_a_job_s_own_group_of_version_1_limits_it(tmp_path: Path) -> None:
    group, job = "sys/fs/cgroup", "slurm/uid_7/job_9"
    files = {
        "proc/self/cgroup": f"9:cpu,cpuacct:/{job}/step_0\n4:memory:/{job}/step_0\n1:name=x:/{job}",
        f"{group}/cpu/{job}/cpu.cfs_quota_us": "300000",
        f"{group}/cpu/{job}/cpu.cfs_period_us": "100000",
        f"{group}/memory/memory.limit_in_bytes": str(2**63 - 4096),
        f"{group}/memory/{job}/memory.limit_in_bytes": "4096",
        f"{group}/memory/{job}/step_0/memory.limit_in_bytes": "8192",
        f"{group}/x/{job}/memory.limit_in_bytes": "1",
        ".dockerenv": "",
    }
    found = limits(write(tmp_path, **files))
    assert (found.cpus, found.memory_bytes, found.container) == (3.0, 4096, "docker")


def test_a_way_out_of_the_groups_is_not_followed(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../secret", "sys/fs/secret/memory.max": "1"}
    assert limits(write(tmp_path, **files)).memory_bytes is None


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    assert (numa_nodes(tmp_path), mounts(tmp_path), interfaces(tmp_path)) == ([], [], [])
    assert not rdma_devices(tmp_path)
    open_files = limits(tmp_path).open_files
    assert limits(tmp_path) == SystemLimits(None, None, None, None, None, open_files, None)


def test_strange_files_are_no_reason_to_fail(tmp_path: Path) -> None:
    files = {
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "fast",
        "sys/fs/cgroup/cpu.max": "many",
        "sys/fs/cgroup/memory.max": "-",
        "proc/self/mounts": "short line",
    }
    root = write(tmp_path, **files)
    assert (interfaces(root)[0].bits_per_second, limits(root).cpus, mounts(root)) == (
        None,
        None,
        [],
    )


def managed_bytes(zones: Path) -> dict[int, int]:
    """By node, what the kernel's allocator has of it, as proc(5) says it."""
    found: dict[int, int] = {}
    node = 0
    for line in zones.read_text().splitlines() if zones.is_file() else []:
        if line.startswith("Node "):
            node = int(line.removeprefix("Node ").split(",")[0])
        elif line.split()[:1] == ["managed"]:
            found[node] = found.get(node, 0) + int(line.split()[1]) * resource.getpagesize()
    return found


@linux
def test_this_machine_agrees_with_psutil_and_the_kernel() -> None:
    found = {mount.path: mount for mount in mounts()}
    if "/" in found:
        assert found["/"].size_bytes == psutil.disk_usage("/").total
    before = set(psutil.net_if_stats())  # others may make and remove interfaces meanwhile
    named = {card.name for card in interfaces()}
    assert named <= before | set(psutil.net_if_stats())
    # Of the kernel's zones, since a balloon takes pages from a node and leaves psutil's total.
    managed = managed_bytes(Path("/proc/zoneinfo"))
    for node in numa_nodes():
        if node.memory_bytes is not None and node.number in managed:
            assert node.memory_bytes == pytest.approx(managed[node.number], rel=0.05)
    assert limits().open_files == resource.getrlimit(7)[0]


@linux
def test_a_mount_is_listed_once_and_names_with_blanks_are_read(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "c").mkdir()
    lines = "\n".join(
        [
            "/dev/x /c ext4 rw 0 0",
            "/dev/x /c/long ext4 rw 0 0",
            "/dev/y /a\\040b xfs rw 0 0",
            "proc /p proc rw 0 0",
        ]
    )
    write(tmp_path, **{"proc/self/mounts": lines})
    (tmp_path / "c" / "long").mkdir()
    found = mounts(tmp_path)
    assert [(m.path, m.kind) for m in found] == [("/a b", "xfs"), ("/c", "ext4")]
    assert found[0].size_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_this_machine_is_within_its_memory() -> None:
    found = hardware()
    assert 0 < found.memory_limit_bytes <= found.memory_bytes


@pytest.mark.parametrize(
    ("limit", "allowed", "target"),
    [
        ("", {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile"}, "native"),
        ("AVX512_CORE_BF16", {"avx2", "avx512f", "avx512_bf16"}, "x86-64-v4"),
        ("avx512_core", {"avx2", "avx512f"}, "x86-64-v4"),
        ("AVX2_VNNI", {"avx2"}, "x86-64-v3"),
        ("AVX2", {"avx2"}, "x86-64-v3"),
        ("SSE41", set(), "x86-64-v2"),
        ("AVX512_CORE_FP16", {"avx2", "avx512f", "avx512_bf16", "avx512_fp16"}, "native"),
    ],
)
def test_onednns_limit_of_instruction_sets_holds_for_the_kernels_too(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str,
    allowed: set[str],
    target: str,
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags : fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_tile\n")
    monkeypatch.setattr(host, "CPU_INFO", file)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    processor_flags.cache_clear()
    try:
        assert processor_flags() == {"fpu", *allowed}
        assert isa_limit().compiler_flags[0] == f"-march={target}"
    finally:
        processor_flags.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "doubles"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
        ("GenuineIntel", "avx512f avx512_bf16", False),
    ],
)
def test_bf16_is_multiplied_in_pairs_where_that_was_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, flags: str, doubles: bool
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"vendor_id : {vendor}\nflags : {flags}\n")
    monkeypatch.setattr(host, "CPU_INFO", file)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for cached in (processor_flags, doubles_bf16):
        cached.cache_clear()
    try:
        assert doubles_bf16() is doubles
    finally:
        for cached in (processor_flags, doubles_bf16):
            cached.cache_clear()


PEAKS = {"cuda:0": 5, "cuda:1": 7}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were asked; two GPUs answer."""
    found: list[str] = []

    def answer(device: Any = None) -> int:
        found.append(str(device))
        return PEAKS[str(device)]

    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.accelerator.memory, name, answer)
    monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", answer)
    monkeypatch.setattr(
        torch.accelerator.memory, "get_memory_info", lambda device: (answer(device), 80)
    )
    return found


def test_the_peak_is_the_rank_s_own_device_s(asked: list[str]) -> None:
    host.reset_memory_peak("cuda:1")
    assert host.memory_peak("cuda:1") == 7
    assert host.memory_peak("cuda:0") == 5
    assert asked == ["cuda:1", "cuda:1", "cuda:0"]


def test_the_meter_asks_its_own_device(asked: list[str]) -> None:
    assert memory_meter("cuda:1")() == (7.0, 14.0)
    assert set(asked) == {"cuda:1"}


def test_what_torch_keeps_of_gone_tensors_is_free(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator.memory, "memory_allocated", lambda device: 3)
    assert free_bytes("cuda:1") == 7 + (7 - 3)
