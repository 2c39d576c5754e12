"""Losses after a resume under another layout, against those of the run that was not interrupted.

    python benchmarks/bench_resume.py [--kinds dense,experts] [--layouts "ddp 2,fsdp2 3"]

Each layout trains 5 steps and saves after step 2. Each layout resumes each of these checkpoints
and trains steps 3 to 5. A cell is the largest relative difference of these losses to those of the
run that wrote the checkpoint. ``same bits`` says that losses and weights are equal to the bit,
which is required of the same layout. The last column compares the uninterrupted run with that of
one process. A cell that isn't possible has a number that stands below the table with its reason.

Models are tiny, in float64. Dense: Llama; experts: DeepSeek-V3 with 12 experts, whose router
computes in float32. LoRA trains an adapter on the same models. Ranks are forked from this process.
The exit code is 1 if a difference is larger than the limit of its cell.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from smoke import arguments
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / place) for place in ("tests", "tests/common")]

from hasten.core.job import Schedule  # noqa: E402
from hasten.core.plan import Plan  # noqa: E402
from hasten.core.setup import Session, prepare  # noqa: E402
from hasten.core.step import assemble, training  # noqa: E402
from hasten.errors import InputError  # noqa: E402
from hasten.launch.ranks import process_group, rank_environment  # noqa: E402
from hasten.machine import environment  # noqa: E402
from hasten.machine.environment import World  # noqa: E402
from hasten.machine.lazy_torch import is_dtensor  # noqa: E402
from hasten.machine.processes import end_with_parent  # noqa: E402
from hasten.recipe.shorthands import catalogue  # noqa: E402
from tiny import examples, job_context, language_job, take_own_attention, tiny_config  # noqa: E402
from warm import PRELOADED  # noqa: E402

SAVED, STEPS = 2, 5
EXPERTS = 12
WAIT = datetime.timedelta(seconds=120)  # of a rank for another one
Layouts = dict[str, tuple[int, dict[str, Any]]]  # ranks and plan, by name
ALONE = "one"
DENSE: Layouts = {
    ALONE: (1, {}),
    "ddp 2": (2, {"ddp": {}}),
    "ddp 3": (3, {"ddp": {}}),
    "fsdp2 3": (3, {"fsdp2": {}}),
    "fsdp2 4": (4, {"fsdp2": {}}),
    "2 x fsdp2 2": (4, {"fsdp2": {"replicas": 2}}),
    "tp 2": (2, {"tensor_parallel": {}}),
    "pp 2": (2, {"pipeline": {}}),
    "pp 2 x dp 2": (4, {"pipeline": {"stages": 2}}),
    "shard 2 x tp 2": (4, {"hybrid": {"shard": 2, "tp": 2}}),
    "pp 2 x shard 2": (4, {"hybrid": {"pp": 2, "shard": 2}}),
    "pp x shard x tp": (8, {"hybrid": {"pp": 2, "shard": 2, "tp": 2}}),
}
OF_EXPERTS: Layouts = {
    **{name: DENSE[name] for name in (ALONE, "ddp 2", "ddp 3", "fsdp2 4", "tp 2", "pp 2")},
    "ep 2": (2, {"expert_parallel": {}}),
    "ep 3": (3, {"expert_parallel": {}}),
    "ep 4": (4, {"expert_parallel": {}}),
    "2 x ep 4": (8, {"expert_parallel": {"size": 4}}),
    "shard 4 x ep 2": (4, {"hybrid": {"shard": 4, "ep": 2}}),
    "shard 8 x ep 4": (8, {"hybrid": {"shard": 8, "ep": 4}}),
}


@dataclass(frozen=True)
class Kind:
    """A row of tables: a model, what is trained of it, its layouts, and the limit of a cell."""

    architecture: str
    layouts: Layouts
    limit: float
    adapter: bool = False

    def entries(self, layout: str, interval: int) -> list[dict[str, Any]]:
        """Returns the plan under a layout."""
        adapter = [{"lora": {"rank": 4, "alpha": 16}}] if self.adapter else []
        kept = {"checkpoints": {"interval": interval, "compression": False}}
        plan = self.layouts[layout][1]
        return [kept, *adapter, *([plan] if plan else [])]


KINDS = {
    "dense": Kind("llama", DENSE, 1e-12),
    "dense LoRA": Kind("llama", DENSE, 1e-12, adapter=True),
    "experts": Kind("deepseek_v3", OF_EXPERTS, 1e-6),
    "experts LoRA": Kind("deepseek_v3", OF_EXPERTS, 1e-6, adapter=True),
}
OF_THREE = 1e-7  # limit of a dense cell with three ranks: a product with 3 doesn't commute
# with the rounding to float32 in Hugging Face's RMSNorm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--layouts", default="", help="separated by commas; default: all")
    parser.add_argument("--folder", type=Path, help="keeps checkpoints and logs there")
    for module in PRELOADED:  # once, and not in each rank
        importlib.import_module(module)
    gc.freeze()
    options = arguments(parser, kinds="dense,experts", layouts=f"{ALONE},ddp 2,tp 2,ep 2")
    wrong = 0
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, name in enumerate(options.kinds.split(",")):
            asked = options.layouts.split(",") if options.layouts else KINDS[name].layouts
            chosen = [layout for layout in KINDS[name].layouts if layout in asked]
            wrong += print_table(name, chosen, folder / str(number))
    return int(wrong > 0)


def print_table(name: str, layouts: Sequence[str], folder: Path) -> int:
    """Prints the table of a kind; returns the number of cells above their limit."""
    kind, notes, wrong = KINDS[name], list[str](), 0
    runs = {n: saved(kind, n, folder / f"from-{i}") for i, n in enumerate(layouts)}
    written = {n: folder / f"from-{i}" for i, n in enumerate(layouts) if "losses" in runs[n]}
    resumed = {n: resumes(kind, n, written, folder / f"to-{i}") for i, n in enumerate(layouts)}
    print(f"\n{name}: saved under (row), resumed under (column)\n")
    print(f"| saved | {' | '.join(layouts)} | uninterrupted against {ALONE} |")
    print("|---" * (len(layouts) + 2) + "|")
    for source in layouts:
        cells = []
        for target in layouts:
            text, is_wrong = cell(kind, source, target, runs[source], resumed[target].get(source))
            wrong += is_wrong
            cells.append(noted(text, notes) if text[:1].isalpha() and text != SAME else text)
        base = compared(runs[source], runs[ALONE])
        print(f"| {source} | {' | '.join(cells)} | {base} |")
    for number, note in enumerate(notes, 1):
        print(f"{number}: {note}")
    print(f"{wrong} of {len(layouts) ** 2} cells are above their limit", flush=True)
    return wrong


SAME = "same bits"


def noted(text: str, notes: list[str]) -> str:
    if text not in notes:
        notes.append(text)
    return f"({notes.index(text) + 1})"


def cell(
    kind: Kind, source: str, target: str, run: dict[str, Any], found: dict[str, Any] | None
) -> tuple[str, bool]:
    """Returns the text of a cell, and True if it is above its limit."""
    if "problem" in run:
        return run["problem"], not run["refused"]
    if found is None or "problem" in found:
        text = "a rank ended" if found is None else found["problem"]
        return text, found is None or not found["refused"]
    ranks = {kind.layouts[source][0], kind.layouts[target][0]}
    limit = max(kind.limit, OF_THREE) if 3 in ranks else kind.limit
    distance = difference(found["losses"], run["losses"][SAVED:])
    is_same = not distance and found["weights"] == run["weights"]
    if is_same:
        return SAME, False
    wrong = distance > limit or source == target
    return f"{distance:.0e}{' **wrong**' if wrong else ''}", wrong


def compared(run: dict[str, Any], alone: dict[str, Any]) -> str:
    if "losses" not in run or "losses" not in alone:
        return ""
    return f"{difference(run['losses'], alone['losses']):.0e}"


def difference(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))


# What the ranks of a layout do.


def saved(kind: Kind, layout: str, folder: Path) -> dict[str, Any]:
    """Returns losses and weights of a run that isn't interrupted; it saves into the folder."""

    def work(world: World) -> Iterator[dict[str, Any]]:
        yield outcome(kind, layout, world, folder, SAVED)

    return (on_ranks(kind.layouts[layout][0], work, folder) or [stopped(folder)])[0]


def resumes(
    kind: Kind, layout: str, sources: dict[str, Path], folder: Path
) -> dict[str, dict[str, Any]]:
    """Returns losses and weights of what continues from each checkpoint, by layout."""

    def work(world: World, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            path = sources[name] / "run" / f"step-{SAVED:08d}"
            yield outcome(kind, layout, world, folder, STEPS + 1, path)

    found: dict[str, dict[str, Any]] = {}
    left = list(sources)
    while left:
        rows = on_ranks(kind.layouts[layout][0], lambda w: work(w, left), folder)  # noqa: B023
        found |= dict(zip(left, rows, strict=False))
        left = left[len(rows) :]
        if left:  # a rank has ended in the next one
            found[left.pop(0)] = stopped(folder)
    return found


def stopped(folder: Path) -> dict[str, Any]:
    lines = [path.read_text().strip().splitlines()[-1:] for path in folder.glob("log-*")]
    reasons = sorted({line[0] for line in lines if line})
    return {"problem": "; ".join(reasons) or "a rank ended", "refused": False}


def outcome(
    kind: Kind, layout: str, world: World, folder: Path, interval: int, path: Path | None = None
) -> dict[str, Any]:
    """Returns a session's losses and the hash of this rank's weights, or why there is none."""
    try:
        session = session_of(kind, layout, world, folder / "run", interval)
        if path is not None:
            session.setup.checkpoint.resume(session, path)  # type: ignore[union-attr]
        losses = [metrics.loss for metrics in training(session)]
    except InputError as error:
        return {"problem": str(error), "refused": True}
    return {"losses": losses, "weights": hash_of_weights(session)}


def session_of(kind: Kind, layout: str, world: World, folder: Path, interval: int) -> Session:
    job = language_job(
        lambda: model_of(kind.architecture),
        data=examples(23),
        steps=STEPS,
        lr=3e-3,
        max_grad_norm=1.0,
        schedule=Schedule("cosine", 2, 8, floor=0.1),
    )
    context = job_context(job, kind.architecture, world)
    experts = EXPERTS if context.model.experts else 0
    context = replace(context, model=replace(context.model, experts=experts))
    plan = Plan.from_list(kind.entries(layout, interval), catalogue())
    reasons = [r for technique in plan for r in technique.unsupported_reasons(context)]
    if reasons:
        raise InputError("; ".join(reasons))
    return assemble(prepare(job, plan, context, folder))


def model_of(architecture: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = tiny_config(architecture)
    config.num_hidden_layers = 4
    if "deepseek" in architecture:
        config.n_routed_experts = EXPERTS
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    take_own_attention(model)
    if "deepseek" in architecture:
        model.set_experts_implementation("eager")  # the grouped product has no float64
    built: nn.Module = model.double()
    return built


def hash_of_weights(session: Session) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(session.loss_module.state_dict().items()):
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        digest.update(name.encode() + local.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def on_ranks(
    ranks: int, work: Callable[[World], Iterator[dict[str, Any]]], folder: Path
) -> list[dict[str, Any]]:
    """Returns what ``work`` yields on all ranks, as far as none ended with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        children = [fork(rank, ranks, work, folder, Path(meeting)) for rank in range(ranks)]
        for child in children:
            os.waitpid(child, 0)
        texts = [(Path(meeting) / f"rank-{rank}").read_text() for rank in range(ranks)]
    rows = zip(*([json.loads(line) for line in text.splitlines()] for text in texts), strict=False)
    joined = []
    for row in rows:
        weights = [one.get("weights") for one in row]
        joined.append({**row[0], **({"weights": weights} if all(weights) else {})})
    return joined


def fork(
    rank: int,
    ranks: int,
    work: Callable[[World], Iterator[dict[str, Any]]],
    folder: Path,
    meeting: Path,
) -> int:
    """Starts a rank; each outcome is a line of its file."""
    child = os.fork()
    if child:
        return child
    try:
        with (folder / f"log-{rank}").open("w") as log, (meeting / f"rank-{rank}").open("w") as out:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            end_with_parent()
            environment.take_over(rank_environment(rank, ranks, meeting, 1))
            torch.set_num_threads(1)
            with process_group(World(rank, rank, ranks), "cpu", WAIT):
                for row in work(World(rank, rank, ranks)):
                    print(json.dumps(row), file=out, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
