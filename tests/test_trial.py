"""What an arm's process tells beside its steps."""

from __future__ import annotations

import torch

from hasten.trial import compiled


def test_compiling_is_counted_and_timed() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    before, spent = compiled()
    fast = torch.compile(double, backend="eager", dynamic=False)
    fast(torch.ones(3))
    once, longer = compiled()
    assert once == before + 1
    assert longer > spent
    fast(torch.ones(3))
    assert compiled() == (once, longer)  # nothing new
    fast(torch.ones(5))
    assert compiled()[0] == once + 1  # another shape, compiled again
