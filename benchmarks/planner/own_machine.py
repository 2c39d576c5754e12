"""Measures how well one run on this machine foretells other batches, layouts and link rates.

    python benchmarks/bench_plan.py own --minutes 8

Two hosts of a netlab, a rank of one thread on each, a small model in fp32 with AdamW; alone, with
DistributedDataParallel, with FSDP2. The first case calibrates (twenty steps), with the ceilings of
one thread and of that case's link measured in the same processes. All other cases are predicted
from it: their links by the rate that they are set to. The last case repeats the first and tells
how much of an error is the machine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MODEL, GBIT = "deepseek-llm-tiny", 1e9 / 8
SIDE, COPIED, SENT = 1024, 1 << 25, 4_000_000
WARM_UP, FEWEST, MOST = 3, 5, 20
HEAD = "differs in   layout micro  x length Gbit/s measured s predicted  [P10, P90]"


@dataclass(frozen=True)
class Case:
    """A layout of two ranks (or of one), its batch, and the rate of the link in bit/s."""

    kind: str  # what it differs in from the first
    layout: str = "ddp"  # or fsdp, or alone
    micro_batch: int = 4
    count: int = 1
    sequence: int = 256
    gbit: float = 1.0

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "alone" else 2


CASES = (
    Case("calibration"),
    *(Case("batch", micro_batch=m) for m in (1, 2, 8)),
    *(Case("batch", sequence=s) for s in (64, 128, 512)),
    *(Case("batch", micro_batch=m, count=c) for m, c in ((1, 4), (2, 4), (4, 2))),
    Case("layout", "alone"),
    Case("layout", "alone", 1),
    Case("layout", "alone", 2, 4),
    Case("layout", "fsdp"),
    Case("layout", "fsdp", 1),
    Case("layout", "fsdp", 8, sequence=128),
    *(Case("link", gbit=g) for g in (0.1, 0.25, 0.5, 2.0)),
    Case("link", "fsdp", gbit=0.25),
    Case("link", micro_batch=8, gbit=0.25),
    Case("link", micro_batch=1, gbit=4.0),
    Case("again"),
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--first", type=int, default=len(CASES), help="so many of the cases")
    parser.add_argument("--json", type=Path, help="the measured figures, for later")
    parser.add_argument("--from-json", type=Path, help="of an earlier run, predicted anew")
    parser.add_argument("--as-rank", type=Path, help="used by the script itself")
    asked = parser.parse_args(arguments)
    cases = CASES[: asked.first]
    each = 60 * asked.minutes / len(cases)
    if asked.as_rank:
        _rank(asked.as_rank, cases, each)
        return
    found = json.loads(asked.from_json.read_text()) if asked.from_json else _measured(cases, each)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)


def _measured(cases: tuple[Case, ...], each: float) -> dict[str, Any]:
    """Every case run once in one lab, whose link is set anew for each."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    from netlab import Lab

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name, Lab(2, 1, rate="1gbit") as lab:
        folder = Path(name)
        command = [sys.executable, "-W", "ignore", __file__, "--as-rank", name]
        command += ["--minutes", str(each * len(cases) / 60), "--first", str(len(cases))]
        running = lab.begin(command, seconds=120 + 20 * len(cases) + 2 * each * len(cases))
        for place, case in enumerate(cases):
            lab.limit(case.gbit * 1e9)
            (folder / f"go-{place}").touch()
            done = folder / f"done-{place}"
            while not done.exists():
                if running.done():
                    raise SystemExit("\n".join(r.output for r in running.wait()))
                time.sleep(0.2)
            seconds.append(json.loads(done.read_text()))
            print(f"{place + 1:2} of {len(cases)}: {case}: {seconds[-1]:.4f} s", flush=True)
        running.wait()
        ceilings = json.loads((folder / "ceilings").read_text())
    rows = [{**asdict(c), "seconds": s} for c, s in zip(cases, seconds, strict=True)]
    return {"ceilings": ceilings, "cases": rows}


def _rank(folder: Path, cases: tuple[Case, ...], each: float) -> None:
    """What a rank does: wait for its parent, run a case, say how long a step took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, where = int(os.environ["RANK"]), os.environ["HASTEN_RENDEZVOUS"]
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    for place, case in enumerate(cases):
        while not (folder / f"go-{place}").exists():
            time.sleep(0.01)
        dist.barrier()
        if place == 0:
            found = ceilings()
            if rank == 0:
                (folder / "ceilings").write_text(json.dumps(found))
        taken = median_step(case, rank, each) if rank < case.ranks else 0.0
        dist.barrier()  # a rank that has nothing to do sleeps here
        if rank == 0:
            part = folder / "part"
            part.write_text(json.dumps(taken))
            part.rename(folder / f"done-{place}")
    dist.destroy_process_group()


def ceilings() -> dict[str, float]:
    """One thread's best product and copy, and what an all-reduce gets through the link."""
    import torch
    import torch.distributed as dist

    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    x, y = torch.randn(COPIED), torch.empty(COPIED)
    products = [_spent(lambda: torch.mm(a, b)) for _ in range(20)]
    copies = [_spent(lambda: y.copy_(x)) for _ in range(5)]
    sent = torch.zeros(SENT)
    dist.barrier()
    reduced = [_spent(lambda: dist.all_reduce(sent)) for _ in range(4)][1:]
    return {
        "flops": 2 * SIDE**3 / min(products),
        "memory": 2 * 4 * COPIED / min(copies),
        "link": 4 * SENT / statistics.median(reduced),  # of two ranks: each sends all bytes once
    }


def _spent(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_step(case: Case, rank: int, each: float) -> float:
    """Median seconds of that case's step, after warming up; as many steps as its share allows."""
    import torch
    import torch.distributed as dist

    step = _step(case, rank)
    first = [_spent(step) for _ in range(WARM_UP)][-1]
    steps = MOST if case.kind == "calibration" else max(FEWEST, min(MOST, int(0.6 * each / first)))
    if case.ranks > 1:  # all ranks do as many as the first says
        agreed = torch.tensor([steps])
        dist.broadcast(agreed, 0)
        steps = int(agreed)
    return statistics.median(_spent(step) for _ in range(steps))


def _step(case: Case, rank: int) -> Callable[[], None]:
    import contextlib

    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    from hasten.models.presets import build_config, preset

    config = build_config(preset(MODEL))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    whole: Any = model
    if case.layout == "ddp":
        whole = DistributedDataParallel(model)
    elif case.layout == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(whole.parameters(), fused=True)
    torch.manual_seed(rank)
    batch = torch.randint(0, config.vocab_size, (case.micro_batch, case.sequence))

    def step() -> None:
        for place in range(case.count):
            last = place == case.count - 1 or case.layout != "ddp"
            with contextlib.nullcontext() if last else whole.no_sync():
                (whole(input_ids=batch, labels=batch).loss / case.count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(found: dict[str, Any]) -> None:
    """Every case against what the first one predicts of it."""
    from hasten.planner.layout import Layouts
    from hasten.planner.own_runs import OwnRun, calibrate_machine
    from hasten.planner.predict import predict

    rates = found["ceilings"]
    print(
        f"one thread: {rates['flops'] / 1e9:.0f} GFLOP/s in fp32, {rates['memory'] / 1e9:.1f} GB/s;"
        f" the link of 1 Gbit/s carries {8 * rates['link'] / 1e9:.2f}\n"
    )
    runs: list[tuple[Case, OwnRun]] = [_own_run(row, rates) for row in found["cases"]]
    known = calibrate_machine([runs[0][1]], link_measured=True)
    print(HEAD)
    errors: dict[str, list[float]] = {}
    for case, run in runs:
        rows = Layouts.of([run.layout])
        told = predict(run.architecture, run.cluster, run.job, rows, known)
        error = float(told.step_seconds[0]) / run.step_seconds - 1
        errors.setdefault(case.kind, []).append(abs(error))
        print(
            f"{case.kind:12} {case.layout:6} {case.micro_batch:5} {case.count:2} "
            f"{case.sequence:6} {case.gbit:6g} {run.step_seconds:10.4f} "
            f"{told.step_seconds[0]:9.4f}  [{told.step_p10[0]:.4f}, {told.step_p90[0]:.4f}] "
            f"{error:+7.1%}"
        )
    print()
    held_out = [e for kind in ("batch", "layout", "link") for e in errors.get(kind, [])]
    for kind, off in (*errors.items(), ("all but the first and its repeat", held_out)):
        if off:
            middle, worst = statistics.median(off), max(off)
            print(f"{kind}: median {middle:.1%}, worst {worst:.1%} of {len(off)}")


def _own_run(row: dict[str, Any], rates: dict[str, float]) -> tuple[Case, Any]:
    from hasten.machine.accelerators import Device
    from hasten.models.architecture import Architecture
    from hasten.planner.cluster import Cluster
    from hasten.planner.layout import PlannedJob, PlannedLayout
    from hasten.planner.own_runs import OwnRun

    case = Case(**{k: v for k, v in row.items() if k != "seconds"})
    peak = rates["flops"]
    # A processor takes tiles one by one, so none stand idle: one unit.
    chip = Device(
        "cpu",
        peak,
        16e9,
        rates["memory"],
        GBIT,
        per_node=1,
        units=1,
        peak32=peak,
        reached16=peak,
        reached32=peak,
        gloo=True,
    )
    link = rates["link"] * case.gbit  # as much of its nominal rate as at the first case's
    cluster = Cluster(chip, 1, 1, link, link, inter_latency=1e-4, topology="single_node")
    cluster = replace(cluster, nodes=case.ranks)
    layout = PlannedLayout(
        dp=case.ranks,
        zero=3 if case.layout == "fsdp" else 0,
        micro_batch=case.micro_batch,
        precision="fp32",
    )
    job = PlannedJob(case.sequence, case.micro_batch * case.count * case.ranks)
    return case, OwnRun(Architecture.from_config(MODEL), cluster, job, layout, row["seconds"])


if __name__ == "__main__":
    main(sys.argv[1:])
