"""Ended and gone on with: the same bits on as many ranks, each example once on another number.

sampler x packing x reading ahead, and streams x workers x packing, on one rank and on two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoModelForCausalLM

from feed_rank_jobs import with_dropout
from hasten.core.job import GlobalBatch, Job, Stop, permutation
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from ranks import on_ranks, once_on_ranks
from tiny import VOCABULARY, language_job, session_of, tiny_config

COUNT, EPOCHS, STEP_RECORDS, STEP_TOKENS = 12, 2, 4, 90
NAMES, WORDS = range(3, 3 + COUNT), 30  # names, and the first token that is none
AT = 4  # steps that are saved: into the second epoch
SAMPLERS: dict[str, tuple[Technique, ...]] = {
    "shuffled": (),
    "token budget": (),
    "length grouped": (LengthGrouped(window=9),),
    "packed epoch": (PackedEpoch(row_tokens=44),),
}
STREAMS = {"stream": 0, "stream of 2 workers": 2}
LAYOUTS: dict[str, tuple[Technique, ...]] = {"one": (), "ddp": (DDP(),), "fsdp2": (FSDP2(),)}


@dataclass(frozen=True)
class Cell:
    """One way to get at examples."""

    source: str
    packed: bool
    ahead: bool
    layout: str

    def __str__(self) -> str:
        words = [self.source, "packed" if self.packed else "padded", *["ahead"] * self.ahead]
        return ", ".join([*words, self.layout])


def _cells() -> Iterator[Cell]:
    both = (False, True)
    for source, packed, ahead in itertools.product(SAMPLERS, both, both):
        yield Cell(source, packed, ahead, "one")
        if packed == ahead:  # what reads ahead is the same on every rank
            yield Cell(source, packed, ahead, "ddp")
    for source, packed, layout in itertools.product(STREAMS, both, ("one", "ddp")):
        yield Cell(source, packed, False, layout)
    yield from (Cell("shuffled", packed, True, "fsdp2") for packed in both)


def _is_usual(cell: Cell) -> bool:
    """Each source, each way to lay out, each layout; the other products of them are for long."""
    if cell.source in STREAMS:
        return cell.packed == bool(STREAMS[cell.source])
    return cell.packed and cell.ahead if cell.layout != "one" else cell.packed == cell.ahead


CELLS = tuple(_cells())


def named_records() -> list[TokenizedExample]:
    """Examples of uneven lengths; the first token of each is its name."""
    draw, found = np.random.default_rng(4), []
    for name in NAMES:
        length = int(draw.integers(4, 40))
        ids = np.array([name, *draw.integers(WORDS, VOCABULARY, length - 1)])
        found.append(tokenized_example(ids, np.ones(length, bool)))
    return found


class NotingLoss(WholeLogitsLoss):
    """The usual loss; it notes the names that carry loss."""

    seen: list[int]

    def forward(self, **inputs: Any) -> Any:
        if bool((inputs["labels"] != -100).any()):  # else it fills a rank that has no example
            ids = inputs["input_ids"]
            self.seen += ids[(ids >= NAMES.start) & (ids < NAMES.stop)].tolist()
        return super().forward(**inputs)


class Steps(IterableDataset[list[TokenizedExample]]):
    """A rank's share of each step of a shuffled epoch, dealt out to workers."""

    def __init__(self, data: Sequence[TokenizedExample], epoch: int, world: World) -> None:
        self.data, self.epoch, self.world = data, epoch, world

    def __iter__(self) -> Iterator[list[TokenizedExample]]:
        order = permutation(len(self.data), 3, self.epoch)
        starts, worker = range(0, len(order), STEP_RECORDS), get_worker_info()
        if worker is not None:
            starts = starts[worker.id :: worker.num_workers]
        for start in starts:
            step = order[start : start + STEP_RECORDS]
            yield [self.data[i] for i in step[self.world.rank :: self.world.size]]


def _as_it_is(value: Any) -> Any:
    return value


def session_in(cell: Cell, world: World, folder: Path, seen: list[int]) -> Session:
    def loss(model: Any) -> Any:
        if cell.layout == "fsdp2":  # it knows the usual loss by its class
            return WholeLogitsLoss(model)
        found = NotingLoss(model)
        found.seen = seen
        return found

    data = named_records()
    job: Job = language_job(with_dropout, data=data, stop=Stop(epochs=EPOCHS), loss=loss)
    job = replace(job, batch=GlobalBatch(STEP_RECORDS))
    if cell.source == "token budget":
        job = replace(job, batch=GlobalBatch(None, STEP_TOKENS))
    if cell.source in STREAMS:
        job = replace(job, examples=(), lengths=(), stream=_stream(data, world, cell.source))
    plan = (
        *SAMPLERS.get(cell.source, ()),
        *([Packed()] if cell.packed else []),
        *([Prefetched()] if cell.ahead else []),
        *(LAYOUTS[cell.layout] if world.size > 1 else ()),
        Checkpoints(AT, compression=False),
    )
    return session_of(job, *plan, folder=folder, world=world)


def _stream(data: Sequence[TokenizedExample], world: World, source: str) -> Any:
    def stream(epoch: int) -> Iterator[Any]:
        # A generator of its own: workers' seeds would be drawn from the model's.
        yield from DataLoader(
            Steps(data, epoch, world),
            batch_size=None,
            num_workers=STREAMS[source],
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(epoch),
        )

    return stream


def begun(cell: Cell, world: World, folder: Path, more: int | None) -> dict[str, Any]:
    """Losses of so many steps beyond the checkpoint, or of all, and the names up to it."""
    seen: list[int] = []
    steps = training(session_in(cell, world, folder, seen))
    losses = [next(steps).loss for _ in range(AT)]
    names = list(seen)
    losses += [metrics.loss for metrics in itertools.islice(steps, more)]
    steps.close()
    return {"losses": losses, "names": names, "all names": seen}


def gone_on(cell: Cell, world: World, folder: Path, saved: Path) -> dict[str, Any]:
    """Losses and names from a checkpoint to the end."""
    seen: list[int] = []
    session = session_in(cell, world, folder, seen)
    session.setup.checkpoint.resume(session, saved / f"step-{AT:08d}")
    return {"losses": [m.loss for m in training(session)], "names": seen}


def resumed(cell: Cell, world: World, folder: Path) -> dict[str, Any]:
    """A whole run, and what goes on from its checkpoint in as many ranks."""
    found = {"begun": begun(cell, world, folder / "begun", None)}
    _meet(world)
    return found | {"rest": gone_on(cell, world, folder / "rest", folder / "begun")}


def on_two(world: World) -> dict[str, Any]:
    return cells_of_two(world, [cell for cell in TWO if _is_usual(cell)])


def on_two_long(world: World) -> dict[str, Any]:
    return cells_of_two(world, [cell for cell in TWO if not _is_usual(cell)])


def cells_of_two(world: World, cells: Sequence[Cell]) -> dict[str, Any]:
    """Cells of two ranks; and what one rank makes of theirs, and they of one rank's."""
    found, alone = {}, World()
    place = Path(environment.variable("HASTEN_RENDEZVOUS") or "").parent  # both ranks know it
    for number, cell in enumerate(cells):
        folder = place / f"cell-{number}"
        ours = resumed(cell, world, folder)
        if cell.source in SAMPLERS and cell.layout == "ddp":
            if world.is_main:
                ours["to one"] = gone_on(cell, alone, folder / "to-one", folder / "begun")
                ours["one"] = begun(cell, alone, folder / "one", 1)
            _meet(world)
            ours["from one"] = gone_on(cell, world, folder / "from-one", folder / "one")
        found[str(cell)] = ours
        _meet(world)
    return found


def _meet(world: World) -> None:
    if world.size > 1:
        dist.barrier()


LAYOUTS_OF_THREE: dict[str, Technique] = {"ddp": DDP(), "expert_parallel": ExpertParallel(size=3)}


def on_three(world: World) -> dict[str, Any]:
    """Whether the losses and weights of a run and of what goes on from its second step are equal.

    A sum over three ranks has an order, which torch's DDP changes after its first backward pass.
    """
    found = {}
    place = Path(environment.variable("HASTEN_RENDEZVOUS") or "").parent
    for name, layout in LAYOUTS_OF_THREE.items():
        whole, rest = (
            session_of(
                language_job(six_experts, batch=6, steps=4),
                *(layout, Checkpoints(2, compression=False)),
                architecture="deepseek_v3",
                folder=place / name / kind,
                world=world,
            )
            for kind in ("whole", "rest")
        )
        losses = [m.loss for m in training(whole)]
        _meet(world)
        rest.setup.checkpoint.resume(rest, place / name / "whole" / "step-00000002")
        goes_on = [m.loss for m in training(rest)] == losses[2:]
        weights = [session.setup.precision.parameters() for session in (whole, rest)]
        found[name] = goes_on and all(map(torch.equal, *weights))
    return found


def six_experts() -> torch.nn.Module:
    config = tiny_config("deepseek_v3")
    config.n_routed_experts = 6
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_three_ranks_with_the_same_weights_go_on_with_the_same_bits(tmp_path: Path) -> None:
    assert on_ranks(on_three, tmp_path, 3) == [dict.fromkeys(LAYOUTS_OF_THREE, True)] * 3


ONE = [cell for cell in CELLS if cell.layout == "one"]
TWO = [cell for cell in CELLS if cell.layout != "one"]
MOVED = [cell for cell in TWO if cell.source in SAMPLERS and cell.layout == "ddp"]
EACH = Counter(dict.fromkeys(NAMES, EPOCHS))


# What both ranks found of their usual cells.
usual = once_on_ranks(on_two)
others = once_on_ranks(on_two_long)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, cell: Cell) -> list[Any]:
    found: list[Any] = request.getfixturevalue("usual" if _is_usual(cell) else "others")
    return found


def parameters(cells: Sequence[Cell]) -> list[Any]:
    long = pytest.mark.long
    return [pytest.param(cell, marks=[long] * (not _is_usual(cell))) for cell in cells]


def check_same_bits(found: dict[str, Any]) -> None:
    whole = found["begun"]["losses"]
    assert len(set(whole)) == len(whole) > AT + 1
    assert found["rest"]["losses"] == whole[AT:]


def test_there_are_as_many_cells_as_promised() -> None:
    assert len(set(map(str, CELLS))) == len(CELLS) >= 24


@pytest.mark.parametrize("cell", parameters(ONE), ids=str)
def test_one_rank_goes_on_with_the_same_bits(cell: Cell, tmp_path: Path) -> None:
    found = resumed(cell, World(), tmp_path)
    check_same_bits(found)
    assert Counter(found["begun"]["all names"]) == EACH
    assert Counter(found["begun"]["names"] + found["rest"]["names"]) == EACH


@pytest.mark.parametrize("cell", parameters(TWO), ids=str)
def test_two_ranks_go_on_with_the_same_bits(cell: Cell, ranks: list[Any]) -> None:
    for rank in ranks:
        check_same_bits(rank[str(cell)])
    if cell.layout != "fsdp2":
        assert Counter(names(ranks, cell, "begun") + names(ranks, cell, "rest")) == EACH


@pytest.mark.parametrize("cell", parameters(MOVED), ids=str)
def test_another_number_of_ranks_trains_each_record_once(cell: Cell, ranks: list[Any]) -> None:
    fewer = names(ranks, cell, "begun") + names(ranks[:1], cell, "to one")
    assert Counter(fewer) == EACH
    more = names(ranks[:1], cell, "one") + names(ranks, cell, "from one")
    assert Counter(more) == EACH


def names(ranks: list[Any], cell: Cell, part: str) -> list[int]:
    """What these ranks trained, together."""
    return [name for rank in ranks for name in rank[str(cell)][part]["names"]]
