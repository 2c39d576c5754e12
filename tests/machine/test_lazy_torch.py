"""Commands without a model don't import torch's compiler; its marks are set all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hasten.machine.lazy_torch import constant_in_graphs, not_compiled

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")


@pytest.mark.cold
def test_a_training_is_imported_without_torchs_compiler() -> None:
    program = f"import hasten.training.run, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_graph_has_the_answer_of_a_marked_function() -> None:
    def marked() -> int:
        return len(open.__name__)

    def plain() -> int:
        return 4

    assert vars(constant_in_graphs(marked)) == vars(torch.compiler.assume_constant_result(plain))


def test_a_compiled_function_runs_what_is_not_compiled_as_it_is() -> None:
    seen: list[bool] = []

    @not_compiled
    def outside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def whole(x: torch.Tensor) -> torch.Tensor:
        return outside(x * 2) * 3

    compiled = torch.compile(whole, backend="eager")
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), (x * 2 + 1) * 3)
    assert seen == [False]
