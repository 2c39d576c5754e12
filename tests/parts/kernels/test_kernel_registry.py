"""Kernels are verified against float64 and timed in turns: planted variants, and all real ones."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.machine.gain import FEWEST, Gain, median_interval
from hasten.parts.kernels import registry, rowwise
from hasten.parts.kernels.registry import (
    DeviceFigures,
    KernelVariant,
    Operation,
    Sizes,
    figures_here,
    proofs_here,
    register,
    stored_figures,
    time_variants,
    verify,
)
from hasten.parts.nn import kernel_variants

LENGTHS = (50, 80, 120)


def inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(sizes.rows, generator=generator), sizes.lengths


DOUBLED = Operation(
    *("doubling", "byte", inputs, lambda x, lengths: (2 * x,)),
    *(lambda x, lengths: 8.0 * x.numel(), LENGTHS, 1e6),
)
Run = Callable[..., tuple[Tensor, ...]]


def variant(name: str, run: Run, dtype: torch.dtype = torch.float32, **more: Any) -> KernelVariant:
    return KernelVariant(
        DOUBLED, name, dtype, run, 1e-5 if dtype == torch.float32 else 0.02, **more
    )


RIGHT = variant("right", lambda x, lengths: (x + x,), by_hasten=False)


def one_wrong(value: float) -> Run:
    def run(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        found = 2 * x
        found[-1] = value
        return (found,)

    return run


def fails(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (variant("one number", one_wrong(0.5)), "the largest error against float64 is"),
        (variant("no number", one_wrong(math.nan)), "the largest error against float64 is inf"),
        (variant("a bit off", lambda x, n: (2.0001 * x,)), "and 1e-05 is allowed"),
        (variant("cut", lambda x, n: (2 * x[:-1],)), "the largest error against float64 is inf"),
        (variant("fails", fails), "it can't run here: no such instruction"),
    ],
    ids=lambda value: value.name if isinstance(value, KernelVariant) else "",
)
def test_a_variant_whose_result_is_wrong_says_so_and_is_not_timed(
    planted: KernelVariant, said: str
) -> None:
    proofs = verify([RIGHT, planted])
    assert proofs[RIGHT.key].fault == ""
    assert said in proofs[planted.key].fault
    assert "\n" not in proofs[planted.key].fault
    assert set(time_variants([RIGHT, planted], proofs)) == {RIGHT.key}


def test_rounding_of_the_format_is_no_error_and_a_variant_that_is_absent_no_fault() -> None:
    half = variant("half", lambda x, lengths: (x + x,), torch.bfloat16)
    absent = variant("absent", fails, why_not=lambda device: f"not on {device}")
    proofs = verify([half, absent])
    assert proofs[half.key].fault == proofs[absent.key].fault == ""
    assert proofs[absent.key].absent == "not on cpu"


class Machine:
    """A machine on which bf16 is so many times as fast, and which compiles for every new length."""

    def __init__(self, speed: float, compiling: float = 0.0, noise: float = 0.02) -> None:
        self.speed, self.compiling, self.noise = speed, compiling, noise
        self.draw = random.Random(1)
        self.known: set[tuple[str, int]] = set()
        self.turns: list[tuple[str, tuple[int, ...]]] = []
        self.variants = [
            variant(name, lambda x, lengths, name=name: self.run(name, x, lengths), dtype)
            for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16))
        ]

    def run(self, name: str, x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        self.turns.append((name, lengths))
        return (2 * x,)

    def seconds(self, act: Callable[[], Any]) -> float:
        act()
        name, lengths = self.turns[-1]
        new = {(name, length) for length in lengths} - self.known
        self.known |= new
        half = name == "bf16"
        work = sum(lengths) / (self.speed if half else 1.0)
        busy = 5.0 if self.draw.random() < 0.1 else 1.0  # others are at work now and then
        noise = 1 + self.noise * self.draw.random()
        return busy * noise * (work + half * self.compiling * len(new))

    def measured(self) -> Gain:
        found = time_variants(self.variants, verify(self.variants), "cpu", self.seconds)
        self.turns = self.turns[2:]  # the proofs
        one, two = (found[variant.key] for variant in self.variants)
        figures = DeviceFigures("a machine", times={"one": one, "two": two})
        gain = figures.gain("one", "two")
        assert gain is not None
        return gain


def test_a_faster_format_is_found_on_a_machine_that_others_disturb() -> None:
    found = Machine(1.7).measured()
    assert found.sure
    assert found.low < 1.7 < found.high


def test_a_format_that_compiles_for_every_new_length_is_found_slower_than_its_products() -> None:
    """Products alone say 1.7: with the same flags one processor gained and another lost."""
    found = Machine(1.7, compiling=60.0).measured()
    assert found.lost
    assert not found.sure


def test_no_length_is_met_twice_and_variants_go_first_in_turn() -> None:
    machine = Machine(1.0)
    machine.measured()
    small, rounds = machine.turns[:4], machine.turns[4:]
    assert len(rounds) == 2 * registry.MOST_ROUNDS
    half = [length for name, lengths in rounds if name == "bf16" for length in lengths]
    assert len(set(half)) == len(half)
    assert {length for _, lengths in small for length in lengths}.isdisjoint(half)
    assert [name for name, _ in rounds[::2]][:4] == ["float32", "bf16"] * 2


def test_what_the_rounds_leave_open_is_neither_sure_nor_lost() -> None:
    found = Machine(1.0, noise=0.5).measured()
    assert found.low < 1 < found.high
    assert not found.sure
    assert not found.lost


def test_a_processor_without_products_in_a_format_is_known_after_the_small_pass() -> None:
    machine = Machine(0.01)
    found = machine.measured()
    assert found.ratio == pytest.approx(0.01, rel=0.1)
    assert found.lost
    assert [name for name, _ in machine.turns].count("bf16") == 2


def test_a_slow_machine_gets_smaller_inputs_and_the_fewest_rounds() -> None:
    machine = Machine(1.0, noise=0.0)
    slow = replace(DOUBLED, seconds=1500.0)
    machine.variants = [
        KernelVariant(slow, w.name, w.dtype, w.run, w.bound) for w in machine.variants
    ]
    found = time_variants(machine.variants, verify(machine.variants), "cpu", machine.seconds)
    assert {len(times.seconds) for times in found.values()} == {FEWEST}
    assert max(machine.turns[6][1]) == pytest.approx(max(LENGTHS) / 2, abs=2)  # of the first round


def test_an_operation_that_runs_out_of_memory_is_told_of_and_the_others_are_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fits(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        if x.numel() > 100:
            raise torch.OutOfMemoryError("no memory for it\nand more")
        return (2 * x,)

    large = replace(DOUBLED, name="large", seconds=0.08)
    mine = [KernelVariant(large, "fits", torch.float32, fits, 1e-5), RIGHT]
    assert set(time_variants(mine, verify(mine))) == {RIGHT.key}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "large can't be timed on this machine: no memory for it"


def test_the_interval_of_the_median_holds_it_as_often_as_it_says() -> None:
    chance = random.Random(2)
    for count in (6, 9, 12):
        held = 0
        for _ in range(2000):
            low, high = median_interval([chance.lognormvariate(0.0, 0.3) for _ in range(count)])
            held += low <= 1.0 <= high
        assert held / 2000 > 0.94


def test_a_second_kernel_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="two kernels are called 'training pass: torch, float32'"):
        register(kernel_variants.PASS_PLAIN)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One registered way, and how often it was run."""
    runs: list[int] = []

    def run(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        runs.append(1)
        return (2 * x,)

    monkeypatch.setattr(registry, "_REGISTERED", {"one": variant("one", run)})
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(registry, "_MEMORY", {})
    registry._about.cache_clear()
    return runs


def test_figures_are_measured_once_and_kept_and_a_damaged_file_is_told_of(
    planted: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored_figures() is None
    found = figures_here()
    counted = len(planted)
    registry._MEMORY.clear()  # as in a process of its own
    assert figures_here() == stored_figures() == found
    assert proofs_here() == found.proofs
    assert len(planted) == counted
    assert not caplog.records
    (path,) = registry.FOLDER.glob("*.json")
    whole = json.loads(path.read_text())
    negative = {"doubling: one": {"seconds": [-1.0], "rate": 1.0}}
    for nonsense in ("", "[]", "{", '{"proofs": 1}', json.dumps({**whole, "times": negative})):
        path.write_text(nonsense)
        registry._MEMORY.clear()
        caplog.clear()
        counted = len(planted)
        with caplog.at_level(logging.WARNING):
            assert figures_here().proofs == found.proofs
        assert len(planted) > counted
        (said,) = [record.getMessage() for record in caplog.records]
        assert f"{path} can't be read" in said
        assert "the kernels are measured again" in said
        assert DeviceFigures.from_dict(json.loads(path.read_text())).proofs == found.proofs


def test_they_are_measured_again_when_asked_and_for_other_versions(
    planted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(act: Callable[[], object]) -> int:
        before = len(planted)
        act()
        return len(planted) - before

    assert counted(figures_here)
    assert not counted(figures_here)
    assert counted(lambda: figures_here(fresh=True))
    monkeypatch.setattr(registry.metadata, "version", lambda package: "another")
    registry._about.cache_clear()
    assert counted(figures_here)
    assert not counted(figures_here)
    registry._about.cache_clear()


def test_where_nothing_can_be_written_a_process_remembers_for_itself(
    planted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(registry, "FOLDER", tmp_path / "file" / "within")
    figures_here()
    counted = len(planted)
    figures_here()
    assert len(planted) == counted


def test_a_proof_is_the_same_in_any_state_of_torch_and_leaves_it_as_it_was() -> None:
    torch.set_num_threads(2)
    mine = [kernel_variants.PASS_FUSED]
    usual = verify(mine)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert verify(mine) == usual
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.empty(1).is_meta
    with torch.inference_mode():
        assert verify(mine) == usual
    assert torch.get_num_threads() == 2


def test_every_kernel_that_runs_here_is_right() -> None:
    proofs = verify(registry.variants())
    assert {key: proof.fault for key, proof in proofs.items() if proof.fault} == {}
    assert len(proofs) > 25


def test_a_planted_error_of_a_real_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = rowwise.swiglu

    def off(gate: Tensor, up: Tensor) -> Tensor:
        found: Tensor = usual(gate, up)
        found[-1, -1] += 0.1  # the last number of a row alone
        return found

    monkeypatch.setattr(rowwise, "swiglu", off)
    own = [w for w in registry.variants() if w.operation is kernel_variants.GATES]
    proofs = verify(own)
    wrong = [key for key, proof in proofs.items() if proof.fault]
    assert wrong == [w.key for w in own if w.by_hasten]
