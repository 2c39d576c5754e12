"""The measurement of bf16 against float32: with seconds that are given, and once in earnest."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hasten.parts.nn import bf16_gain as module
from hasten.parts.nn.bf16_gain import Gain, bf16_gain, measure, median_interval


class Machine:
    """A processor on which bf16 is so many times as fast, and which compiles for every length."""

    def __init__(self, speed: float, compiling: float = 0.0, noise: float = 0.02) -> None:
        self.speed, self.compiling, self.noise = speed, compiling, noise
        self.draw = random.Random(1)
        self.known: set[tuple[torch.dtype, int]] = set()
        self.turns: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def turn(self, dtype: torch.dtype, lengths: Sequence[int]) -> float:
        self.turns.append((dtype, tuple(lengths)))
        new = {(dtype, length) for length in lengths} - self.known
        self.known |= new
        half = dtype == torch.bfloat16
        work = sum(lengths) / (self.speed if half else 1.0)
        busy = 5.0 if self.draw.random() < 0.1 else 1.0  # others are at work now and then
        return (
            busy * (work + half * self.compiling * len(new)) * (1 + self.noise * self.draw.random())
        )


def clock(step: float = 0.1) -> float:
    return next(TIME) * step


TIME = itertools.count()


def test_a_faster_format_is_found_on_a_machine_that_others_disturb() -> None:
    found = measure(Machine(1.7).turn, clock)
    assert found.sure
    assert found.low < 1.7 < found.high


def test_a_format_that_compiles_for_every_new_length_is_found_slower_than_its_products() -> None:
    """Products alone say 1.7: with the same flags one processor gained and another lost."""
    found = measure(Machine(1.7, compiling=200.0).turn, clock)
    assert found.high < 1
    assert not found.sure


def test_no_length_is_met_twice_and_both_formats_go_first_in_turn() -> None:
    machine = Machine(1.0)
    measure(machine.turn, lambda: 0.0)  # time for all rounds
    small, rounds = machine.turns[:4], machine.turns[4:]
    assert len(rounds) == 2 * module.MOST
    half = [length for dtype, lengths in rounds if dtype == torch.bfloat16 for length in lengths]
    totals = [sum(lengths) for dtype, lengths in rounds if dtype == torch.bfloat16]
    assert len(set(half)) == len(half)
    assert len(set(totals)) == len(totals)
    assert {length for _, lengths in small for length in lengths}.isdisjoint(half)
    first = [dtype for dtype, _ in rounds[::2]]
    assert first[:4] == [torch.float32, torch.bfloat16] * 2


def test_what_the_rounds_leave_open_is_not_sure() -> None:
    found = measure(Machine(1.0, noise=0.5).turn, clock)
    assert found.low < 1 < found.high
    assert not found.sure
    assert "leaves it open" in str(found)


def test_a_processor_without_bf16_products_is_known_after_the_small_pass() -> None:
    machine = Machine(0.01)
    found = measure(machine.turn, clock)
    assert found.ratio < 0.2
    assert not found.sure
    assert len(machine.turns) == 4


def test_the_fewest_rounds_are_done_however_late_it_is() -> None:
    assert measure(Machine(2.0).turn, lambda: clock(1e6)).rounds == module.FEWEST


def test_the_interval_of_the_median_holds_it_as_often_as_it_says() -> None:
    draw = random.Random(2)
    for count in (6, 9, 25):
        held = 0
        for _ in range(2000):
            low, high = median_interval([draw.lognormvariate(0.0, 0.3) for _ in range(count)])
            held += low <= 1.0 <= high
        assert held / 2000 > 0.94


def test_a_result_is_measured_once_and_kept_for_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Gain] = []

    def fake() -> Gain:
        measured.append(Gain(1.5 + len(measured), 1.2, 9.0, 6))
        return measured[-1]

    monkeypatch.setattr(module, "measure", fake)

    def asked(cpu: str, folder: Path = tmp_path / "kept") -> float:
        module._kept.cache_clear()  # as in a process of its own
        return bf16_gain(cpu, folder).ratio

    assert [asked("one"), asked("one"), asked("another"), asked("one")] == [1.5, 1.5, 2.5, 1.5]
    (path, _) = sorted((tmp_path / "kept").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert json.loads(path.read_text())["cpu"] == "one"
    for nonsense in ("", "[]", '{"ratio": 1}', json.dumps(vars(Gain(-1.0, 2.0, 0.0, 6)))):
        path.write_text(nonsense)
        assert asked("one") == 1.5 + len(measured) - 1
    (tmp_path / "file").write_text("")
    assert asked("one", tmp_path / "file" / "within") > 1  # can't be kept, measured all the same
    module._kept.cache_clear()


def test_a_real_pass_runs_in_both_formats() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert module._turn(dtype, (5, 9)) > 0
