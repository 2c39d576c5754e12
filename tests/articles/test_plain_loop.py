"""Parts in a loop written by hand: the same model, and every example once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from hasten.parts import checkpoint
from hasten.parts.data import collate
from hasten.parts.data import collate as cut
from hasten.parts.data.collate import TokenizedExample, packed, padded
from hasten.parts.data.dynamic_batch import DynamicBatcher, DynamicBatchSampler
from hasten.parts.data.epoch_order import PackedOrder
from hasten.parts.data.prefetch import SmartPrefetcher
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.losses import LabelOnlyLoss, WholeLogitsLoss
from hasten.parts.optim.master_weights import MasterWeights
from hasten.parts.optim.weight_average import decayed_groups
from saved import load_latest, save
from tiny import examples, tiny_model

STEPS = [examples(8, seed=s) for s in range(6)]
Collate = Callable[[Sequence[TokenizedExample]], dict[str, Any]]


def adamw(model: nn.Module) -> AdamW:
    return AdamW(decayed_groups(model.named_parameters(), 0.1), lr=3e-3)


def train(
    loss: nn.Module,
    optimizer: Optimizer,
    collate: Collate = padded,
    micro_batches: Callable[
        [Sequence[TokenizedExample]], Iterable[Sequence[TokenizedExample]]
    ] = lambda r: [r],
    steps: Iterable[Sequence[TokenizedExample]] = STEPS,
) -> list[float]:
    """The loop anybody would write; the mean loss of each step."""
    losses = []
    for step in steps:
        trained, total = sum(r.trained_tokens for r in step), 0.0
        for part in micro_batches(step):
            loss_sum, _ = loss(**collate(part))
            (loss_sum / trained).backward()
            total += loss_sum.item() / trained
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def plain(dtype: torch.dtype) -> tuple[nn.Module, list[float]]:
    model = tiny_model(dtype=dtype)
    return model, train(WholeLogitsLoss(model), adamw(model))


def at_most_60_tokens(step: Sequence[TokenizedExample]) -> list[list[TokenizedExample]]:
    return cut.by_tokens(step, [r.length for r in step], 60)


@pytest.mark.parametrize(
    "parts",
    ["packed", "documents", "packed documents", "labels", "cut", "packed documents labels cut"],
)
def test_a_part_trains_the_same_weights_as_the_loop_without_it(parts: str) -> None:
    expected, expected_losses = plain(torch.float64)
    model = tiny_model(dtype=torch.float64)
    if "documents" in parts:
        use_document_attention(model)
    losses = train(
        LabelOnlyLoss(model, chunk=16) if "labels" in parts else WholeLogitsLoss(model),
        adamw(model),
        packed if "packed" in parts else padded,
        at_most_60_tokens if "cut" in parts else lambda step: [step],
    )
    assert losses == pytest.approx(expected_losses, rel=1e-7)
    assert losses[-1] < losses[0]
    wanted = dict(expected.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6, msg=name)


def test_all_parts_with_master_weights_follow_the_float32_loop() -> None:
    _, expected = plain(torch.float32)
    model = tiny_model()
    use_document_attention(model)
    loss = LabelOnlyLoss(model, chunk=16)
    masters = MasterWeights()
    masters.prepare(loss)
    optimizer = adamw(model)
    masters.attach_optimizer(optimizer)
    losses = []
    for step in STEPS:
        trained, total = sum(r.trained_tokens for r in step), 0.0
        for part in at_most_60_tokens(step):
            loss_sum, _ = loss(**packed(part))
            (loss_sum / trained).backward()
            masters.accumulate_gradients()
            total += loss_sum.item() / trained
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        masters.update_model_weights()
        losses.append(total)
    assert losses == pytest.approx(expected, rel=2**-7)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    masters.finish(loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    again = train(LabelOnlyLoss(model, chunk=16), adamw(model), packed, steps=STEPS[:1])
    assert again[0] < expected[0], "what the masters learned must be in the finished model"


def saved(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": t for key, t in values.items()}
    return save(folder, step, tensors, {"step": step})


def restored(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    found = load_latest(folder)
    assert found is not None
    tensors, meta, _ = found
    model.load_state_dict({n[6:]: t for n, t in tensors.items() if n.startswith("model/")})
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/")
            state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    step: int = meta["step"]
    return step


def test_a_loop_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    expected, _ = plain(torch.float32)
    model = tiny_model()
    optimizer = adamw(model)
    train(WholeLogitsLoss(model), optimizer, steps=STEPS[:2])
    saved(tmp_path, 2, model, optimizer)
    train(WholeLogitsLoss(model), optimizer, steps=STEPS[2:3])
    (saved(tmp_path, 3, model, optimizer) / checkpoint.STATE).write_bytes(b"damaged")
    model = tiny_model(seed=1)
    optimizer = adamw(model)
    assert restored(tmp_path, model, optimizer) == 2
    train(WholeLogitsLoss(model), optimizer, steps=STEPS[2:])
    wanted = dict(expected.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


COUNT = 4_000
LENGTHS = np.random.default_rng(0).integers(1, 513, COUNT)


class Ids(Dataset[int]):
    """Examples that are their own number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def as_tensor(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids)


def seen_by(rank: int, world: int, workers: int, epoch: int) -> torch.Tensor:
    """A rank's examples: budget sampler, workers, read ahead, cut to what the memory allows."""
    sampler = DynamicBatchSampler(
        Ids(), 65_536, lengths=LENGTHS.tolist(), rank=rank, world_size=world
    )
    sampler.set_epoch(epoch)
    loader = DataLoader(Ids(), batch_sampler=sampler, num_workers=workers, collate_fn=as_tensor)
    used = iter(np.random.default_rng(rank).random(10 * COUNT))  # a memory that swings
    batcher = DynamicBatcher(16, 2_048, meter=lambda: (next(used), 1.0))
    found = []
    for batch in batcher.batches(SmartPrefetcher(4).wrap(loader)):
        found.append(batch)
        batcher.update_after_step()
        if len(found) % 17 == 0:
            batcher.on_out_of_memory()
    assert len(set(map(len, found))) > 3  # the size did move
    return torch.cat(found)


def each_once(parts: Sequence[torch.Tensor]) -> bool:
    together = torch.cat(list(parts)).sort().values
    return torch.equal(together, torch.arange(COUNT))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (4, 0)])
def test_every_record_comes_once_an_epoch_over_all_ranks(world: int, workers: int) -> None:
    first = [seen_by(rank, world, workers, 0) for rank in range(world)]
    assert each_once(first)
    if workers == 0:
        second = [seen_by(rank, world, workers, 1) for rank in range(world)]
        assert each_once(second)
        assert not torch.equal(first[0][:100], second[0][:100])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_packed_over_the_epoch_and_cut_by_memory_hold_every_record_once(world: int) -> None:
    order = PackedOrder(LENGTHS.tolist(), 4096, 8 * world, 0, 0.1)
    limits = np.random.default_rng(1)

    def pieces(rank: int) -> Iterator[list[int]]:
        for step in order.local_steps(0, rank, world):
            limit = int(limits.integers(512, 8192))
            for row in step:
                yield from collate.by_positions(row, [int(LENGTHS[i]) for i in row], limit)

    read: list[torch.Tensor] = []
    for rank in range(world):
        ahead = SmartPrefetcher(4).wrap(as_tensor(piece) for piece in pieces(rank))
        read += list(ahead)
    assert each_once(read)
