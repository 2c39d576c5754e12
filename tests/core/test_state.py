"""What a slot remembers travels with the checkpoint, whatever it is, and comes back as it was."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.core.setup import Average
from hasten.core.state import state_of
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.parts.optim import fused_adamw
from hasten.techniques.optimizer import FusedAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from saved import load_latest, save
from tiny import language_job, restore, run, session_of

KEYS = st.text(max_size=4) | st.sampled_from(["$tensor", "$items", "a/b", "0"]) | st.integers(0, 3)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.lists(st.integers(0, 9), max_size=3).map(torch.tensor)
    | st.just(torch.ones(2, 3)[:, 1])  # a view
)
NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


class Remembers(Average):
    """An average whose state is whatever the test says."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def versions(self, parameters: Sequence[torch.Tensor]) -> Iterator[str]:
        yield ""

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["held"]


class RemembersOtherwise(Remembers):
    pass


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return type(one) is type(two) and bool(one == two)


@pytest.fixture(scope="module")
def session() -> Any:
    return session_of(language_job())


@settings(max_examples=10)  # each is written to the disk
@given(value=NESTED)
def test_every_nested_state_comes_back_from_disk(
    session: Any, tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    session.setup.average = Remembers(value)
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1, *state_of(session))
    found = load_latest(folder)
    assert found is not None
    session.setup.average = Remembers()
    restore(session, found[0], found[1])
    assert same(value, session.setup.average.state)


def test_a_state_is_a_copy_and_tensors_that_share_memory_are_saved_twice(tmp_path: Path) -> None:
    session, shared = session_of(language_job()), torch.zeros(3)
    session.setup.average = Remembers([shared, shared])
    tensors, meta = state_of(session)
    shared += 1
    save(tmp_path, 1, tensors, meta)
    restore(session, tensors, meta)
    assert [t.tolist() for t in session.setup.average.state] == [[0.0] * 3] * 2


def test_an_object_in_two_fields_is_saved_once_and_a_factory_is_none() -> None:
    session = session_of(language_job())  # its loss is a class that has the functions too
    session.setup.average = session.setup.communication = Remembers(1)  # type: ignore[assignment]
    assert list(state_of(session)[1]["slots"]) == ["communication"]


def test_a_slot_that_is_filled_in_another_way_is_refused_and_nothing_is_changed() -> None:
    first, second = session_of(language_job()), session_of(language_job())
    first.setup.average, second.setup.average = Remembers(1), RemembersOtherwise(2)
    first.progress.step = 7
    with pytest.raises(InputError, match="the state of Remembers for average and the plan has Rem"):
        restore(second, *state_of(first))
    assert second.setup.average.state == 2
    assert second.progress.step == 0


@pytest.mark.parametrize(
    ("technique", "sentence"),
    [
        (Muon(), "muon was off and is on"),
        (FusedAdamW(), "optimizer is FusedAdamW"),
        (BF16MasterWeights(), "precision keeps [1-9]"),
    ],
    ids=str,
)
def test_another_optimizer_or_format_of_weights_is_refused_and_nothing_is_changed(
    technique: Technique, sentence: str
) -> None:
    first, second = session_of(language_job()), session_of(language_job(), technique)
    before = [p.clone() for p in second.loss_module.parameters()]
    with torch.no_grad():
        next(first.loss_module.parameters()).add_(1)
    with pytest.raises(InputError, match=sentence):
        restore(second, *state_of(first))
    after = second.loss_module.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_slot_that_the_state_says_nothing_of_begins_afresh() -> None:
    first, second = session_of(language_job()), session_of(language_job())
    second.setup.average = Remembers(2)
    tensors, meta = state_of(first)
    restore(second, tensors, meta)
    del meta["slots"]  # written before slots were saved
    restore(second, tensors, meta)
    assert second.setup.average.state == 2


def test_what_a_checkpoint_can_not_hold_is_named_with_its_place() -> None:
    session = session_of(language_job())
    session.setup.average = Remembers({"when": {1, 2}})
    with pytest.raises(TypeError, match="the state at slot/average/held/when is a set"):
        state_of(session)


def test_the_random_state_of_numpy_comes_back_too() -> None:
    saved = state_of(session_of(language_job()))
    following = np.random.rand(3).tolist()
    np.random.seed(0)
    restore(session_of(language_job()), *saved)
    assert np.random.rand(3).tolist() == following


@pytest.mark.parametrize(
    ("technique", "change", "sentence"),
    [
        (None, lambda moment: moment.t().contiguous(), r"has exp_avg of shape \[\d+, \d+\], and"),
        (None, lambda moment: moment[:1], r"has exp_avg of shape \[1, \d+\], and the weight has"),
        (Muon(), lambda moment: moment.t().contiguous(), r"of shape \[\d+, \d+\], and the weight"),
    ],
    ids=["transposed", "one row", "momentum"],
)
def test_an_optimizer_state_of_another_shape_is_refused_and_nothing_is_changed(
    technique: Technique | None, change: Callable[[torch.Tensor], torch.Tensor], sentence: str
) -> None:
    techniques = [technique] if technique else []
    first, second = (session_of(language_job(steps=1), *techniques) for _ in range(2))
    run(first)
    tensors, meta = state_of(first)
    name = next(
        n
        for n, t in tensors.items()
        if n.endswith(("/exp_avg", "/momentum")) and t.ndim == 2 and t.shape[0] != t.shape[1]
    )
    before = [p.clone() for p in second.loss_module.parameters()]
    with pytest.raises(InputError, match=sentence):
        restore(second, {**tensors, name: change(tensors[name])}, meta)
    after = second.loss_module.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert second.progress.step == 0
    restore(second, tensors, meta)
    assert second.progress.step == 1


class Own(fused_adamw.FusedAdamW):
    """An optimizer of a user, who changes nothing of the state."""


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, fused_adamw.FusedAdamW, Own])
def test_a_moment_that_one_weight_alone_lacks_is_refused(optimizer: Any) -> None:
    session = session_of(language_job(steps=1, optimizer=optimizer))
    run(session)
    tensors, meta = state_of(session)
    first, second = session.weight_names[:2]
    del tensors[f"optimizer/{second}/exp_avg_sq"]
    with pytest.raises(InputError, match=f"{second} has exp_avg, step, and that of {first} has"):
        restore(session, tensors, meta)


@pytest.mark.parametrize("name", ["optimizer/999/exp_avg", "optimizer/x/exp_avg"])
def test_an_optimizer_state_of_no_weight_is_refused(name: str) -> None:
    session = session_of(language_job(steps=1))
    run(session)
    tensors, meta = state_of(session)
    with pytest.raises(InputError, match="checkpoint is damaged"):
        restore(session, {**tensors, name: torch.zeros(2)}, meta)


def changes_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors of other kinds and shapes that a forged file may hold in the place of one."""
    other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
    if tensor.ndim:  # a count of steps is the same in any precision
        yield tensor.to(other)
    yield tensor.to(torch.bool)
    yield tensor.to(torch.complex64)
    yield torch.stack([tensor, tensor])
    yield tensor.flatten()[:0]


@pytest.mark.parametrize("techniques", [[], [BF16MasterWeights()], [Muon()]], ids=str)
def test_a_tensor_of_another_kind_or_shape_is_refused_or_comes_back_the_same(
    techniques: list[Technique],
) -> None:
    first, second = (session_of(language_job(steps=1), *techniques) for _ in range(2))
    run(first)
    tensors, meta = state_of(first)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in tensors:
        # A weight without any state may be one that no step has moved.
        parts = [{n: t for n, t in tensors.items() if n != name}] * (not name.endswith("/momentum"))
        parts += [{**tensors, name: changed} for changed in changes_of(tensors[name])]
        for part in parts:
            with contextlib.suppress(InputError):
                restore(second, part, meta)
                again, _ = state_of(second)
                assert same(dict(sorted(again.items())), dict(sorted(tensors.items()))), name


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
FOREIGN = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value; of a list of numbers only the first."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else [*enumerate(value)][:1]:
            yield from places(inner, (*path, key))


@pytest.fixture(scope="module")
def saved(session: Any) -> tuple[dict[str, torch.Tensor], str]:
    session.setup.average = Remembers()
    tensors, meta = state_of(session)
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(meta)


@given(data=st.data(), value=FOREIGN)
def test_whatever_a_checkpoint_says_beside_its_tensors_is_used_or_refused(
    session: Any, saved: tuple[dict[str, torch.Tensor], str], data: Any, value: Any
) -> None:
    tensors, meta = saved[0], json.loads(saved[1])
    *path, last = data.draw(st.sampled_from([*places(meta)]))
    functools.reduce(lambda part, key: part[key], path, meta)[last] = value
    with contextlib.suppress(InputError):
        restore(session, tensors, meta)
