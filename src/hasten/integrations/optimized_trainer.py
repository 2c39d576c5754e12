"""The articles' trainer: any model, optimizer and loss function, trained in place, with switches.

Each switch is off (False), on with its usual technique (True), or a technique of the caller's
choice. A usual technique that can't work on this machine is left out, and said to be; one of the
caller's choice is refused. Gradients travel between ranks only: with one rank, compressing them is
said to do nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from hasten.core import facts
from hasten.core.facts import Facts, ModelFacts
from hasten.core.job import Counts, Job, MicroBatch, Stop
from hasten.core.loop import Outcome, Watch, fit
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import Setup, obstacles, prepare
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.launch.ranks import process_group
from hasten.machine.environment import World
from hasten.parts.checkpoint import checkpoints
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.data.dynamic_batch import DynamicBatcher
from hasten.parts.data.prefetch import each_tensor
from hasten.parts.nn.losses import ObjectiveLoss
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast
from hasten.techniques.wire.compress import Quantised, technique_of

# A user's loader: each rank's own batches of it, epoch by epoch, as micro-batches.
#
# (1) a plain ``DataLoader`` is dealt out: it is built again around torch's DistributedSampler
# => (2) whoever has ``set_epoch`` is told the epoch => (3) a batch becomes rows, which BATCH may
# cut => (4) rows become a micro-batch.
#
# A loader that can't be dealt out is taken as it is. If it gives two ranks the same first batch,
# they would do each other's work again, and the run is refused.

COLUMNS = (Tensor, Mapping, tuple, list)  # what a batch is made of


class BatchRow(NamedTuple):
    """One record of a loader's batch: where it is, without a copy."""

    batch: Any
    row: int
    rows: int


class GivenLoader:
    """This rank's batches of a loader. On several ranks it is built inside the process group.

    Args:
        deal: share the records out; False: every rank trains all that its loader gives.
    """

    def __init__(self, loader: Iterable[Any], world: World, deal: bool) -> None:
        self._loader, self._world, self._deal = loader, world, deal
        self._alike = deal and world.size > 1  # the first batches are still to be compared
        self._repeated = 0  # records of an epoch that come a second time
        if self._alike and isinstance(loader, DataLoader) and _is_plain(loader):
            self._share_out(loader)
        self._told = _with_set_epoch(self._loader)

    def epoch(self, number: int) -> Iterator[list[BatchRow]]:
        """The rows of each batch of an epoch.

        Raises:
            InputError: two ranks get the same first batch.
        """
        for one in self._told:
            one.set_epoch(number)
        batches = iter(self._loader)
        first = list(itertools.islice(batches, 1))
        self._compare(first)
        for batch in itertools.chain(first, batches):
            size = _records_in(batch)
            yield [BatchRow(batch, index, size) for index in range(size)]

    def of_the_data(self, records: int, epochs: int) -> int:
        """How many of the ``records`` that all ranks trained in so many epochs differ."""
        return records - self._repeated * epochs if self._deal else records // self._world.size

    def _share_out(self, loader: DataLoader[Any]) -> None:
        world, batches = self._world, loader.batch_sampler
        data: Any = loader.dataset
        assert isinstance(batches, BatchSampler)  # it is plain
        sampler, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
        shuffled = isinstance(sampler, RandomSampler)
        draw = getattr(sampler, "generator", None) or loader.generator
        seed = draw.initial_seed() if draw else torch.initial_seed()
        every = _of_all((_fingerprint(data), seed % 2**31))
        if len({mark for mark, _ in every}) > 1:
            if world.is_main:
                print(f"{world.size} ranks have different data sets: each trains its own, whole")
            return
        part = DistributedSampler(data, world.size, world.rank, shuffled, seed=every[0][1])
        self._loader = DataLoader(
            data,
            size,
            sampler=part,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )
        self._alike = False
        cut = drop_last and len(part) % size  # a repeated record is its rank's last one
        self._repeated = 0 if cut else part.total_size - len(data)
        if world.is_main:
            print(
                f"{world.size} ranks: each trains {len(part)} of {len(data)} records an epoch, "
                f"{size} at a time ({size * world.size} a step)"
            )

    def _compare(self, first: list[Any]) -> None:
        if not self._alike:
            return
        self._alike = False
        found = [mark for rank in _of_all([*map(_digest, first)]) for mark in rank]
        if len(set(found)) < len(found):
            raise InputError(
                "every rank gets the same records from this loader; give it a DistributedSampler "
                "(or DynamicBatchSampler(rank=, world_size=)), or say deal=False to train them all "
                "on every rank"
            )


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether it takes each record of its data set once, in order or at random, in batches."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.batch_sampler.sampler
    whole = type(sampler) is RandomSampler and not sampler.replacement
    if whole and sampler.num_samples != len(sampler.data_source):
        return False
    return (whole or type(sampler) is SequentialSampler) and not _with_set_epoch(loader)


def _with_set_epoch(loader: Iterable[Any]) -> list[Any]:
    """The loader and what it takes its records from, as far as they want to know the epoch."""
    batches = getattr(loader, "batch_sampler", None)
    places = [loader, batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
    places.append(getattr(loader, "dataset", None))
    found = {id(one): one for one in places if callable(getattr(one, "set_epoch", None))}
    return list(found.values())


def _fingerprint(data: Any) -> str:
    """What tells data sets apart that were cut for each rank; a reader's own class isn't read."""
    marks: list[Any] = [len(data), getattr(data, "_fingerprint", None)]  # Hugging Face's datasets
    if isinstance(data, Subset):
        marks += [list(data.indices), _fingerprint(data.dataset)]
    elif isinstance(data, TensorDataset | list | tuple) and len(data):
        marks.append(_digest(data[0]))
    return hashlib.blake2b(repr(marks).encode()).hexdigest()


def _digest(batch: Any) -> str:
    """The same for batches whose tensors are equal."""
    found = hashlib.blake2b()

    def add(tensor: Tensor) -> Tensor:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(plain.view(torch.uint8).numpy().tobytes())
        return tensor

    each_tensor(batch, add)
    return found.hexdigest()


def _of_all(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _records_in(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    values = batch.values() if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, COLUMNS):
            return _records_in(value)
    raise InputError(f"the loader gave a {type(batch).__name__} without a tensor in it")


def micro_batch(rows: Sequence[BatchRow], count: Callable[[Any], int] | None) -> MicroBatch:
    """The loader's batch as it is, or the rows of it that a smaller micro-batch takes."""
    batch = rows[0].batch
    if len(rows) < rows[0].rows:
        batch = _select(batch, torch.tensor([r.row for r in rows]), rows[0].rows)
    weight = len(rows) if count is None else int(count(batch))
    inputs, named, target = _split(batch)
    given = {"inputs": inputs, "named": named, "target": target, "weight": weight}
    return MicroBatch(given, Counts(len(rows), len(rows), len(rows), weight))


def _select(value: Any, rows: Tensor, whole: int) -> Any:
    """These rows of all that has one for each of the ``whole`` batch's records."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device))
    if isinstance(value, Mapping):
        return {k: _select(v, rows, whole) for k, v in value.items()}
    if isinstance(value, tuple | list):
        if len(value) == whole and not any(isinstance(v, COLUMNS) for v in value):
            return [value[row] for row in rows.tolist()]  # texts, of which DataLoader makes a list
        return [_select(v, rows, whole) for v in value]
    return value


def _split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional inputs, named inputs, target) of a loader's batch."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return (), {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    raise InputError(
        "a batch must be (inputs, target) or a dictionary with 'labels'; "
        f"the loader gave a {type(batch).__name__}"
    )


Switch = bool | Technique | DynamicBatcher | GradientCompressor | None
DECISIVE = ("lr", "betas", "eps", "weight_decay", "momentum")
USUAL: Mapping[str, Technique] = {
    "compress_gradients": Quantised(),
    "mixed_precision": Autocast(),
    "dynamic_batch": AdaptiveBatch(),
}


class OptimizedTrainer:
    """Train any module with any loss function and loader.

    Args:
        model: trained in place, on the device it is on.
        optimizer: over the model's parameters; not stepped before.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the batch, or (sum, count).
        compress_gradients, mixed_precision, dynamic_batch: the articles' switches.
        count: weight of a batch in the mean, from the batch; its number of records if left out.
        max_grad_norm: clip gradients to this norm; no clipping if left out.
        bucket_cap_mb: size of DDP's gradient buckets on several ranks; 0: by the link, measured.

    A model in ``DistributedDataParallel`` is trained as its ``module`` and replicated once.

    Raises:
        InputError: a switch that is neither a bool nor a technique, or two for the same slot.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        compress_gradients: Switch = False,
        mixed_precision: Switch = False,
        dynamic_batch: Switch = False,
        *,
        count: Callable[[Any], int] | None = None,
        max_grad_norm: float | None = None,
        bucket_cap_mb: int = 25,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.count, self.max_grad_norm = count, max_grad_norm
        self.replicated = DDP(bucket_cap_mb)
        asked = {
            "compress_gradients": compress_gradients,
            "mixed_precision": mixed_precision,
            "dynamic_batch": dynamic_batch,
        }
        self.techniques = {name: _resolve(name, switch) for name, switch in asked.items()}
        self.switches = {
            name: str(technique or "off") for name, technique in self.techniques.items()
        }
        self.plan = Plan(t for t in self.techniques.values() if t is not None)

    def train(
        self,
        train_loader: Iterable[Any],
        epochs: int = 1,
        cloud_config: CloudConfig | None = None,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        deal: bool = True,
    ) -> dict[str, Any]:
        """Train for some epochs over a loader of (inputs, target) pairs or dictionaries.

        Several ranks share out the records of a plain ``DataLoader``. Another loader has to give
        each rank its own. What has ``set_epoch``, a sampler or a data set, is told each epoch.

        Args:
            cloud_config: the machines meant; where they are more than are here, the run uses
                what is here and says so.
            checkpoint_dir: the whole state is kept there at the end of each epoch.
            resume: go on from the newest checkpoint of ``checkpoint_dir``, if there is one.
            deal: False: every rank trains all that its loader gives, the same records or not.

        Returns:
            A summary: steps, losses per epoch, records per second, peak memory, switches
            and what each was seen to do (``acted``).

        Raises:
            InputError: two ranks get the same records, or the model's DDP has a hook.
        """
        folder = Path(checkpoint_dir) if checkpoint_dir is not None else None
        if resume and folder is None:
            raise InputError("resume=True needs checkpoint_dir, the folder to resume from")
        if folder is not None and not resume and checkpoints(folder):
            raise InputError(
                f"{folder} holds checkpoints of an earlier run; say resume=True to go on from "
                "them, or give another checkpoint_dir"
            )
        known = self._facts()
        _say_what_is_here(cloud_config, known)
        model, plan = _bare(self.model, known.world.is_main), self._whole_plan(folder, known)
        with process_group(known.world, known.device):
            loader = GivenLoader(train_loader, known.world, deal)
            job = self._job(model, loader, epochs, known)
            return self._train(prepare(job, plan, known, folder), loader, resume)

    def _train(self, setup: Setup, loader: GivenLoader, resume: bool) -> dict[str, Any]:
        session = assemble(setup)
        found = setup.checkpoint.resume(session) if resume else None
        if resume and found is None:
            print(f"{setup.folder}: no checkpoint yet, starting from the beginning")
        if session.changes and setup.facts.world.is_main:
            print(f"going on from {found}: {'; '.join(session.changes)}")
        losses: dict[int, list[float]] = {}
        before = replace(session.progress)  # of the run that is resumed
        watch = Watch(on_step=lambda m: losses.setdefault(m.epoch, []).append(m.loss))
        outcome = fit(session, watch)
        acted = self._acted(session)
        session.finish()
        now = session.progress
        records = loader.of_the_data(now.records - before.records, now.epoch - before.epoch)
        return {**self._summary(outcome, records, losses, found, setup), "acted": acted}

    def _job(self, model: nn.Module, loader: GivenLoader, epochs: int, known: Facts) -> Job:
        return Job(
            model=model,
            loss=lambda model: ObjectiveLoss(model, self.loss_fn),
            optimizer=lambda named: self.optimizer,
            stop=Stop(epochs=epochs),
            collate=lambda rows: micro_batch(rows, self.count),
            stream=loader.epoch,
            counted=False,
            max_grad_norm=self.max_grad_norm,
            device=known.device,
            seed=torch.initial_seed() % 2**31,
            terms=_terms(self.optimizer),
        )

    def _facts(self) -> Facts:
        parameters = sum(p.numel() for p in self.model.parameters())
        device = next((str(p.device) for p in self.model.parameters()), "cpu")
        here = ModelFacts(type(self.model).__name__, parameters)
        known = replace(facts.seen_at_start(), device=device, model=here)
        if not (dist.is_available() and dist.is_initialized()):
            return known
        # A group that stands already decides: a script may have numbered its ranks by itself.
        joined = replace(known.world, rank=dist.get_rank(), size=dist.get_world_size())
        return replace(known, world=joined)

    def _whole_plan(self, folder: Path | None, known: Facts) -> Plan:
        more: list[Technique] = []
        if folder is not None:
            more.append(Checkpoints(interval="epoch"))
        if known.world.size > 1:
            more.append(self.replicated)
        plan = self._possible(known).with_(*more)
        reasons = obstacles(plan, known)
        if reasons:
            raise InputError("this job can't use " + "; ".join(reasons))
        return plan

    def _possible(self, known: Facts) -> Plan:
        """The plan without those usual techniques that can't work here, nor a wire of one rank."""
        plan = self.plan
        for name, technique in self.techniques.items():
            if technique is None:
                continue
            if technique.slot is Slot.WIRE and known.world.size == 1:
                print(f"{name}: with one rank no gradient travels, so none is compressed")
            elif technique is USUAL[name] and (reasons := technique.obstacles(known)):
                print(f"{name}: going on without {technique}: {reasons[0]}")
            else:
                continue
            self.switches[name] = "off"
            plan = plan.without(technique)
        return plan

    def _acted(self, session: Session) -> dict[str, dict[str, Any]]:
        """What each switch was seen to do."""
        off = {"acted": False, "evidence": "off"}
        return {
            name: asdict(technique.probe(session))
            if technique is not None and self.switches[name] != "off"
            else off
            for name, technique in self.techniques.items()
        }

    def _summary(
        self,
        outcome: Outcome,
        records: int,
        losses: Mapping[int, Sequence[float]],
        found: Path | None,
        setup: Setup,
    ) -> dict[str, Any]:
        trained = sum(outcome.step_seconds)
        return {
            "stopped": outcome.stopped,
            "steps": len(outcome.step_seconds),
            "seconds": outcome.seconds,
            "records_per_second": records / trained if trained else None,
            "epoch_losses": {e: sum(v) / len(v) for e, v in losses.items()},
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "switches": dict(self.switches),
            "plan": setup.plan.to_list(),
            "resumed_from": str(found) if found else None,
            "world_size": setup.facts.world.size,
        }


def _terms(optimizer: Optimizer) -> dict[str, Any]:
    """Each number of its parameter groups, learning rate among them."""
    groups = optimizer.param_groups
    numbers = {key: [group.get(key) for group in groups] for key in DECISIVE if key in groups[0]}
    return {"optimizer": type(optimizer).__name__, **json.loads(json.dumps(numbers, default=float))}


def _resolve(name: str, switch: Any) -> Technique | None:
    if switch is None or switch is False:
        return None
    if isinstance(switch, Technique):
        return switch
    if name == "dynamic_batch" and isinstance(switch, DynamicBatcher):
        return AdaptiveBatch(**switch.settings())  # a part has state: only its settings are read
    if name == "compress_gradients" and isinstance(switch, GradientCompressor):
        return technique_of(switch)
    if switch is not True:
        raise InputError(f"{name} is {switch!r}; give True, False or a technique")
    return USUAL[name]


def _bare(model: nn.Module, says: bool) -> nn.Module:
    """The model itself: the layout replicates it.

    Raises:
        InputError: it is in a DDP with a hook, which the layout's DDP wouldn't have.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    if model._comm_hooks:
        raise InputError(
            "this model's DDP has a communication hook, which would be lost; give "
            "compress_gradients= here, or train model.module"
        )
    if says:
        print("the model is in DistributedDataParallel: its module is trained, and replicated once")
    return model.module


def _say_what_is_here(cloud: CloudConfig | None, known: Facts) -> None:
    here = max(known.world.size, len(known.hardware.accelerators), 1)
    if cloud is not None and cloud.devices > here:
        print(
            f"cloud_config asks for {cloud.devices} devices and this machine has {here}: training "
            "on what is here. `hasten launch` writes the files that start a recipe on a cluster"
        )
