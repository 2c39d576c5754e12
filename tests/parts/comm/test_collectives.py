"""Topology-aware collectives on gloo ranks with faked hosts, against float64 sums."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.launch.ranks import rank_environment
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.methods import ErrorMemory
from parts.comm.topology_rank_jobs import LIMIT, disagreeing, everything, unequal
from ranks import on_ranks

pytestmark = pytest.mark.waits

JOBS = Path(__file__).with_name("topology_rank_jobs.py")
# Relative error after two roundings: half a unit of 11 and 8 bits of precision; half a code of
# 1/127 and 1/7 of a block's largest number, which for a normal distribution is three times its
# deviation.
BOUNDS = {"half": 1e-3, "bf16": 6e-3, "int8": 0.02, "int4": 0.3}


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> Any:
    found = on_ranks(everything, tmp_path_factory.mktemp("four"), 4)
    return lambda job: [rank[job] for rank in found]


def test_each_way_gives_the_sum_and_the_same_bits_on_every_rank(four: Any) -> None:
    found = four("every_way")
    for key, value in found[0].items():
        if key.endswith("order"):
            assert value == [0, 2, 1, 3]  # host by host
            continue
        assert value[0] < 2e-6, key
        assert value[2], "in place"
        assert all(other[key][1] == value[1] for other in found), key


def test_what_is_begun_is_there_after_wait_and_what_is_dropped_at_once(four: Any) -> None:
    ranks = four("begun")
    for found in ranks:
        assert found["done"]
        assert found["max"]
        assert max(found["errors"]) < 2e-6
        assert found["bits"] == ranks[0]["bits"]


def test_other_formats_and_shapes_travel_too(four: Any) -> None:
    for found in four("other_formats"):
        assert found["whole"] == [6 + 4 * i for i in range(7)]
        assert found["wide"] < 1e-14
        assert found["half"] < 0.02
        assert found["half type"] == "torch.bfloat16"
        assert found["matrix"] < 1e-6
        assert found["most"] == [3.0, 0.0]
        assert found["empty"] == 0


def test_a_mean_in_fp16_is_there_though_the_sum_is_too_large(four: Any) -> None:
    for found in four("large"):
        assert found == dict.fromkeys(("flat", "hierarchical", "leader"), [40_000.0] * 4)


def test_pieces_are_by_rank_whatever_the_path(four: Any) -> None:
    for found in four("pieces"):
        assert found["piece"] < 2e-6
        assert found["mean"] < 1e-7
        assert found["gathered"]
        assert "33" not in found["refused"]
        assert "5 numbers" in found["refused"]


def test_codecs_round_twice_and_a_memory_sends_the_rest_later(four: Any) -> None:
    found = four("by_codec")
    for name, bound in BOUNDS.items():
        first = found[0][name]
        assert first["error"] < bound
        assert first["late"] < max(first["error"] / 4, 1e-6), name
        assert all(rank[name]["bits"] == first["bits"] for rank in found)


def test_a_nan_of_one_rank_reaches_all_and_stays_in_no_memory(four: Any) -> None:
    for found in four("by_codec"):
        for name in BOUNDS:
            assert not found[name]["spoilt"]
            assert found[name]["healthy"]


def test_a_memory_that_was_read_on_the_host_goes_to_the_gradients_device() -> None:
    seen = []

    class Codec:
        def encode_with_feedback(self, numbers: Any, kept: Any, out: Any, rest: Any) -> None:
            seen.append(kept.device.type)

    memory = ErrorMemory()
    memory.load({"bucket": torch.ones(8)})
    numbers, rows = torch.empty(8, device="meta"), torch.empty(2, 4, device="meta")
    memory.encode(Codec(), numbers, 2, "bucket", rows)  # type: ignore[arg-type]
    assert seen == ["meta", "meta"]


def test_hosts_of_unequal_size_go_by_a_ring_and_refuse_codecs(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(unequal, tmp_path, 3)):
        assert found["sum"] == [3.0] * 10
        assert found["piece"] == [3 * (2.0 * rank), 3 * (2.0 * rank + 1)]
        assert found["gathered"] == [0.0, 1.0, 2.0]
        assert len(found["refused"]) == 3
        assert all("hosts have 2, 1 ranks" in said for said in found["refused"])


def test_ranks_that_disagree_get_the_same_error(tmp_path: Path) -> None:
    found = on_ranks(disagreeing, tmp_path, 2)
    assert found[0] == found[1]
    assert "rank 1 has topology='pcie', rank 0 topology='ethernet'" in found[0]


def test_measured_links_are_the_same_on_all_ranks(four: Any) -> None:
    found = four("measured")
    assert all(rank == found[0] for rank in found)
    for link in ("within", "between"):
        latency, bandwidth = found[0][link]  # with all that a busy machine lets a message wait
        assert 0 < latency < 60
        assert 1e3 < bandwidth < math.inf
    assert "measured" in found[0]["explained"]
    assert found[0]["sum"] == [4.0] * 3


def test_a_slow_link_between_hosts_makes_large_tensors_hierarchical(four: Any) -> None:
    for found in four("given"):
        assert found["ways"][1] == "hierarchical"
        assert found["crossings"] == [1, 2]


@pytest.mark.parametrize("how", ["calls", "buckets"])
def test_a_rank_that_has_ended_is_named_by_all_others(tmp_path: Path, how: str) -> None:
    processes = []
    for rank in range(3):
        env = rank_environment(rank, 3, tmp_path, threads=1)
        command = [sys.executable, "-W", "ignore", str(JOBS), str(tmp_path / "meeting"), how]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=JOBS.parent)
        )
    try:
        said = [p.communicate(timeout=240)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    for words in said[:2]:
        assert words.startswith("(2,) "), words
        assert "rank 2" in words
        assert f"did not answer within {LIMIT} s" in words
        assert "Unable to cast" not in words  # of an error that reached DDP as a result


def test_one_process_alone_needs_no_group() -> None:
    collective = TopoAwareCollective("gloo", "dgx_a100")
    x = torch.arange(4.0)
    assert collective.all_reduce(x) is x
    assert collective.reduce_scatter(x).tolist() == x.tolist()
    assert collective.all_gather(x).tolist() == x.tolist()
    assert "one rank" in collective.explain()


def test_nccl_without_a_gpu_means_gloo_and_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.warns(UserWarning, match="'nccl' means 'gloo'"):
        TopoAwareCollective(backend="nccl", topology="dgx_a100")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"topology": "dgx_a10"}, "did you mean 'dgx_a100'"),
        ({"backend": "mpi"}, "must be one of nccl, gloo"),
        ({"between": "int2"}, "did you mean 'int"),
        ({"way": "ring"}, "flat, hierarchical, leader"),
        ({"way": "flat", "between": "int8"}, "uses no codec"),
        ({"timeout": 0}, "more than 0 seconds"),
    ],
    ids=json.dumps,
)
def test_a_setting_that_cannot_be_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TopoAwareCollective(**{"backend": "gloo", **wrong})


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="sum, mean, max, min"):
        TopoAwareCollective("gloo", "ethernet").all_reduce(torch.ones(2), "prod")
    with pytest.raises(ValueError, match="whole numbers have a sum"):
        TopoAwareCollective("gloo", "ethernet").all_reduce(torch.arange(2), "mean")
