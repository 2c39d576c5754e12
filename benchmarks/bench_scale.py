"""Host memory of a rank while a split model is loaded, and while it is saved, by layout.

    python benchmarks/bench_scale.py load [--layers 12] [--layouts fsdp2,tp] [--dtype bfloat16]
    python benchmarks/bench_scale.py save [--ranks 8] [--against /path/to/other/src]

Each layout runs on 4 gloo ranks. A rank's memory is its anonymous resident memory, sampled every
2 ms, above that just before it loads. Columns are multiples of the model's float32 bytes: the
shard that the rank keeps, its peak until the last weight is read, and the peak over the shard.
The largest of the ranks counts. DistributedDataParallel's buckets of gradients come after it (ep).
The last column divides the rise that the check before a run predicts for all ranks in this phase
by the sum of the ranks' largest rises.

``save`` trains one step with AdamW, collects garbage, gives freed memory back to the system, and
saves a checkpoint.
Columns: a rank's own state (weights and moments) in multiples of the model's bytes, the memory of a
rank between steps in multiples of its own state, the rise of the first rank's memory until the
checkpoint is written, in the same, that of the other ranks, CPU seconds of the step loop in the
save, the checkpoint's megabytes, and predicted over measured rise, as above, from before the load
to the end of a second step: the copy for the save stays. ``--against`` names the ``src`` folder of
another version of hasten, which runs in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from smoke import arguments
from torch import nn

RANKS = 4
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("dense", {"fsdp2": {}}),
    "tp": ("dense", {"tensor_parallel": {}}),
    "pp": ("dense", {"pipeline": {}}),
    "ep": ("experts", {"expert_parallel": {}}),
    "shard x tp": ("dense", {"hybrid": {"shard": 2, "tp": 2}}),
    "shard x ep": ("experts", {"hybrid": {"shard": 4, "ep": 2}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("load", "save"), default="load")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, separated by commas")
    parser.add_argument("--dtype", default="float32", help="of weights in memory, for loads")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=1, help="of saves; each has a line")
    parser.add_argument("--against", type=Path, help="src of another version, for saves")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = arguments(parser, layers=4, width=64, vocabulary=512, layouts="fsdp2,ep")
    if not options.rank:
        os.environ["BENCH_SCALE_DTYPE"] = options.dtype
    else:
        run = rank_loads if options.what == "load" else rank_saves
        run(options.rank, Path(os.environ["BENCH_SCALE_MODEL"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "save":
            print_saves(options, Path(folder))
            return
        line = "{:<11} {:>6} {:>6} {:>6} {:>6} {:>8} predicted"
        print(line.format("layout", "MB", "shard", "peak", "over", "seconds"))
        for name in options.layouts.split(","):
            model = Path(folder) / LAYOUTS[name][0]
            if not model.exists():
                write_model(model, options)
            rows = all_ranks("load", name, model, Path(folder))
            total = rows[0]["model"]
            shard = max(row["shard"] for row in rows) / total
            peak = max(row["peak"] for row in rows) / total
            over = max(row["peak"] - row["shard"] for row in rows) / total
            seconds = max(row["seconds"] for row in rows)
            print(
                f"{name:<11} {total / 1e6:6.0f} {shard:6.2f} {peak:6.2f} {over:6.2f} "
                f"{seconds:8.2f} {predicted_over_measured(rows):9.2f}"
            )


def predicted_over_measured(rows: list[dict[str, float]]) -> float:
    return rows[0]["predicted"] / sum(row["largest"] for row in rows)


def print_saves(options: argparse.Namespace, folder: Path) -> None:
    trees = {"here": None, **({"against": options.against} if options.against else {})}
    titles = ("layout", "ranks", "version", "state", "rest", "first", "others", "CPU s", "MB")
    line = "{:<11} {:>5} {:>8} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} predicted"
    print(line.format(*titles))
    for name in options.layouts.split(","):
        model = folder / LAYOUTS[name][0]
        if not model.exists():
            write_model(model, options)
        for _ in range(options.rounds):
            for version, tree in trees.items():
                first, *others = all_ranks("save", name, model, folder, options.ranks, tree)
                state, rise = first["state"] / first["model"], first["rise"] / first["state"]
                rest = max(row["rest"] / row["state"] for row in (first, *others))
                most = max(row["rise"] / row["state"] for row in others)
                blocked = max(row["blocked"] for row in (first, *others))
                written = first["written"] / 1e6
                print(
                    f"{name:<11} {options.ranks:>5} {version:>8} {state:6.2f} {rest:6.2f} "
                    f"{rise:6.2f} {most:6.2f} {blocked:6.2f} {written:6.0f} "
                    f"{predicted_over_measured([first, *others]):9.2f}"
                )


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Writes a model as published ones are: bfloat16, each expert a tensor of its own."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

    width, heads = options.width, RANKS * max(options.width // 64 // RANKS, 1)
    common = {
        "vocab_size": options.vocabulary,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config: Any
    if folder.name == "dense":
        layers, inner = options.layers // 4 * 4, 4 * width
        config = LlamaConfig(**common, num_hidden_layers=layers, intermediate_size=inner)
    else:
        config = DeepseekV3Config(
            **{**common, "vocab_size": options.vocabulary // 4},
            num_hidden_layers=max(options.layers * 2 // 3, 2),
            intermediate_size=2 * width,
            moe_intermediate_size=width // 2,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=width // 4,
            kv_lora_rank=width // 8,
        )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def all_ranks(
    what: str, name: str, model: Path, folder: Path, ranks: int = RANKS, tree: Path | None = None
) -> list[dict[str, float]]:
    from hasten.launch.ranks import rank_environment

    meeting = Path(tempfile.mkdtemp(dir=folder))
    processes = []
    for rank in range(ranks):
        environment = rank_environment(rank, ranks, meeting, 1)
        environment["BENCH_SCALE_MODEL"] = str(model)
        environment["BENCH_SCALE_SAVED"] = str(meeting / "run")
        if tree is not None:
            environment["PYTHONPATH"] = str(tree)
        command = [sys.executable, __file__, what, "--rank", name]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a rank ended with an error")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


class Model:
    """The factory of a saved model, as a recipe's."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)

    def __call__(self, **how: bool) -> nn.Module:
        from hasten.models.load import load_model, take_own_attention

        dtype = getattr(torch, os.environ["BENCH_SCALE_DTYPE"])
        model: Any = load_model(self.source, dtype=dtype, **how)
        take_own_attention(model)
        built: nn.Module = model
        return built

    def skeleton(self) -> nn.Module:
        return self(skeleton=True)

    def late(self) -> nn.Module:
        return self(late=True)


def rank_loads(name: str, source: Path) -> None:
    """Loads the model under a layout on this rank, and prints what it took."""
    from hasten.launch.ranks import process_group
    from hasten.machine.environment import world
    from hasten.machine.lazy_torch import is_dtensor

    torch.set_num_threads(1)
    local_world = world()
    with process_group(local_world, "cpu"):
        setup = prepared(name, source, local_world)
        from hasten.core.step import assemble

        warm_up(setup)
        predicted = predicted_bytes(source, setup, "loading")
        torch.distributed.barrier()
        began = time.perf_counter()
        with peak_of_memory() as memory, at_last_fill(memory) as peaks:
            session = assemble(setup)
        seconds = time.perf_counter() - began
        tensors = [*session.module.parameters(), *session.module.buffers()]
        parts = [t.to_local() if is_dtensor(t) else t for t in tensors]
        shard = sum(part.numel() * part.element_size() for part in parts)
        count = sum(p.numel() for p in Model(source).skeleton().parameters())
        torch.distributed.barrier()
    row = {"model": 4 * count, "shard": shard, "peak": peaks[-1], "seconds": seconds}
    print(json.dumps({**row, "predicted": predicted, "largest": peaks[-1]}))


def rank_saves(name: str, source: Path) -> None:
    """Saves the state after one step on this rank, and prints what that took."""
    from hasten.core.step import assemble, training
    from hasten.launch.ranks import process_group
    from hasten.machine.environment import world
    from hasten.machine.lazy_torch import is_dtensor

    torch.set_num_threads(1)
    local_world, folder = world(), Path(os.environ["BENCH_SCALE_SAVED"])
    with contextlib.ExitStack() as stack, process_group(local_world, "cpu"):
        how = {"checkpoints": {"interval": 1000, "compression": False}}
        setup = prepared(name, source, local_world, how, folder)
        predicted = predicted_bytes(source, setup, "save")
        largest = stack.enter_context(peak_of_memory())
        before = anonymous()
        session = assemble(setup)
        checkpoints: Any = session.setup.checkpoint
        steps = training(session)
        next(steps)
        session.optimizer.zero_grad(set_to_none=True)
        moments = [
            value
            for values in session.optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        tensors = [t.detach() for t in (*session.module.parameters(), *moments)]
        parts = [t.to_local() if is_dtensor(t) else t for t in tensors]
        state = sum(part.numel() * part.element_size() for part in parts)
        rest = anonymous() - before
        gc.collect()  # else it comes in some saves, and takes longer than one of them
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory hides a rise
        torch.distributed.barrier()
        with peak_of_memory() as memory:
            began = time.thread_time()
            checkpoints.save(session)
            blocked = time.thread_time() - began
            checkpoints.wait_for_writer()
        torch.distributed.barrier()
        next(steps)  # beside the copy, which stays
        steps.close()
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = sum(p.numel() for p in Model(source).skeleton().parameters())
    row = {"model": 4 * count, "state": state, "rise": memory[0], "blocked": blocked}
    row |= {"written": written, "predicted": predicted, "largest": largest[0], "rest": rest}
    print(json.dumps(row))


def prepared(
    name: str,
    source: Path,
    local_world: Any,
    more: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Any:
    from hasten.core.context import ExampleStats, JobContext, ModelFacts
    from hasten.core.job import GlobalBatch, Job, Stop, with_language_counts
    from hasten.core.plan import Plan
    from hasten.core.setup import prepare
    from hasten.machine import host
    from hasten.models.load import read_config
    from hasten.parts.data.collate import padded, tokenized_example
    from hasten.parts.nn.losses import WholeLogitsLoss
    from hasten.recipe.shorthands import catalogue

    config = read_config(str(source))
    examples = [tokenized_example(range(3, 27)) for _ in range(8)]
    job = Job(
        model=Model(source),
        loss=WholeLogitsLoss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        stop=Stop(steps=2),
        collate=with_language_counts(padded),
        examples=examples,
        lengths=[24] * len(examples),
        batch=GlobalBatch(examples=len(examples)),
    )
    weights = sum(p.numel() for p in Model(source).skeleton().parameters())
    facts = ModelFacts(
        *(config.model_type, weights, config.hidden_size),
        *(config.num_hidden_layers, config.vocab_size),
        experts=getattr(config, "n_routed_experts", 0) or 0,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_reason="",
        weight_bytes=getattr(torch, os.environ["BENCH_SCALE_DTYPE"]).itemsize,
    )
    context = JobContext(
        hardware=host.hardware(),
        world=local_world,
        model=facts,
        examples=ExampleStats(len(examples), 24 * len(examples), 24, 1.0),
    )
    entries = [LAYOUTS[name][1], *([more] if more else [])]
    return prepare(job, Plan.from_list(entries, catalogue()), context, folder)


def predicted_bytes(source: Path, setup: Any, phase: str) -> float:
    """The memory of this host's ranks in a phase, as the check before a run predicts it.

    What a process has before it loads a model is left out: a run measures it.
    """
    try:
        from hasten.recipe.memory_check import host_needs, largest_micro_batch, needs_of, size_of
    except ImportError:  # an older version
        return math.nan
    from hasten.recipe.schema import Recipe

    size = size_of(Recipe(model=str(source), dataset="stdlib", max_steps=1), setup.context)
    positions = largest_micro_batch(setup)
    needs = needs_of(size, setup.context, setup.plan, positions)
    host = host_needs(size, setup.context, setup.plan, replace(needs, overhead=0.0))
    return float(getattr(host, phase))


def warm_up(setup: Any) -> None:
    """Imports what loading imports: that memory isn't the model's."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    setup.job.skeleton()


@contextmanager
def at_last_fill(memory: list[int]) -> Iterator[list[int]]:
    """The peak so far, at the end of each time that weights are read."""
    from hasten.parts.distributed.arrival import Arrival

    plain, peaks = Arrival.fill, list[int]()

    def fill(*arguments: Any, **more: Any) -> None:
        plain(*arguments, **more)
        peaks.append(memory[0])

    Arrival.fill = fill  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        Arrival.fill = plain  # type: ignore[method-assign]


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """The largest rise of this process's anonymous memory inside, in bytes, at the end."""
    before, highest, ends = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ends.wait(0.002):
            highest[0] = max(highest[0], anonymous() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield highest
    finally:
        ends.set()
        watcher.join()
        highest[0] = max(highest[0], anonymous() - before)


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(x.split()[1]) for x in status.splitlines() if x.startswith("RssAnon"))


if __name__ == "__main__":
    main()
