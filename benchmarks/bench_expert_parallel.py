"""Bytes and seconds of experts shared out over ranks, in turns with all experts on each rank.

    python benchmarks/bench_expert_parallel.py [--ranks 4] [--tokens 512] [--rounds 7]

One layer of DeepSeek-V3's routed experts, forward and backward, on ranks of this machine (gloo over
the loopback interface). Every token's experts are drawn evenly, so that the formulas hold:

    rows      a token goes to each other rank that holds one of its K of E experts:
              (ranks - 1) (1 - C(E - E / ranks, K) / C(E, K)) of them
    bytes     rows x (4 hidden numbers + 2 K weights of 4 bytes + K numbers of 4 bytes) + counts

Bytes are counted where torch hands a message over, by another code than the part's own counter.
Each round takes every way once; ratios are within rounds, the table has medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from smoke import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.expert_parallel import share_experts
from netlab.counting import CollectiveBytes

WHOLE = "all experts on each rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("ranks", 4), ("tokens", 512), ("rounds", 7), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("top-k", 4), ("hidden", 512), ("inner", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = arguments(parser, ranks=2, tokens=32, rounds=1, experts=4, top_k=2, hidden=32, inner=16)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (asked, folder), nprocs=asked.ranks)
        found = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(asked.ranks)
        ]
    _table(found, asked)


def _experts(asked: argparse.Namespace) -> Any:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=asked.hidden,
        moe_intermediate_size=asked.inner,
        n_routed_experts=asked.experts,
        num_experts_per_tok=asked.top_k,
    )
    config._experts_implementation = "grouped_mm"
    made = DeepseekV3Experts(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return made


def _rank(rank: int, asked: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=asked.ranks)
    ways: dict[str, Any] = {WHOLE: _experts(asked)}
    traffic = {}
    for size in (s for s in range(2, asked.ranks + 1) if asked.ranks % s == 0):
        module = ways[f"groups of {size}"] = _experts(asked)
        mesh = MeshSizes(dp=asked.ranks, ep=size).experts("cpu")
        (layer,) = share_experts(module, mesh).layers.values()
        traffic[f"groups of {size}"] = layer.traffic
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(asked.tokens, asked.hidden, generator=draw)
    index = torch.rand(asked.tokens, asked.experts, generator=draw).topk(asked.top_k).indices
    found: dict[str, Any] = {name: {"seconds": [], "bytes": 0.0} for name in ways}
    for turn in range(asked.rounds + 1):  # the first opens connections, and counts
        for name, module in ways.items():
            dist.barrier()
            began = time.perf_counter()
            if turn:
                _pass(module, x, index)
                found[name]["seconds"].append(time.perf_counter() - began)
                continue
            with CollectiveBytes() as counter:
                _pass(module, x, index)
            assert not counter.unknown
            found[name]["bytes"] = sum(counter.to.values())
            found[name]["held"] = sum(w.nbytes for w in module.parameters())
            if name in traffic:
                found[name] |= {"rows": traffic[name].rows, "own": traffic[name].bytes}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _pass(module: Any, x: torch.Tensor, index: torch.Tensor) -> None:
    given = x.clone().requires_grad_()
    weights = torch.full(index.shape, 1 / index.shape[1], requires_grad=True)
    module(given, index, weights).square().sum().backward()


def _rows(asked: argparse.Namespace, size: int) -> float:
    """Other ranks that a token goes to, on average."""
    elsewhere = asked.experts - asked.experts // size
    none_there = math.comb(elsewhere, asked.top_k) / math.comb(asked.experts, asked.top_k)
    return (size - 1) * (1 - none_there)


def _table(found: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    print(
        f"{asked.ranks} ranks, {asked.tokens} tokens each, top {asked.top_k} of {asked.experts} "
        f"experts, {asked.hidden} x {asked.inner}, float32, torch {torch.__version__}\n"
    )
    print(
        f"{'way':<26}{'MB held':>8}{'rows/token':>11}{'formula':>9}{'MB sent':>9}{'formula':>9}"
        f"{'pairs would':>12}{'ms':>8}{'/ whole':>9}"
    )
    whole = found[0][WHOLE]["seconds"]
    for name, mine in found[0].items():
        seconds = mine["seconds"]
        ratio = statistics.median(a / b for a, b in zip(seconds, whole, strict=True))
        times = f"{statistics.median(seconds) * 1e3:>8.1f}{ratio:>9.2f}"
        held = f"{name:<26}{mine['held'] / 1e6:>8.2f}"
        if name == WHOLE:
            print(f"{held}{'':>50}{times}")
            continue
        size, ranks = int(name.split()[-1]), [rank[name] for rank in found]
        tokens = asked.tokens * asked.ranks
        rows = sum(rank["rows"] for rank in ranks)
        sent = sum(rank["bytes"] for rank in ranks)
        assert sent == sum(rank["own"] for rank in ranks)  # the part's own counter
        each = 16 * asked.hidden + 12 * asked.top_k
        formula = rows * each + 8 * (size - 1) * asked.ranks
        pairs = tokens * asked.top_k * (1 - 1 / size) * (16 * asked.hidden + 12)
        print(
            f"{held}{rows / tokens:>11.3f}{_rows(asked, size):>9.3f}{sent / 1e6:>9.2f}"
            f"{formula / 1e6:>9.2f}{pairs / 1e6:>12.2f}{times}"
        )


if __name__ == "__main__":
    main()
