"""Ways in which compressed gradients go wrong unseen, each shown not to be taken.

Others of the kind have tests where their part has: infinite gradients, loss scales, accumulation,
clipping, unused weights and bf16 ones in ``test_gradient_compressor.py``, settings that differ and
rank 0's plan in ``test_collectives.py``, memory that is read by another number of ranks in
``tests/techniques/test_communication_sharded.py``.
"""

from __future__ import annotations

import ast
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.machine.environment import World
from hasten.parts.comm import exchange
from hasten.parts.comm.codecs import ALIGNED, ChunkedTopK, codec
from hasten.parts.comm.exchange import SECOND, Ranks
from hasten.parts.comm.methods import BucketPart, ErrorMemory, Pieces, parts_of, total_numbers
from hasten.techniques.communication.compress import Quantised
from parts.comm.compression_kit import (
    Small,
    averaged,
    compressor,
    inputs,
    loss_of,
    memory,
    replicas,
)
from ranks import on_ranks, once_on_ranks
from techniques.test_communication import session
from told import refusal

LATE = 0.01  # seconds
LIMIT = 2.0  # seconds until a rank that does not answer counts as gone


def traps(world: World) -> dict[str, Any]:
    return {
        "second stage": _second_stage(world),
        "large": {m: _large(m) for m in ("none", "half", "bf16", "int8", "int4")},
        "dense start": _dense_start(world),
    }


def _second_stage(world: World) -> dict[str, Any]:
    """Second stages of many buckets, each rank's later by another time, and none late."""
    plain, threads, sizes = Ranks.all_gather, set(), []

    def late(self: Ranks, row: Tensor, stage: int) -> Any:
        if stage == SECOND:
            threads.add(threading.get_ident())
            sizes.append(len(row))
            time.sleep(LATE * world.rank)
        return plain(self, row, stage)

    found, buckets = [], 0
    try:
        for way in (plain, late):
            Ranks.all_gather = way  # type: ignore[method-assign]
            ddp, c = replicas(Small(), find_unused_parameters=True), compressor("int8")
            c.attach(ddp)
            for step in range(5):
                ddp.zero_grad()
                loss_of(ddp, inputs(world.rank, step)).backward()
            found.append(torch.cat([p.grad.flatten() for p in _moved(ddp)]))
            buckets = len(c._bucket_exchange.buckets)
    finally:
        Ranks.all_gather = plain  # type: ignore[method-assign]
    return {
        "same": torch.equal(*found),
        "threads": len(threads),
        "apart": threading.get_ident() not in threads,
        "sizes": sizes,
        "buckets": buckets,
    }


def _moved(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


def _large(method: str) -> dict[str, float]:
    """Gradients whose sum over ranks fp16 can't hold, though each of them it can."""
    weight, c = nn.Parameter(torch.zeros(1000)), compressor(method)
    weight.grad = torch.full((1000,), 40_000.0)
    c.synchronize_gradients([weight])
    return {"least": float(weight.grad.min()), "most": float(weight.grad.max())}


def _dense_start(world: World) -> list[dict[str, Any]]:
    """Four steps of a loop whose first three go in full."""
    model, c = Small(), compressor("int4", dense_steps=3)
    found = []
    for step in range(4):
        model.zero_grad()
        loss_of(model, inputs(world.rank, step)).backward()
        exact = {n: averaged(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        c.synchronize_gradients(model)
        off = [float((model.get_parameter(n).grad - e).abs().max()) for n, e in exact.items()]
        found.append({"off": max(off), "owed": len(memory(c)), "compresses": c.compresses})
    return found


def uneven(world: World) -> str:
    """Three ranks of two hosts, and a run that wants as many on each."""
    plain = exchange.host_name
    exchange.host_name = lambda: f"host-{world.rank // 2}"
    said = refusal(session, world, Quantised(scope="hosts"))
    exchange.host_name = plain
    return said


def on_three(world: World) -> dict[str, Any]:
    return {"uneven": uneven(world), **ended(world)}


def ended(world: World) -> dict[str, Any]:
    """Rank 2 of three ends between two steps; what the others say, and after how long."""
    codec("int4").encode(torch.ones(256))  # compiled before anybody waits for anybody
    ddp = replicas(Small(), find_unused_parameters=True)
    c = compressor("int4", timeout_seconds=LIMIT)
    c.attach(ddp)
    began, said = time.monotonic(), ""
    try:
        for step in range(20):
            if step == 4 and world.rank == 2:
                # The file that says it ended well, then an end without a farewell.
                Path(os.environ["HASTEN_RENDEZVOUS"]).with_name("rank-2.json").write_text("{}")
                os._exit(0)
            began = time.monotonic()
            loss_of(ddp, inputs(world.rank, step)).backward()
            ddp.zero_grad()
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - began}


pytestmark = pytest.mark.waits

PARTS = Path(__file__).resolve().parents[3] / "src" / "hasten" / "parts"
ON_THE_NETWORK = [
    *sorted((PARTS / "comm").glob("*.py")),
    PARTS / "distributed" / "compressed_shards.py",
    PARTS / "kernels" / "codec_reference.py",
]
# Sums of these are in an order of their own where two places are the same.
IN_ANY_ORDER = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put"}
CPU = torch.device("cpu")


found = once_on_ranks(traps, 4)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of the two ranks that are left in the end."""
    return on_ranks(on_three, tmp_path_factory.mktemp("three"), 3)[:2]


def test_second_stages_keep_the_order_of_buckets_however_late_a_rank_is(found: list[Any]) -> None:
    seen = [rank["second stage"] for rank in found]
    for rank in seen:
        assert rank["buckets"] > 1
        assert rank["same"]
        assert rank["threads"] == 1
        assert rank["apart"]  # from the thread in which the next bucket's first stage leaves
        assert rank["sizes"] == seen[0]["sizes"]


def test_fp16_holds_a_mean_whose_sum_it_cannot_hold(found: list[Any]) -> None:
    for rank in found:
        for method, seen in rank["large"].items():
            assert seen["least"] == pytest.approx(40_000, rel=0.01), method
            assert seen["most"] == pytest.approx(40_000, rel=0.01), method


def test_a_dense_start_is_exact_and_owes_nothing(found: list[Any]) -> None:
    for rank in found:
        *start, after = rank["dense start"]
        assert all(s["off"] < 1e-6 and not s["owed"] and not s["compresses"] for s in start)
        assert after["off"] > 1e-6
        assert after["owed"]
        assert after["compresses"]


def test_a_rank_that_has_ended_is_named_within_the_limit(three: list[Any]) -> None:
    for rank in three:
        assert "averaging gradients failed on rank" in rank["said"]
        assert "rank 2 (" in rank["said"]
        assert f"did not answer within {LIMIT:g} s" in rank["said"]
        # The limit once for the exchange, once for the roll call; by default it is 10 minutes.
        assert rank["seconds"] < 2 * LIMIT + 60


def test_hosts_with_unequal_numbers_of_ranks_are_refused_in_words(three: list[Any]) -> None:
    for rank in three:
        assert (
            "quantised: scope 'hosts' needs the same number of ranks on each host" in rank["uneven"]
        )


@pytest.mark.parametrize("path", ON_THE_NETWORK, ids=lambda p: p.stem)
def test_nothing_on_the_wire_is_added_up_in_an_order_of_its_own(path: Path) -> None:
    names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert not {name for name in names if name.rstrip("_") in IN_ANY_ORDER}


@given(st.integers(0, 100_000))
def test_a_message_after_another_begins_where_every_format_may(count: int) -> None:
    for name in ("none", "half", "bf16", "int8", "int4"):
        assert codec(name).message_bytes(count) % ALIGNED == 0
    for share in (0.01, 0.05, 0.5):
        assert ChunkedTopK.of_share(share).message_bytes(count) % ALIGNED == 0


def laid_out(sizes: list[int], order: list[int], cuts: set[int]) -> list[Pieces]:
    """The parameters in this order, a new bucket beginning at each cut."""
    buckets: list[list[BucketPart]] = [[]]
    for place, index in enumerate(order):
        if place in cuts and buckets[-1]:
            buckets.append([])
        buckets[-1].append(BucketPart(f"weight {index}", (sizes[index],)))
    return [tuple(bucket) for bucket in buckets]


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Pieces]]:
    """The same parameters in buckets, again and again in others."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    places = list(range(len(sizes)))
    return [
        laid_out(sizes, draw(st.permutations(places)), draw(st.sets(st.sampled_from(places))))
        for _ in range(draw(st.integers(2, 4)))
    ]


@given(layouts(), st.data())
def test_memory_is_a_parameters_own_however_buckets_are_laid_out(
    given_layouts: list[list[Pieces]], data: st.DataObject
) -> None:
    memory, expected = ErrorMemory(), dict[str, Tensor]()
    value = 0.0
    for buckets in given_layouts:
        for pieces in buckets:
            kept = parts_of(memory.bucket(pieces, CPU), pieces)
            for piece, part in zip(pieces, kept, strict=True):
                assert torch.equal(part, expected.get(piece.name, torch.zeros(piece.numbers)))
        counts = data.draw(st.booleans())
        for pieces in buckets:
            value += 1.0
            left = value + torch.arange(float(total_numbers(pieces))) / 100
            memory.leave_bucket(pieces, left)
            if counts:
                split = zip(pieces, parts_of(left, pieces), strict=True)
                expected |= {piece.name: part.clone() for piece, part in split}
        memory.commit(counts)
    again = ErrorMemory()
    again.load(memory.state())
    for pieces in given_layouts[-1]:
        assert torch.equal(again.bucket(pieces, CPU), memory.bucket(pieces, CPU))
