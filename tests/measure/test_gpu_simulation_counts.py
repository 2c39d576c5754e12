"""Counts of a simulated step that need no trace."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.measure.gpu_simulation.step import PEAK, extrapolated
from hasten.measure.gpu_simulation.tracer import Key, _of_width


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
