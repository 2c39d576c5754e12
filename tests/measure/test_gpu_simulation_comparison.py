"""A training's step beside paper: what is counted is true, and counting changes no bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hasten.core.plan import Plan
from hasten.core.session import Session
from hasten.core.step import training
from hasten.core.timing import HostClock
from hasten.machine import host
from hasten.machine.environment import World
from hasten.measure.gpu_simulation import comparison
from hasten.measure.gpu_simulation.comparison import (
    OperatorCounter,
    SimulationComparison,
    comparison_of,
    line,
)
from hasten.measure.gpu_simulation.roofline import ATTENTION, simulated_device
from hasten.measure.gpu_simulation.step import PEAK, extrapolated
from hasten.measure.gpu_simulation.tracer import Key, _of_width
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from tiny import job_context, language_job, session_of

DEVICE = simulated_device("h100")
STEPS = 6
# Its seconds are FLOPs of products: one a second; attention and memory take no time.
RATES = {**dict.fromkeys(DEVICE.rates, 1.0), ATTENTION: math.inf}
FLOPS = replace(DEVICE, rates=RATES, memory_rate=math.inf)


def session() -> Session:
    plan = (
        Packed(),
        DocumentAttention(),
        ActivationCheckpointing(),
        GradientAccumulation(micro_batch_size=2),
    )
    found = session_of(language_job(steps=STEPS), *plan)
    found.setup.clock = HostClock()
    return found


def weights(found: Session) -> list[Tensor]:
    return [p.detach().clone() for p in found.model.parameters()]


def run(found: Session, watch: SimulationComparison | None, steps: int = STEPS) -> None:
    running: Iterator[Any] = training(found)
    for _ in range(steps):
        metrics = next(running)
        if watch is not None:
            watch.note(metrics)


def test_counting_changes_no_bit_and_tells_one_line() -> None:
    told: list[str] = []
    plain, counted = session(), session()
    run(plain, None)
    clock = counted.setup.clock
    run(counted, SimulationComparison(counted, DEVICE, "a GPU", told.append))
    assert all(map(torch.equal, weights(plain), weights(counted)))
    assert counted.setup.clock is clock
    assert len(told) == 1
    assert " on a GPU, and " in told[0]


def test_the_seconds_are_those_of_the_steps_operators() -> None:
    """Beside torch's own counter of FLOPs, over a step with recomputation and several passes."""
    found = session()
    running = training(found)
    next(running)
    counter = OperatorCounter(FLOPS)
    clock: Any = comparison.MarkedClock(counter.mark, found.setup.clock)
    found.setup.clock = clock
    with FlopCounterMode(display=False) as truth, counter:
        next(running)
    counts = truth.get_flop_counts()["Global"]
    products = sum(n for name, n in counts.items() if "attention" not in str(name))
    assert sum(counter.seconds.values()) == pytest.approx(products, rel=0.001)
    assert counter.seconds["backward"] > 2 * counter.seconds["forward"]  # it recomputes
    assert set(counter.seconds) >= {"forward", "backward", "optimizer"}


def test_an_evaluation_before_the_counted_step_is_no_part_of_it() -> None:
    lines: list[list[str]] = [[], []]
    side = torch.randn(256, 256)
    for told, evaluates in zip(lines, (False, True), strict=True):
        found = session()
        watch = SimulationComparison(found, FLOPS, "a GPU", told.append)
        for step, metrics in enumerate(training(found), start=1):
            watch.note(metrics)
            if evaluates and step == comparison.COUNTED_STEP - 1:
                _ = side @ side
                watch.between_steps()
    seconds = [told[0].partition(", and ")[2].partition(" ms")[0] for told in lines]
    assert seconds[0] == seconds[1]


def test_a_training_that_ends_in_the_counted_step_leaves_nothing_behind() -> None:
    found = session()
    clock = found.setup.clock
    watch = SimulationComparison(found, DEVICE, "a GPU", pytest.fail)
    run(found, watch, comparison.COUNTED_STEP - 1)
    assert found.setup.clock is not clock
    watch.close()
    watch.close()
    assert found.setup.clock is clock
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_operator_that_cannot_be_counted_ends_the_counting_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*given: Any) -> Any:
        raise KeyError("an operator that nobody thought of")

    monkeypatch.setattr(comparison, "cost", wrong)
    found = session()
    run(found, SimulationComparison(found, DEVICE, "a GPU", pytest.fail))
    assert found.progress.step == STEPS


def test_far_from_paper_the_farthest_part_is_named() -> None:
    measured = {"forward": 0.2, "backward": 0.4, "optimizer": 0.3, "data": 0.1}
    near = {"forward": 0.1, "backward": 0.3, "optimizer": 0.01}
    assert line(measured, near, "NVIDIA H100") == (
        "a step takes 1,000 ms on NVIDIA H100, and 410 ms at least by simulation: 41% of the speed "
        "that "
        "the GPU allows"
    )
    far = line(measured, {**near, "backward": 0.2}, "NVIDIA H100")
    assert far.endswith(
        "31% of the speed that the GPU allows; farthest is optimizer with 3%: see `hasten profile`"
    )


@pytest.mark.parametrize(
    ("name", "ranks", "plan", "there"),
    [
        ("NVIDIA H100 80GB HBM3", 1, (), True),
        ("NVIDIA A100-SXM4-80GB", 1, (), True),
        ("NVIDIA H100 80GB HBM3", 2, (), False),
        ("NVIDIA H100 80GB HBM3", 1, (Compiled(),), False),
        ("Someone's GPU", 1, (), False),
    ],
)
def test_one_known_gpu_and_eager_code_are_compared(
    name: str, ranks: int, plan: tuple[Any, ...], there: bool
) -> None:
    found = session()
    found.setup.plan = Plan(plan)
    gpu = host.Accelerator(name, 80 * 2**30, "9.0")
    context = job_context(language_job())
    context = replace(context, device="cuda:0", world=World(size=ranks))
    context = replace(context, hardware=replace(context.hardware, accelerators=(gpu,)))
    assert (comparison_of(found, context, print) is not None) == there
    assert comparison_of(found, replace(context, device="cpu"), print) is None


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
