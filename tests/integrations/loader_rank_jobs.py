"""OptimizedTrainer on ranks: which examples each one trains, and what is refused."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from hasten import DynamicBatchSampler, InputError, OptimizedTrainer
from hasten.core.loop import Outcome
from hasten.integrations import optimized_trainer
from hasten.machine.environment import World

COUNT, SIZE = 33, 4


class Seen(Dataset[Any]):
    """Remembers which examples were read, in their order."""

    def __init__(self, count: int = COUNT) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x, self.read = torch.randn(count, 5, generator=draw), list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.x[index], torch.tensor(index % 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def trained(
    loader: Iterable[Any], network: nn.Module | None = None, epochs: int = 2, **how: Any
) -> dict[str, Any]:
    """What one training says, and the weights after it."""
    network = model() if network is None else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    said, outcomes, fit = io.StringIO(), list[Outcome](), optimized_trainer.fit

    def noted(*given: Any) -> Outcome:
        outcomes.append(fit(*given))
        return outcomes[-1]

    try:
        with contextlib.redirect_stdout(said), mock.patch.object(optimized_trainer, "fit", noted):
            trainer = OptimizedTrainer(network, optimizer, nn.CrossEntropyLoss(), bucket_cap_mb=1)
            summary = trainer.train(loader, epochs=epochs, **how)
    except InputError as error:
        return {"refused": str(error)}
    return {
        "said": said.getvalue(),
        "steps": summary["steps"],
        "weights": [p.flatten().tolist() for p in network.parameters()],
        "examples": round(summary["examples_per_second"] * sum(outcomes[-1].step_seconds)),
        "bucket": [t.get("bucket_cap_mb") for t in summary["plan"] if t["technique"] == "ddp"],
    }


def with_reads(loader: DataLoader[Any], **how: Any) -> dict[str, Any]:
    found = trained(loader, **how)
    data = loader.dataset
    assert isinstance(data, Seen)
    half = len(data.read) // 2
    return {**found, "epochs": [data.read[:half], data.read[half:]]}


class Tagger(nn.Module):
    """Scores of three classes for each position of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = model().double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x).transpose(1, 2)
        return found


def unlike_labels() -> TensorDataset:
    """Rows of six positions, of which some carry many labels, some one, and some none."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(10, 6, 5, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (10, 6), generator=draw)
    for row, labels in enumerate([6, 1, 0, 0, 2, 6, 5, 3, 1, 6]):
        y[row, labels:] = -100
    return TensorDataset(x, y)


def labelled_mean(world: World) -> dict[str, Any]:
    """Weights and losses after training on rows with unlike numbers of labels."""
    network = Tagger()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.5, 0.5]).double())
    loader = DataLoader(unlike_labels(), batch_size=1)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        summary = OptimizedTrainer(network, optimizer, loss, accum_steps=2).train(loader, 2)
    weights = [p.tolist() for p in network.parameters()]
    losses = [*summary["epoch_losses"].values()]
    return {"weights": weights, "losses": losses, "said": said.getvalue()}


def everything(world: World) -> dict[str, Any]:
    data = Seen(64)
    sampler = DynamicBatchSampler(data, 8, lengths=[1] * 64, rank=world.rank, world_size=world.size)
    wrapped, hooked = (DistributedDataParallel(model()) for _ in range(2))
    hooked.register_comm_hook(None, fp16_compress_hook)
    mine = Subset(Seen(), range(world.rank, COUNT - 1, world.size))
    batch = (torch.ones(4, 5), torch.zeros(4, dtype=torch.long))
    own = (torch.full((4, 5), float(world.rank)), torch.zeros(4, dtype=torch.long))
    torch.manual_seed(world.rank)  # a reader who seeds ranks differently
    return {
        "in order": with_reads(DataLoader(Seen(), batch_size=SIZE)),
        "shuffled": with_reads(DataLoader(Seen(), batch_size=SIZE, shuffle=True)),
        "distributed sampler": with_reads(
            DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        ),
        "batch sampler": with_reads(DataLoader(Seen(64), batch_sampler=sampler)),
        "cut by hand": trained(DataLoader(mine, batch_size=SIZE)),
        "cut tensors": trained(DataLoader(TensorDataset(*own), batch_size=SIZE)),
        "same batches": trained([batch]),
        "other batches": trained([own]),
        "not dealt": with_reads(DataLoader(Seen(), batch_size=SIZE), deal=False),
        "in DDP": {
            **trained(DataLoader(Seen(), batch_size=SIZE), wrapped),
            "still": type(wrapped).__name__,
        },
        "hook": trained(DataLoader(Seen(), batch_size=SIZE), hooked),
        "unlike labels": labelled_mean(world),
    }
