"""Batches of OptimizedTrainer: growing, measured, and dealt out to two ranks."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import DynamicBatcher, InputError, OptimizedTrainer, benchmark
from hasten.core import context as facts
from hasten.core.context import ExampleStats
from hasten.techniques import batch
from hasten.techniques.batch import AdaptiveBatch
from integrations.loader_rank_jobs import COUNT, Tagger, everything, unlike_labels
from ranks import on_ranks

pytestmark = pytest.mark.usefixtures("much_memory")


def trained(
    batches: list[Any], dynamic: Any, epochs: int = 3
) -> tuple[Tensor, dict[str, Any], list[int]]:
    """Weights, summary, and examples of each pass."""
    torch.manual_seed(0)
    model, passes = nn.Linear(5, 3).double(), list[int]()
    model.register_forward_hook(lambda module, given, out: passes.append(len(given[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = OptimizedTrainer(model, optimizer, nn.CrossEntropyLoss(), dynamic_batch=dynamic)
    summary = trainer.train(batches, epochs=epochs)
    return model.weight.detach().clone(), summary, passes


def halves(of: int) -> tuple[list[Any], list[Any]]:
    """24 examples in batches of so many, and in steps of twice as many."""
    x, y = torch.randn(24, 5).double(), torch.randint(0, 3, (24,))
    return [
        [(x[i : i + size], y[i : i + size]) for i in range(0, 24, size)] for size in (of, 2 * of)
    ]


def test_a_technique_of_one_s_own_leaves_training_as_it_was() -> None:
    batches, _ = halves(12)
    weights, summary, passes = trained(batches, AdaptiveBatch(4, 64))
    assert summary["switches"]["dynamic_batch"] == "adaptive_batch(initial_size=4, max_size=64)"
    torch.testing.assert_close(weights, trained(batches, False)[0], rtol=1e-10, atol=1e-12)
    assert passes[:3] == [4, 4, 4]
    assert summary["examples_per_step"] == {"least": 12, "mean": 12, "most": 12}


def test_the_articles_batch_grows_over_batches_of_the_loader_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches, joined = halves(6)
    weights, summary, passes = trained(batches, DynamicBatcher(12, 12))
    assert passes == [12] * 6  # two batches of 6 are a step of one pass
    torch.testing.assert_close(weights, trained(joined, False)[0], rtol=1e-10, atol=1e-12)
    assert summary["effective"]["dynamic_batch"]["effective"]
    assert summary["examples_per_step"] == {"least": 12, "mean": 12, "most": 12}
    said = capsys.readouterr().out
    assert "dynamic_batch: 6 -> 12 examples a step; the learning rate stays as it is" in said
    _, summary, passes = trained(batches, True)
    assert max(passes) == 24
    assert summary["steps"] == 3


def test_a_step_shrinks_to_what_fits_and_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(batch, "memory_meter", lambda device: lambda: (float(seen[-1]), 10.0))
    x, y = torch.randn(48, 5).double(), torch.randint(0, 3, (48,))
    model = nn.Linear(5, 3).double()
    model.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OptimizedTrainer(
        model, optimizer, nn.CrossEntropyLoss(), dynamic_batch=DynamicBatcher(4, 64)
    )
    summary = trainer.train([(x[i : i + 4], y[i : i + 4]) for i in range(0, 48, 4)], epochs=6)
    assert sum(seen) == 6 * 48
    assert 8 < max(seen) < 16  # once over the threshold of 8 examples
    assert max(seen[-6:]) == 8
    assert summary["examples_per_step"]["most"] <= 16


@pytest.mark.parametrize("texts", [False, True])
def test_batches_of_other_forms_are_not_joined(texts: bool) -> None:
    seen: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return output.square().mean()

    rows = [(torch.ones(2, 5), ["a", "b"] if texts else torch.zeros(2))]
    rows += [(torch.ones(2, 5), ["c", "d"] if texts else torch.zeros(2))]
    rows += [(torch.ones(2, 5, dtype=torch.half).float(), torch.zeros(2, 1))]
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizedTrainer(model, optimizer, loss, dynamic_batch=True).train(rows)
    assert len(seen) == 2
    assert seen[0] == ["a", "b", "c", "d"] if texts else len(seen[0]) == 4


def test_growing_is_refused_where_the_recipe_says_the_step() -> None:
    known = replace(facts.seen_at_start(), examples=ExampleStats(count=10, tokens=10, longest=1))
    assert "global_batch_size" in AdaptiveBatch(grow=True).unsupported_reasons(known)[0]
    assert not AdaptiveBatch().unsupported_reasons(known)


def test_a_run_resumed_in_an_epoch_trains_the_records_that_were_left(tmp_path: Path) -> None:
    """The steps of the epoch that are done are left out as they were, not as they would be now."""
    x, y = torch.arange(40.0)[:, None].expand(40, 5).double(), torch.randint(0, 3, (40,))
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 40, 2)]
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if stop_at and len(seen) >= stop_at:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(output, target)

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        model.register_forward_hook(lambda module, given, out: seen.extend(given[0][:, 0].tolist()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainer = OptimizedTrainer(model, optimizer, loss, dynamic_batch=DynamicBatcher(2, 8))
        trainer.train(batches, checkpoint_dir=tmp_path, resume=True)

    stop_at = 10
    run()
    assert 0 < len(seen) < 40
    stop_at = 0
    run()
    assert seen == x[:, 0].tolist()


def loader(count: int = 40) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 3), torch.randint(0, 2, (count,))), 4)


modes: list[bool] = []  # of a copy's passes


class Slow(nn.Module):
    """A model whose passes take 10 ms at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(3, 2), nn.BatchNorm1d(3), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        modes.append(self.training)
        found: Tensor = self.layer(self.drop(self.norm(x)))
        return found


def test_the_rate_is_samples_over_seconds_and_all_is_put_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    modes.clear()
    model = Slow().eval()
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    rate = benchmark(model, loader(), 2, optimizer=optimizer)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    loader()  # it draws its examples
    assert torch.equal(drawn, torch.rand(1))
    assert 0 < rate <= 4 / 0.01
    assert modes == [True] * (2 + 2 * 10)  # two passes warm up
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.layer.weight.grad is None
    assert not optimizer.state_dict()["state"]
    said = capsys.readouterr().out
    found = re.fullmatch(r"throughput: ([\d.]+) samples/sec \(95 %: ([\d.]+) to ([\d.]+)\)\n", said)
    assert found is not None, said
    low, high = float(found[2]), float(found[3])
    assert float(found[1]) == pytest.approx(rate, abs=0.01)
    assert low <= rate + 0.01
    assert high >= rate - 0.01


def test_the_loss_is_the_caller_s_or_follows_from_the_target() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(target))
        return output.square().mean()

    benchmark(nn.Linear(3, 2), loader(8), loss_fn=loss)
    assert calls == [4] * 4
    assert benchmark(nn.Linear(3, 2), [(torch.ones(4, 3), torch.ones(4, 2))]) > 0
    with pytest.raises(ValueError, match="give loss_fn"):
        benchmark(nn.Linear(3, 2), [(torch.ones(4, 3), ["a"] * 4)])


def test_a_language_model_has_its_own_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return type("Output", (), {"loss": (self.layer(x) - labels).square().mean()})()

    assert benchmark(Model(), [{"x": torch.ones(4, 3), "labels": torch.ones(4, 2)}]) > 0


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(InputError, match="gave no batch"):
        benchmark(nn.Linear(3, 2), [])
    with pytest.raises(InputError, match="none in a second pass"):
        benchmark(nn.Linear(3, 2), iter([(torch.ones(4, 3), torch.ones(4, 2))]))
    with pytest.raises(InputError, match="epochs is 0"):
        benchmark(nn.Linear(3, 2), loader(), 0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


def of(found: list[Any], case: str, key: str) -> list[Any]:
    return [rank[case][key] for rank in found]


@pytest.mark.parametrize("case", ["in order", "shuffled"])
def test_a_plain_loader_is_dealt_out_and_every_record_trained(found: list[Any], case: str) -> None:
    for one, two in zip(*of(found, case, "epochs"), strict=True):
        assert len(one) == len(two) == 17  # 33 examples, one of them twice
        assert set(one) | set(two) == set(range(COUNT))
        assert len(set(one) & set(two)) == 1
    assert of(found, case, "examples") == [2 * 34] * 2
    assert of(found, case, "steps") == [10, 10]
    assert of(found, case, "said") == [
        "2 ranks: each trains 17 of 33 examples an epoch, 4 at a time (8 a step)\n",
        "",
    ]


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


def test_a_joined_batch_has_what_has_no_rows_once() -> None:
    """Class weights or a temperature beside the rows are no rows, and are joined if equal alone."""
    seen: list[tuple[int, list[float], float]] = []

    class Model(nn.Linear):
        def forward(self, temperature: Tensor, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            seen.append((len(x), weights.tolist(), float(temperature)))
            return super().forward(x) * weights / temperature

    rows = {"x": torch.ones(4, 5), "labels": torch.zeros(4, dtype=torch.int64)}
    warm, cold = (
        {"temperature": torch.tensor(t), **rows, "weights": torch.tensor([1.0, 2, 3])}
        for t in (2.0, 0.5)
    )
    model = Model(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OptimizedTrainer(model, optimizer, nn.CrossEntropyLoss(), dynamic_batch=True)
    summary = trainer.train([warm, warm, cold])
    assert seen == [(8, [1, 2, 3], 2.0), (4, [1, 2, 3], 0.5)]
    assert summary["examples_per_step"] == {"least": 4, "mean": 6, "most": 8}


@pytest.mark.parametrize("epochs", [1.5, "2", 0])
def test_epochs_that_are_no_whole_number_are_refused(epochs: Any) -> None:
    with pytest.raises(InputError, match="at least 1 of each, as a whole number"):
        trained(halves(6)[0], False, epochs)
    with pytest.raises(ValueError, match="epochs is"):
        benchmark(nn.Linear(5, 3).double(), halves(6)[0], epochs)


def test_a_batch_without_examples_is_refused() -> None:
    batches, _ = halves(6)
    with pytest.raises(InputError, match="a batch without examples; leave it out"):
        trained([(batches[0][0][:0], batches[0][1][:0]), *batches], False)
