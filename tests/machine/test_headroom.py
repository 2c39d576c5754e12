"""The size that follows the memory, against a simulated allocator with examples of random
length.
"""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covering import covering
from hasten.machine.host import usable_memory
from hasten.machine.memory import Headroom, host_meter, is_out_of_memory
from hasten.parts.data import collate

LIMIT, THRESHOLD, LONGEST = 1000.0, 0.8, 2048


class Allocator:
    """Memory in proportion to the slots of a step's largest micro-batch, above a fixed part."""

    def __init__(self, fixed: float, fits: int) -> None:
        self.fixed, self.per_slot = fixed, (LIMIT * THRESHOLD - fixed) / fits
        self.used = 0.0

    def run(self, slots: int) -> None:
        self.used = self.fixed + self.per_slot * slots
        if self.used > LIMIT:
            raise MemoryError

    def read(self) -> tuple[float, float]:
        return self.used, LIMIT


def train(room: Headroom, allocator: Allocator, steps: int, seed: int) -> tuple[list[int], int]:
    """The sizes after each step, and how many steps were redone."""
    draw, sizes, redone = np.random.default_rng(seed), [], 0
    for _ in range(steps):
        lengths = draw.integers(LONGEST // 4, LONGEST + 1, 256).tolist()
        while True:
            pieces = collate.by_positions(lengths, lengths, room.size)
            load = max(max(p) * len(p) for p in pieces)
            try:
                allocator.run(load)
                break
            except MemoryError:
                room.on_out_of_memory(load)
                redone += 1
        room.observe(load)
        sizes.append(room.size)
    return sizes, redone


@pytest.mark.parametrize(
    ("fixed", "start", "seed"), covering([100.0, 500.0], [4, 8, 12, 16, 30], range(3), rounds=2)
)
def test_it_settles_near_the_largest_that_fits_and_stays_without_a_failure(
    fixed: float, start: int, seed: int
) -> None:
    fits = 16 * LONGEST
    room = Headroom(start * LONGEST, 512 * LONGEST, 1.2, THRESHOLD, lambda: (0, 1))
    allocator = Allocator(fixed, fits)
    room.meter = allocator.read
    sizes, redone = train(room, allocator, 1000, seed)
    assert all(0.9 * fits <= size <= 1.03 * fits for size in sizes[20:])
    assert redone == 0 if start <= 16 else redone <= 1
    for first in range(20, 1000, 100):
        window = sizes[first - 1 : first + 100]
        assert sum(a != b for a, b in itertools.pairwise(window)) <= 3


@given(st.integers(1, 64), st.integers(1, 600), st.floats(0, 700))
def test_wherever_it_starts_it_never_swings(start: int, fits: int, fixed: float) -> None:
    allocator = Allocator(fixed, fits)
    room = Headroom(start, 512, 1.2, THRESHOLD, allocator.read)
    sizes = []
    for _ in range(150):
        while True:
            try:
                allocator.run(room.size)
                break
            except MemoryError:
                room.on_out_of_memory()
                if room.size == 1:
                    return  # one example is too much
        room.observe(room.size)
        sizes.append(room.size)
    assert len(set(sizes[80:])) == 1
    assert sizes[-1] == 1 or sizes[-1] <= fits
    assert sizes[-1] >= min(fits, 512) * 0.9 - 1


def test_a_size_that_was_too_large_is_not_tried_again() -> None:
    used = 100.0
    room = Headroom(100, 1000, 1.2, THRESHOLD, lambda: (used, LIMIT))
    room.on_out_of_memory()
    assert room.size == 50
    tried = []
    for _ in range(50):
        room.observe(room.size)
        tried.append(room.size)
    assert max(tried) < 100
    assert tried[-1] > 95 / 1.05


def test_a_size_of_smaller_batches_is_not_good_once_such_a_load_is_too_large() -> None:
    used = 100.0
    room = Headroom(120, 1000, 1.2, THRESHOLD, lambda: (used, LIMIT))
    room.observe(96)
    assert room.good == 120
    used = 900.0
    room.observe(110)
    assert room.size < 110


def test_a_batch_that_was_not_full_says_nothing() -> None:
    room = Headroom(100, 1000, 1.2, THRESHOLD, lambda: (1, LIMIT))
    room.observe(70)
    assert room.size == 100
    room.observe(100)
    assert room.size == 120


def test_its_memory_survives_a_checkpoint() -> None:
    room = Headroom(100, 1000, 1.2, THRESHOLD, lambda: (1, LIMIT))
    room.on_out_of_memory()
    room.observe(room.size)
    again = Headroom(7, 1000, 1.2, THRESHOLD, room.meter)
    again.load_state_dict(room.state_dict())
    for _ in range(9):
        room.observe(room.size)
        again.observe(again.size)
        assert again.state_dict() == room.state_dict()


@pytest.mark.parametrize(
    ("settings_", "words"),
    [((0, 9, 1.2, 0.8), "starts at 0"), ((2, 9, 1.0, 0.8), "growth"), ((2, 9, 2, 1.0), "thresh")],
)
def test_settings_that_can_not_work_are_refused(settings_: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Headroom(*settings_, lambda: (0, 1))  # type: ignore[arg-type]


def test_the_host_meter_sees_memory_come_and_says_less_when_it_is_gone() -> None:
    read = host_meter()
    read()
    before, limit = read()
    size = 64 * 2**20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        during, _ = read()
    read()  # its peak may still be a page above the last one: it was held when this reading began
    after, _ = read()  # the system has it back, whatever an allocator would keep
    assert during - before > size / 2
    assert during - after > size / 2
    assert limit == usable_memory() > before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("HIP out of memory. Tried to allocate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes can't be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
