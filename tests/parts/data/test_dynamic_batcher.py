"""Batches of a size that follows the memory: examples in order, none lost, steps redone exactly."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hasten import DynamicBatcher
from hasten.parts.data.dynamic_batch import example_count, join_batches, select_examples

pytestmark = pytest.mark.filterwarnings("ignore:.* examples (wait|at a time)")


def plenty() -> tuple[float, float]:
    return 1.0, 100.0


def batcher(size: int = 4, meter: Any = plenty, **changes: Any) -> DynamicBatcher:
    return DynamicBatcher(size, 64, meter=meter, **changes)


def numbers(start: int, stop: int) -> dict[str, Any]:
    """The same examples in every form that a loader gives."""
    row = torch.arange(start, stop)
    images = row[:, None, None, None].expand(-1, 3, 2, 2)
    return {
        "tensor": row,
        "images": images,
        "tuple": (images, row),
        "list of columns": [images, row],
        "mapping": {"a": row, "b": {"c": images}},
        "examples": [{"id": i} for i in range(start, stop)],
    }


def ids(batch: Any) -> list[int]:
    while not isinstance(batch, torch.Tensor):
        if isinstance(batch, list) and isinstance(batch[0], dict):
            return [example["id"] for example in batch]
        batch = batch["a"] if isinstance(batch, dict) else batch[-1]
    return [int(v) for v in batch.reshape(len(batch), -1)[:, 0]]


@pytest.mark.parametrize("form", numbers(0, 1))
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), first=st.integers(1, 8))
def test_records_keep_their_order_and_none_is_lost(form: str, sizes: list[int], first: int) -> None:
    loader, start = [], 0
    for size in sizes:
        loader.append(numbers(start, start + size)[form])
        start += size
    for whole in (True, False):
        made, seen = batcher(first), []
        given_ = made.batches(loader) if whole else map(made.adjust_batch, loader)
        for batch in given_:
            assert type(batch) is type(loader[0])
            seen += ids(batch)
            assert example_count(batch) <= made.size
            made.update_after_step()
        seen += [i for batch in made.flush() for i in ids(batch)]
        assert seen == list(range(start))
        assert made.waiting_examples == 0


def limited(size: int = 4, meter: Any = plenty) -> DynamicBatcher:
    """One for which the next larger size has been too much."""
    made = batcher(2 * size, meter)
    made.adjust_batch(torch.arange(2 * size))
    made.on_out_of_memory()
    assert made.size == size
    return made


def test_whole_batches_are_trained_as_long_as_they_fit() -> None:
    made = batcher(4)
    assert made.adjust_batch(torch.arange(10)).tolist() == list(range(10))
    assert made.size == 10
    made.update_after_step()
    assert made.size == 12


def test_beyond_the_largest_size_or_what_fits_the_rest_waits() -> None:
    for made in (limited(4), DynamicBatcher(2, 4, meter=plenty)):
        with pytest.warns(
            UserWarning,
            match=r"6 examples wait: the "
            r"loader gives 10 and a step tak",
        ):
            assert made.adjust_batch(torch.arange(10)).tolist() == [0, 1, 2, 3]
        assert made.waiting_examples == 6
        assert made.adjust_batch(torch.arange(10, 12)).tolist() == [4, 5, 6, 7]  # said once
        assert [b.tolist() for b in made.flush()] == [[8, 9, 10, 11]]


def test_a_loader_with_small_batches_is_told_once_and_a_short_tail_never() -> None:
    made = batcher(8)
    made.adjust_batch(torch.arange(8))
    made.update_after_step()
    assert made.size == 9
    made.adjust_batch(torch.arange(5))
    with pytest.warns(
        UserWarning, match="gives 5 examples at a time, so batches stay at 5 of 9; b"
    ):
        made.adjust_batch(torch.arange(5))
    made.adjust_batch(torch.arange(5))


def test_records_that_nobody_trained_are_named_when_the_batcher_goes() -> None:
    made = DynamicBatcher(2, 4, meter=plenty)
    made.adjust_batch(torch.arange(10))
    with pytest.warns(ResourceWarning, match="6 examples still wait in a DynamicBatcher"):
        del made
    made = DynamicBatcher(2, 4, meter=plenty)
    for _ in made.batches([torch.arange(10)]):
        pass
    del made


def test_a_loss_that_is_no_number_says_nothing_of_the_memory() -> None:
    made = batcher(8)
    made.adjust_batch(torch.arange(8))
    made.update_after_step(float("nan"))
    assert made.size == 8
    made.update_after_step(torch.tensor(float("nan")))  # isn't read
    assert made.size == 9


def test_it_grows_on_head_room_and_shrinks_before_the_threshold() -> None:
    used = [10.0]
    made = batcher(20, lambda: (used[0], 100.0))
    made.adjust_batch(torch.arange(20))
    made.update_after_step()
    assert made.size == 24
    used[0] = 85.0
    made.adjust_batch(torch.arange(24))
    made.update_after_step()
    assert made.size == 20


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried")])
def test_a_step_that_did_not_fit_has_the_gradient_of_the_whole_batch(error: Exception) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(11, 3).double()
    (model(x) ** 2).mean().backward()
    expected = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    tried = []

    def step(piece: Any, share: float) -> float:
        tried.append(len(piece))
        loss = (model(piece) ** 2).mean() * share
        loss.backward()
        if len(piece) > 3:
            raise error
        return float(loss.detach())

    made = batcher(16)
    losses = made.run_step(step, x, model.zero_grad)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)
    assert sum(losses) == pytest.approx(float((model(x).detach() ** 2).mean()), rel=1e-12)
    assert tried == [11, 5, 2, 2, 2, 2, 2, 1]
    assert made.size == 2


def test_other_errors_and_a_record_that_never_fits_are_raised() -> None:
    def never(piece: Any, share: float) -> None:
        raise MemoryError("one example")

    def broken(piece: Any, share: float) -> None:
        raise RuntimeError("shapes")

    with pytest.raises(MemoryError, match="one example"):
        batcher().run_step(never, torch.arange(4), lambda: None)
    with pytest.raises(RuntimeError, match="shapes"):
        batcher().run_step(broken, torch.arange(4), lambda: None)


def test_a_resumed_batcher_has_the_size_and_the_records_that_waited() -> None:
    made = limited(4)
    made.adjust_batch(torch.arange(10))
    made.update_after_step()
    again = batcher(9)
    again.load_state_dict(made.state_dict())
    assert again.size == made.size == 5
    assert [b.tolist() for b in again.flush()] == [b.tolist() for b in made.flush()]


def test_its_settings_make_another_one() -> None:
    made = DynamicBatcher(3, 30, 1.5, 0.7, meter=plenty)
    again = DynamicBatcher(**made.settings())
    assert again.settings() == made.settings()
    assert again.size == 3


@pytest.mark.parametrize("data", [7, (torch.zeros(2), torch.zeros(3)), torch.tensor(1.0)])
def test_what_has_no_rows_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="rows"):
        batcher().adjust_batch(data)


@given(st.integers(0, 7))
def test_select_and_join_undo_each_other(at: int) -> None:
    for batch in numbers(0, 7).values():
        again = join_batches([select_examples(batch, 0, at), select_examples(batch, at, 7)])
        assert ids(again) == ids(batch)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"x": torch.ones(2)}, {"x": torch.ones(2), "weight": torch.ones(2)}),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2))),
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2), ["a", "b"]),
    ],
    ids=["mapping", "tuple", "width", "kind"],
)
def test_batches_of_other_forms_are_not_joined(one: Any, two: Any) -> None:
    for parts in ([one, two], [two, one]):
        with pytest.raises(ValueError, match="can't be joined"):
            join_batches(parts)


def test_a_cut_mapping_is_of_the_same_class() -> None:
    whole = OrderedDict(a=torch.arange(6))
    cut = [select_examples(whole, 0, 2), select_examples(whole, 2, 6)]
    assert {type(batch) for batch in (*cut, join_batches(cut))} == {OrderedDict}
    assert whole["a"].tolist() == join_batches(cut)["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_step_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="without examples"):
        batcher().run_step(lambda piece, share: share, torch.ones(0, 2), lambda: None)


def test_memory_before_the_first_batch_says_nothing_of_its_size() -> None:
    made = batcher(20, lambda: (99.0, 100.0))
    made.update_after_step()
    assert made.size == 20
