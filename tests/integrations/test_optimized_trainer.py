"""The articles' trainer on plain modules, loss functions and loaders."""

from __future__ import annotations

import functools
import pickle
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import CloudConfig, InputError, OptimizedTrainer
from hasten.machine import host
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.precision import Autocast, BF16MasterWeights
from integrations.loader_rank_jobs import Tagger, unlike_labels

IN_BF16 = (Autocast(emulate=True), BF16MasterWeights(emulate=True))


def data(count: int = 22) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 6, generator=draw).double(),
        torch.randint(0, 3, (count,), generator=draw),
    )


def classifier(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def plain_loop(loss: Callable[[Tensor, Tensor], Tensor], epochs: int, size: int) -> nn.Module:
    """The reference: whole batches, no library."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=size):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return model


def trained(loss: Any, epochs: int, size: int, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = OptimizedTrainer(model, optimizer, loss, **settings)
    return model, trainer.train(DataLoader(data(), batch_size=size), epochs=epochs)


def same(one: nn.Module, two: nn.Module) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), torch.tensor(len(target))


def only_some_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Class 0 carries no loss, so the count is known in the forward pass alone."""
    loss = F.cross_entropy(output, target, ignore_index=0, reduction="sum")
    return loss, (target != 0).sum()


def mean_of_some(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


ACCUMULATE = {"dynamic_batch": GradientAccumulation(micro_batch_size=3)}  # 8 -> 3, 3, 2


@pytest.mark.parametrize("settings", [{}, ACCUMULATE], ids=["whole", "in micro-batches"])
@pytest.mark.parametrize(
    ("loss", "count", "reference"),
    [
        (F.cross_entropy, None, F.cross_entropy),
        (sum_and_count, None, F.cross_entropy),
        (only_some_count, None, mean_of_some),
        (mean_of_some, lambda batch: int((batch[1] != 0).sum()), mean_of_some),
    ],
    ids=["mean", "sum and count", "count known late", "mean with count="],
)
def test_weights_equal_those_of_a_plain_loop_over_whole_batches(
    settings: dict[str, Any], loss: Any, count: Any, reference: Any
) -> None:
    model, summary = trained(loss, 3, 8, count=count, **settings)
    same(model, plain_loop(reference, 3, 8))
    assert summary["steps"] == 9


def test_it_trains_the_very_objects_it_was_given() -> None:
    model = classifier()
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    OptimizedTrainer(model, optimizer, F.cross_entropy).train(DataLoader(data(), batch_size=8))
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert weights[0].grad is None


def test_a_batch_may_be_a_dictionary_with_labels() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, features: Tensor) -> Tensor:
            return self.inner(features)  # type: ignore[no-any-return]

    model = Named()
    rows = [{"features": x, "labels": y} for x, y in data()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, **ACCUMULATE)
    trainer.train(DataLoader(rows, batch_size=8), epochs=2)  # type: ignore[arg-type]
    same(model.inner, plain_loop(F.cross_entropy, 2, 8))


@pytest.mark.parametrize("technique", IN_BF16, ids=str)
def test_mixed_precision_trains_float_inputs_and_leaves_a_plain_float32_model(
    technique: Any,
) -> None:
    model = classifier(torch.float32)
    loader = DataLoader([(x.float(), y) for x, y in data()], batch_size=8)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, mixed_precision=technique)
    losses = trainer.train(loader, epochs=8)["epoch_losses"]
    assert losses[7] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    same(pickle.loads(pickle.dumps(model)), model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def saved(
    folder: Path, epochs: int, rate: float = 0.1, shuffle: bool = False, **how: Any
) -> OptimizedTrainer:
    """A trainer of the classifier that has trained, from the folder's checkpoint where it may."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    torch.manual_seed(7)
    loader = DataLoader(data(), batch_size=8, shuffle=shuffle)
    resume = how.pop("resume", True)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, **how)
    trainer.train(loader, epochs=epochs, checkpoint_dir=folder, resume=resume)
    return trainer


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_run_ends_where_the_whole_run_ends(tmp_path: Path, shuffle: bool) -> None:
    whole = saved(tmp_path / "whole", 4, shuffle=shuffle)
    saved(tmp_path / "parts", 2, shuffle=shuffle)
    same(saved(tmp_path / "parts", 4, shuffle=shuffle).model, whole.model)


def test_a_run_goes_on_only_where_that_is_asked_for_and_with_its_own_settings(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1)
    with pytest.raises(InputError, match="resume=True"):
        saved(tmp_path, 1, resume=False)
    with pytest.raises(InputError, match=r"lr was \[0.1\] and is \[0.5\] now"):
        saved(tmp_path, 2, rate=0.5)
    saved(tmp_path, 2)
    with pytest.raises(InputError, match="accum_steps was 1 and is 3 now"):
        saved(tmp_path, 3, accum_steps=3)


def unused() -> OptimizedTrainer:
    model = classifier()
    return OptimizedTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)


def test_resume_needs_a_folder() -> None:
    with pytest.raises(InputError, match="checkpoint_dir"):
        unused().train(DataLoader(data()), resume=True)


@pytest.mark.parametrize("batches", [[3], [(torch.zeros(2, 6),)], [("a", "b")]])
def test_a_loader_that_gives_something_else_is_explained(batches: Any) -> None:
    with pytest.raises(InputError, match="loader gave"):
        unused().train(batches)


def test_an_empty_loader_is_explained() -> None:
    with pytest.raises(InputError, match="no steps"):
        unused().train([])


def test_a_switch_is_a_bool_or_a_technique() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(InputError, match="mixed_precision is 'bf16'"):
        OptimizedTrainer(model, optimizer, F.cross_entropy, mixed_precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="slot PRECISION"):
        OptimizedTrainer(
            model,
            optimizer,
            F.cross_entropy,
            mixed_precision=True,
            compress_gradients=BF16MasterWeights(),
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": True}, "gpus_per_node"),
        ({"topology": "fat_trees"}, "did you mean 'fat_tree'"),
        ({"network_priority": "cheap"}, "one of low_latency"),
    ],
)
def test_an_impossible_cluster_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        CloudConfig(**settings)


def test_a_usual_technique_that_cannot_work_here_is_left_out_and_a_chosen_one_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mixed_precision=True stands in scripts that are tried on laptops."""
    monkeypatch.setattr(host, "_instruction_sets", lambda: ("avx2",))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    loader = DataLoader([(x.float(), y) for x, y in data()], batch_size=8)  # type: ignore[arg-type]

    def trainer(switch: Any) -> OptimizedTrainer:
        model = classifier(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return OptimizedTrainer(model, optimizer, F.cross_entropy, mixed_precision=switch)

    summary = trainer(True).train(loader)
    assert summary["switches"]["mixed_precision"] == "off"
    assert summary["plan"] == []
    assert "mixed_precision: continuing without autocast" in capsys.readouterr().out
    with pytest.raises(InputError, match="in software only"):
        trainer(Autocast()).train(loader)


def test_machines_that_are_not_here_are_said_with_the_way_to_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unused().train(DataLoader(data(), batch_size=8), cloud_config=CloudConfig(2, 4, "fat_tree"))
    out = capsys.readouterr().out
    assert "cloud_config: 8 devices, fat_tree and network_priority low_latency are for pla" in out
    assert "`hasten launch` writes the files that start a recipe on a cluster" in out


def test_a_list_with_a_text_for_each_record_is_cut_with_them() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = classifier(), list[list[str]]()

        def forward(self, x: Tensor, names: list[str]) -> Tensor:
            assert len(x) == len(names)
            self.seen.append(names)
            found: Tensor = self.inner(x)
            return found

    rows = [(x, f"example {i}", y) for i, (x, y) in enumerate(data(8))]
    model = Noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, **ACCUMULATE)
    trainer.train(DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
    assert [len(names) for names in model.seen] == [3, 3, 2]
    assert [n for names in model.seen for n in names] == [f"example {i}" for i in range(8)]


def test_accumulated_batches_are_the_step_of_their_records() -> None:
    """22 examples in batches of 4, three to a step: steps of 12 and 10 examples."""
    model, summary = trained(F.cross_entropy, 3, 4, accum_steps=3)
    same(model, plain_loop(F.cross_entropy, 3, 12))
    assert summary["steps"] == 6
    assert summary["examples_per_step"] == {"least": 10, "mean": 11, "most": 12}


LABELLED: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "another label is ignored": nn.CrossEntropyLoss(ignore_index=2),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.5, 0.5]).double()),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "function": F.cross_entropy,
    "partial": functools.partial(F.cross_entropy, ignore_index=1),
    "nll": nn.NLLLoss(ignore_index=0),
}


@pytest.mark.parametrize("batches", [{"accum_steps": 4}, {**ACCUMULATE}], ids=["joined", "cut"])
@pytest.mark.parametrize("loss", LABELLED.values(), ids=LABELLED)
def test_a_step_is_the_mean_over_its_labels_however_they_lie_in_batches(
    loss: Any, batches: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = unlike_labels().tensors
    named = loss.keywords if isinstance(loss, functools.partial) else vars(loss)
    y = y.where(y >= 0, named.get("ignore_index", -100))
    model, reference = (
        nn.Sequential(Tagger(), nn.LogSoftmax(1) if isinstance(loss, nn.NLLLoss) else nn.Identity())
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for rows in [range(4), range(4, 8), range(8, 10)] * 2:
        optimizer.zero_grad()
        losses.append(loss(reference(x[rows]), y[rows]))
        losses[-1].backward()
        optimizer.step()
    theirs = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    size = 4 // batches.get("accum_steps", 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=size)
    summary = OptimizedTrainer(model, theirs, loss, **batches).train(loader, epochs=2)
    same(model, reference)
    assert min(losses) <= summary["epoch_losses"][1] <= max(losses)
    assert "weighted" not in capsys.readouterr().out


def test_the_loss_of_an_epoch_is_the_mean_over_its_labels() -> None:
    model, (x, y) = Tagger(), unlike_labels().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, **ACCUMULATE)
    losses = trainer.train(loader)["epoch_losses"]
    assert losses[0] == pytest.approx(F.cross_entropy(model(x), y).item())


def test_an_unknown_mean_is_weighted_by_examples_and_that_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(mean_of_some, 2, 4, accum_steps=3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("loss_fn mean_of_some isn't one of torch's own means: each batch of a ")
    assert "give count=" in line
    for settings in (
        {"loss": mean_of_some},  # a batch is a step
        {"loss": mean_of_some, "count": lambda batch: 1, "accum_steps": 3},
        {"loss": only_some_count, "accum_steps": 3},
        {"loss": F.cross_entropy, "accum_steps": 3},
    ):
        trained(**{"epochs": 1, "size": 4, **settings})
        assert capsys.readouterr().out == ""


def test_the_same_batch_given_again_counts_again() -> None:
    model, batch = classifier(), next(iter(DataLoader(data(), batch_size=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OptimizedTrainer(model, optimizer, F.cross_entropy, accum_steps=2)
    assert trainer.train([batch] * 4)["examples_per_step"]["least"] == 8


def test_two_ways_to_say_the_step_are_refused() -> None:
    for settings in ({"accum_steps": 2, "dynamic_batch": True}, {"accum_steps": 2, **ACCUMULATE}):
        with pytest.raises(InputError, match="both decide how many examples"):
            trained(F.cross_entropy, 1, 4, **settings)
    with pytest.raises(InputError, match="accum_steps is 0"):
        trained(F.cross_entropy, 1, 4, accum_steps=0)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_that_would_stop_or_turn_round_updates_is_refused(norm: Any) -> None:
    with pytest.raises(InputError, match="above 0, or None"):
        trained(F.cross_entropy, 1, 4, max_grad_norm=norm)


def test_a_schedule_of_the_optimizer_s_own_is_followed() -> None:
    """It steps where the optimizer does; nothing else of a trainer sets the rates."""

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    plain, model = classifier(), classifier()
    optimizer = scheduled(plain)
    for x, y in DataLoader(data(), batch_size=4):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    trainer = OptimizedTrainer(model, scheduled(model), F.cross_entropy)
    trainer.train(DataLoader(data(), batch_size=4))
    same(model, plain)


def test_an_optimizer_that_steps_in_the_backward_pass_is_explained() -> None:
    model = classifier()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        each[parameter].step()  # type: ignore[index]  # a parameter
        each[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = OptimizedTrainer(model, idle, F.cross_entropy)
    with pytest.raises(InputError, match="an optimizer that steps after the pass"):
        trainer.train(DataLoader(data(), batch_size=4))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, reduction="sum"),
        nn.MultiMarginLoss(reduction="sum"),
    ],
    ids=["module", "partial", "unlisted"],
)
def test_a_sum_is_as_in_a_plain_loop_or_refused(loss: Any) -> None:
    same(trained(loss, 2, 4)[0], plain_loop(loss, 2, 4))
    with pytest.raises(InputError, match="reduction='sum', and a step needs the mean"):
        trained(loss, 2, 4, accum_steps=2)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (nn.CrossEntropyLoss(reduction="none"), "reduction='none', and a step needs the mean"),
        (lambda output, target: 1.0, "loss_fn returned float"),
        (lambda output, target: None, "loss_fn returned NoneType"),
        (lambda output, target: (output.sum(), output), r"loss_fn returned \[1, 12\] numbers"),
    ],
    ids=["none", "float", "nothing", "outputs"],
)
def test_what_is_no_loss_is_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        trained(loss, 1, 4)


def test_a_loss_of_one_number_in_a_row_is_that_number() -> None:
    same(
        trained(lambda output, target: F.cross_entropy(output, target)[None], 1, 4)[0],
        plain_loop(nn.CrossEntropyLoss(), 1, 4),
    )


def test_an_optimizer_of_another_model_and_a_negative_count_are_refused() -> None:
    other = torch.optim.SGD(classifier().parameters(), lr=0.1)
    with pytest.raises(InputError, match="no weight has a gradient"):
        OptimizedTrainer(classifier(), other, nn.CrossEntropyLoss()).train(DataLoader(data(), 8))
    with pytest.raises(InputError, match="count returned -4 for a batch"):
        trained(nn.CrossEntropyLoss(), 1, 4, count=lambda batch: -len(batch[0]))
