"""OptimizedTrainer on two ranks: examples are shared out once each, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from integrations.loader_rank_jobs import COUNT, Tagger, unlike_labels
from ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("integrations.loader_rank_jobs:everything", tmp_path_factory.mktemp("ranks"))


def of(found: list[Any], case: str, key: str) -> list[Any]:
    return [rank[case][key] for rank in found]


@pytest.mark.parametrize("case", ["in order", "shuffled"])
def test_a_plain_loader_is_dealt_out_and_every_record_trained(found: list[Any], case: str) -> None:
    for one, two in zip(*of(found, case, "epochs"), strict=True):
        assert len(one) == len(two) == 17  # 33 examples, one of them twice
        assert set(one) | set(two) == set(range(COUNT))
        assert len(set(one) & set(two)) == 1
    assert of(found, case, "examples") == [2 * COUNT] * 2  # and counted once
    assert of(found, case, "steps") == [10, 10]
    assert of(found, case, "said") == [
        "2 ranks: each trains 17 of 33 examples an epoch, 4 at a time (8 a step)\n",
        "",
    ]


def test_dropped_records_are_not_counted(found: list[Any]) -> None:
    assert of(found, "rest dropped", "examples") == [2 * 32] * 2


def test_a_shuffled_loader_has_a_new_order_in_each_epoch(found: list[Any]) -> None:
    for first, second in of(found, "shuffled", "epochs"):
        assert first != second
    for first, second in of(found, "in order", "epochs"):
        assert first == second == sorted(first[:-1]) + first[-1:]


@pytest.mark.parametrize("case", ["distributed sampler", "batch sampler"])
def test_a_sampler_with_epochs_is_told_each_of_them(found: list[Any], case: str) -> None:
    (one, again), (two, _) = of(found, case, "epochs")
    assert one != again
    assert sorted(one + two) == list(range(64))
    assert of(found, case, "examples") == [2 * 64] * 2


def test_data_sets_that_were_cut_by_hand_are_not_cut_again(found: list[Any]) -> None:
    assert of(found, "cut by hand", "examples") == [2 * (COUNT - 1)] * 2
    assert of(found, "cut tensors", "examples") == [2 * 8] * 2
    assert "different data sets: each trains its own, whole" in found[0]["cut by hand"]["said"]


def test_ranks_that_get_the_same_batches_are_refused(found: list[Any]) -> None:
    for words in of(found, "same batches", "refused"):
        assert "every rank gets the same examples from this loader. Give it a Distr" in words
    assert of(found, "other batches", "examples") == [2 * 8] * 2


def test_on_request_every_rank_trains_all_and_records_count_once(found: list[Any]) -> None:
    assert of(found, "not dealt", "epochs") == [[list(range(COUNT))] * 2] * 2
    assert of(found, "not dealt", "examples") == [2 * COUNT] * 2


def test_a_model_in_ddp_is_replicated_once_and_keeps_its_wrapper(found: list[Any]) -> None:
    plain, wrapped = (of(found, case, "weights") for case in ("in order", "in DDP"))
    assert wrapped == plain
    assert wrapped[0] == wrapped[1]
    assert of(found, "in DDP", "still") == ["DistributedDataParallel"] * 2
    assert "its module is trained, and replicated once" in found[0]["in DDP"]["said"]


def test_a_hook_that_would_be_lost_is_refused(found: list[Any]) -> None:
    for words in of(found, "hook", "refused"):
        assert "a communication hook, which would be lost; give compress_gradients=" in words


def test_the_size_of_buckets_is_the_layout_s(found: list[Any]) -> None:
    assert of(found, "in order", "bucket") == [[1], [1]]


def test_ranks_with_unlike_numbers_of_labels_train_as_one_that_has_all(found: list[Any]) -> None:
    """Steps of four rows, as two ranks take them; torch's sampler repeats two rows at the end."""
    model, data = Tagger(), unlike_labels()
    x, y = data.tensors
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.5, 0.5]).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = [torch.arange(i, min(i + 4, 10)) for i in range(0, 10, 4)]
    losses = []
    for _ in range(2):
        sums = []
        for rows in steps:
            optimizer.zero_grad()
            mean = loss(model(x[rows]), y[rows])
            mean.backward()
            optimizer.step()
            weight = sum(loss.weight[label] for label in y[rows].flatten() if label >= 0)
            sums.append((mean.item() * float(weight), float(weight)))
        losses.append(sum(s for s, _ in sums) / sum(w for _, w in sums))
    for rank in found:
        assert rank["unlike labels"]["losses"] == pytest.approx(losses)
        for one, p in zip(rank["unlike labels"]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(one).double(), p.detach())
    assert "weighted" not in found[0]["unlike labels"]["said"]
