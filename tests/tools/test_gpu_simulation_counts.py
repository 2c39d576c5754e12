"""The simulated GPU without a trace: counts, and machines and devices that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_simulation import simulated_device
from gpu_simulation.__main__ import main
from gpu_simulation.step import PEAK, extrapolated
from gpu_simulation.tracer import Key, _of_width
from hasten.errors import InputError
from simulated_recipes import toy


@given(layers=st.integers(1, 40), passes=st.integers(1, 20))
def test_a_step_of_many_layers_and_passes_follows_from_few(layers: int, passes: int) -> None:
    """Sums of gradients exist from the third pass on, as float32 masters have them."""

    def counts(layers: int, passes: int) -> dict[Key, float]:
        sums = 4 if passes > 2 else 2
        moved = ("bytes", "forward", "mm")
        return {PEAK: 100 + layers * (10 + sums), moved: 7.0 + 3 * layers * passes}

    assert extrapolated(counts, layers, passes) == counts(layers, passes)


def test_attention_s_output_is_as_wide_as_the_values() -> None:
    """The fake of a kernel for heads of one width gives the query's."""
    assert _of_width(torch.empty(1, 2, 3, 192), 128).shape == (1, 2, 3, 128)


def refusal(recipe: Path, device: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints on such a device, as its last line."""
    with pytest.raises(SystemExit) as ended:
        main([str(recipe), "--device", device])
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(toy(tmp_path / "model").to_yaml())
    return path


@pytest.mark.parametrize(
    ("device", "part"),
    [("h10", "take one of h100"), ("mi300x", "by simulation there are a100-40gb")],
)
def test_a_device_without_figures_is_refused(
    recipe: Path, device: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refusal(recipe, device, capsys)


@pytest.mark.cold
def test_a_machine_without_a_compiler_says_so(
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # without a guard that was compiled before
    assert "a step can't be simulated: no C++ compiler was found (c++" in refusal(
        recipe, "h100", capsys
    )


def test_a_torch_that_has_a_driver_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        simulated_device.runpy, "run_path", lambda path: {"cuda": "13.0", "hip": None}
    )
    with pytest.raises(InputError, match="with the CPU build of torch, and this is a build for"):
        simulated_device._check_build()
