"""The recipe's ceiling: which rate MFU refers to, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hasten.core import context as facts
from hasten.core.context import JobContext
from hasten.errors import InputError
from hasten.machine.benchmark import MachineRates, ProductRate
from hasten.machine.environment import World
from hasten.machine.host import Accelerator
from hasten.models.flops import model_flops
from hasten.recipe import peak_flops
from hasten.recipe.peak_flops import (
    ceiling_of,
    meter_of,
    mfu_words,
    read_rates,
    resolve_ceiling,
    write_rates,
)
from hasten.recipe.schema import Recipe
from tiny import tiny_model

HERE = facts.seen_at_start()
ON_CPU = replace(HERE, device="cpu")


def recipe(folder: Path, **changes: Any) -> Recipe:
    values = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    return Recipe(**{**values, "output": str(folder / "run"), **changes})


def on_gpu(name: str, size: int = 1) -> JobContext:
    hardware = replace(HERE.hardware, accelerators=(Accelerator(name, 80 * 10**9, "9.0"),))
    return replace(HERE, hardware=hardware, device="cuda:0", world=World(size=size))


def rates(**changes: Any) -> MachineRates:
    values: dict[str, Any] = {
        "device": "cpu",
        "device_name": HERE.hardware.cpu,
        "threads": 2,
        "torch": "2.13.0",
        "measured_at": "2026-11-21T03:00:00+00:00",
        "seconds": 2.0,
        "products": (
            ProductRate("bf16", 64, 32, 16, 3e12, 2e12, 5),
            ProductRate("fp32", 64, 64, 64, 1e12, 1e12, 5),
            ProductRate("fp8", 64, 64, 64, 9e12, 9e12, 5),
        ),
        "copies": (),
    }
    return MachineRates(**{**values, **changes})


def test_a_file_s_fastest_format_but_fp8_is_the_ceiling(tmp_path: Path) -> None:
    write_rates(rates(), tmp_path / "rates.json")
    wish = recipe(tmp_path, ceiling=str(tmp_path / "rates.json"))
    found = ceiling_of(wish, ON_CPU)
    assert found is not None
    assert found.rate == 3e12
    assert found.source == "3 TFLOP/s, measured: bf16 64x16 by 16x32, threads: 2, 2026-11-21"
    words = mfu_words(wish, ON_CPU)
    assert words is not None
    assert "Frozen weights: 4 FLOPs instead of 6" in words


def test_auto_is_the_datasheet_of_a_known_gpu_times_their_number(tmp_path: Path) -> None:
    model = tiny_model()
    meter = meter_of(recipe(tmp_path), on_gpu("NVIDIA H200", 8), model)
    assert meter.ceiling == 8 * 989e12
    assert meter.source.startswith("8 x 989 TFLOP/s, datasheet of H200: stas00")
    assert meter.per_token == model_flops(model).per_token


@pytest.mark.parametrize("context", [ON_CPU, on_gpu("NVIDIA H100 NVL")], ids=["cpu", "unknown gpu"])
def test_auto_without_a_known_device_counts_flops_and_no_mfu(
    tmp_path: Path, context: JobContext
) -> None:
    meter = meter_of(recipe(tmp_path), context, tiny_model())
    assert meter.per_token
    assert not meter.ceiling
    assert mfu_words(recipe(tmp_path), context) is None


def test_a_model_that_is_not_counted_has_no_meter(tmp_path: Path) -> None:
    meter = meter_of(recipe(tmp_path), on_gpu("NVIDIA H200"), nn.Linear(2, 2))
    assert meter == type(meter)()


def test_ranks_on_one_measured_processor_share_its_ceiling(tmp_path: Path) -> None:
    write_rates(rates(), tmp_path / "rates.json")
    wish = recipe(tmp_path, ceiling=str(tmp_path / "rates.json"), nproc=2)
    for size, expected in ((1, 3e12), (2, 3e12), (4, 0.0)):
        known = replace(ON_CPU, world=World(size=size))
        assert meter_of(wish, known, tiny_model()).ceiling == expected


def test_measure_is_done_once_per_folder_and_anew_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    given = [rates(), rates(device_name="another")]
    monkeypatch.setattr(peak_flops, "measure", lambda **asked: calls.append(asked) or given[0])
    wish, said = recipe(tmp_path, ceiling="measure"), list[str]()
    resolve_ceiling(wish, ON_CPU, said.append)
    resolve_ceiling(wish, ON_CPU, said.append)
    assert len(calls) == len(said) == 1
    assert calls[0]["seconds"] == 2.0
    found = ceiling_of(wish, ON_CPU)
    assert found is not None
    assert found.rate == 3e12
    write_rates(given[1], tmp_path / "run" / "data" / "ceiling.json")
    assert ceiling_of(wish, ON_CPU) is None
    resolve_ceiling(wish, ON_CPU)
    assert len(calls) == 2


def test_ranks_never_measure_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_flops, "measure", lambda **asked: pytest.fail("measured"))
    resolve_ceiling(recipe(tmp_path, ceiling="measure"), replace(ON_CPU, world=World(1, 1, 2)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "can't be used"),
        (b"\xff\xfe", "can't be used"),
        (b"[" * 100_000, "can't be used"),
        (b"[]", "holds a list, expected an object"),
        (json.dumps(rates(device_name="NVIDIA H200").to_dict()).encode(), "was measured on NVIDIA"),
        (json.dumps(rates(device="cuda").to_dict()).encode(), "was measured on"),
    ],
)
def test_a_file_that_can_t_be_used_is_one_sentence(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        resolve_ceiling(recipe(tmp_path, ceiling=str(path)), ON_CPU)
    assert str(caught.value).startswith("ceiling: ")
    assert "\n" not in str(caught.value)
    assert "hasten env --bench -o FILE" in str(caught.value)


def test_a_failed_write_leaves_the_earlier_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    write_rates(rates(), path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left on device; name another file"):
        write_rates(rates(threads=9), path)
    assert [p.name for p in tmp_path.iterdir()] == ["rates.json"]
    assert read_rates(path, ON_CPU).threads == 2
