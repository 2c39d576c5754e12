"""bf16 is decided on by a measurement, which is kept, and an undecided one decides against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.parts import bf16_gain as module
from hasten.parts.bf16_gain import bf16_gain, bf16_pays, words


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    module._kept.cache_clear()


@pytest.mark.parametrize(
    ("ratios", "pays"),
    [
        ([1.7] * 9, True),
        ([0.6] * 9, False),
        ([1.5] * 7 + [0.9] * 2, True),  # two of nine rounds may be disturbed
        ([1.5] * 6 + [0.9] * 3, False),  # undecided
        ([1.01] * 9, False),  # too little
        ([0.1, 0.1, 0.1], False),
    ],
)
def test_a_clear_gain_alone_pays(ratios: list[float], pays: bool) -> None:
    assert bf16_pays(ratios) is pays


def test_words_have_the_median_and_the_middle_half() -> None:
    assert words([1.0, 1.1, 1.2, 1.3, 9.0]) == "1.20 times as fast [1.10, 1.30]"


def test_each_round_has_both_formats_at_a_length_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[tuple[object, int]] = []

    def turn(dtype: object, length: int) -> float:
        turns.append((dtype, length))
        return 2.0 if dtype == module.torch.float32 else 1.0

    monkeypatch.setattr(module, "_turn", turn)
    assert module.measure() == [2.0] * module.ROUNDS
    for dtype in (module.torch.float32, module.torch.bfloat16):
        lengths = [length for d, length in turns[1:] if d == dtype]
        assert len(set(lengths)) == len(lengths) == module.ROUNDS


def test_a_processor_without_such_products_is_measured_in_a_few_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr(module, "_turn", lambda dtype, length: 1.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    assert len(module.measure()) == module.FEWEST_ROUNDS


def test_a_measurement_is_kept_for_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, count = tmp_path / "cache" / "gain.json", iter([[1.5, 1.4], [0.5, 0.6]])
    monkeypatch.setattr(module, "measure", lambda: next(count))
    assert bf16_gain("one", file) == (1.4, 1.5)
    assert bf16_gain("other", file) == (0.5, 0.6)
    module._kept.cache_clear()  # another process
    assert bf16_gain("one", file) == (1.4, 1.5)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', '{"x": ["a"]}'])
def test_a_file_that_is_no_record_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    file = tmp_path / "gain.json"
    file.write_text(content)
    monkeypatch.setattr(module, "measure", lambda: [1.2])
    assert bf16_gain("one", file) == (1.2,)
    assert list(json.loads(file.read_text()).values()) == [[1.2]]


def test_a_real_measurement_gives_sensible_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 1)
    (ratio,) = module.measure()
    assert 1e-3 < ratio < 1e3
