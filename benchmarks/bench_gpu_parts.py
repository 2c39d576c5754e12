"""Parts of a step on a GPU: hasten's kernels, and what runs where they are refused.

    python benchmarks/bench_gpu_parts.py [attention|loss|sum|float8|host]

Each line has the milliseconds of a part by each way, medians over rounds in turns; of attention,
forward and back. ``host`` has the microseconds of a call on small tensors, without waiting.
Without a GPU only torch's ways run, on the processor: that is for ``--smoke``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from smoke import arguments
from torch import Tensor
from turns import in_turns

from hasten.machine import host
from hasten.parts.data.collate import IGNORED
from hasten.parts.kernels import registry, rowwise
from hasten.parts.nn import attention, fused_functions, fused_gpu, losses, quantised_gpu
from hasten.parts.nn.quantised import Rounding

HEADS = ((32, 8, 128, 128), (16, 16, 192, 128))  # query, key, width, width of the values
ROWS = ((4096,) * 4, (1024,) * 16, (700, 1300, 1100, 900) * 4 + (384,))
LOGITS = (4185, 128256)
WEIGHT = (14336, 4096)
MATRICES = ((16384, 4096), (16384, 14336))
CALLS = 200
Way = Callable[[], object]
DEVICE = host.default_device()
FORMAT = torch.bfloat16 if DEVICE != "cpu" else torch.float32


def wait() -> None:
    if DEVICE != "cpu":
        torch.accelerator.synchronize()


def milliseconds(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """The median of each way, in turns; the first round is for compilers."""

    def once(act: Way) -> float:
        wait()
        began = time.perf_counter()
        act()
        wait()
        return 1e3 * (time.perf_counter() - began)

    found = in_turns({name: partial(once, act) for name, act in ways.items()}, rounds)
    return {name: statistics.median(times) for name, times in found.items()}


def show(part: str, ways: dict[str, Way], rounds: int) -> None:
    times = milliseconds(ways, rounds)
    print(f"| {part} | " + ", ".join(f"{name} {ms:.3g}" for name, ms in times.items()) + " |")


@contextmanager
def refused(name: str) -> Iterator[None]:
    """A kernel is refused by name inside, so that its replacement runs."""
    registry.refuse(name, "for a comparison")
    try:
        yield
    finally:
        registry.allow_all()


def both_ways(name: str, act: Way) -> dict[str, Way]:
    def plain() -> object:
        with refused(name):
            return act()

    return {"torch": plain, "hasten": act} if DEVICE != "cpu" else {"torch": plain}


def draw(*shape: int, dtype: torch.dtype = FORMAT) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def bench_attention(rounds: int) -> None:
    for heads, key_heads, width, value in HEADS:
        for lengths in ROWS:
            tokens = sum(lengths)
            shapes = ((heads, width), (key_heads, width), (key_heads, value))
            q, k, v = (draw(1, h, tokens, w).requires_grad_() for h, w in shapes)
            grad = draw(1, tokens, heads, value)

            def trained(
                way: Callable[..., Tensor],
                tensors: tuple[Tensor, Tensor, Tensor] = (q, k, v),
                grad: Tensor = grad,
            ) -> Way:
                return lambda: torch.autograd.grad(way(tensors), tensors, grad)

            boundaries = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)

            def one_kernel(t: tuple[Tensor, Tensor, Tensor], b: Tensor = boundaries) -> Tensor:
                kernel = attention._varlen()
                assert kernel is not None
                place = b, max(lengths)  # noqa: B023
                return attention._one_kernel(kernel, t, (place, place), None)

            ways = {
                "one by one": trained(lambda t, of=lengths: attention._one_by_one(t, of, None, 0.0))
            }
            if DEVICE != "cpu":
                ways["variable lengths"] = trained(one_kernel)
                ways["as hasten chooses"] = trained(
                    lambda t, of=lengths, b=boundaries: attention._documents(t, of, b, None, 0.0)
                )
            mean = tokens // len(lengths)
            part = f"attention, {len(lengths)} documents of {mean} tokens, {heads} heads of {width}"
            show(part, ways, rounds)


def bench_loss(rounds: int) -> None:
    rows, vocabulary = LOGITS
    logits, labels = draw(rows, vocabulary), torch.arange(rows, device=DEVICE) % vocabulary
    labels[::3] = IGNORED

    def act() -> object:
        return losses.losses_and_gradients(logits, labels, losses.PLAIN)

    show(
        f"loss of {rows:,} x {vocabulary:,} logits", both_ways(fused_gpu.CROSS_ENTROPY, act), rounds
    )


def bench_sum(rounds: int) -> None:
    total, more = draw(*WEIGHT, dtype=torch.float32), draw(*WEIGHT)
    ways: dict[str, Way] = {"torch": lambda: total.add_(more)}
    if rowwise.sum_fits(total, more):
        ways["hasten"] = lambda: rowwise.float32_sum(total, more)
    show(f"float32 sum of {WEIGHT[0]:,} x {WEIGHT[1]:,} gradients", ways, rounds)


def bench_float8(rounds: int) -> None:
    rounding = Rounding("rowwise", emulate=DEVICE == "cpu")
    for rows, n in MATRICES:
        x = draw(rows, n)
        for side in ("by_rows", "by_columns", "by_both"):
            ways = both_ways(quantised_gpu.FLOAT8, partial(getattr(rounding, side), x))
            show(f"float8 {side.replace('_', ' ')}, {rows:,} x {n:,}", ways, rounds)


def bench_host(rounds: int) -> None:
    x, weight = draw(64, 256), draw(256)
    table = draw(64, 32, dtype=torch.float32)
    ways: dict[str, Way] = {"addition": lambda: x + x}
    if DEVICE != "cpu":
        ways |= {
            "norm": lambda: fused_gpu.rms_norm(x, weight, 1e-5),
            "torch's norm": lambda: fused_functions.rms_norm(x, weight, 1e-5),
            "gated SiLU": lambda: fused_gpu.swiglu(x, x),
            "rotation": lambda: fused_gpu.rotate(
                x.view(64, 4, 64), table, table, False, False, False
            ),
        }
    for name, act in ways.items():
        times = []
        for number in range(rounds + 1):
            wait()
            began = time.perf_counter()
            for _ in range(CALLS):
                act()
            if number:
                times.append(1e6 * (time.perf_counter() - began) / CALLS)
        print(f"| host, a call of {name} | {statistics.median(times):.1f} us |")


PARTS: dict[str, Callable[[int], None]] = {
    "attention": bench_attention,
    "loss": bench_loss,
    "sum": bench_sum,
    "float8": bench_float8,
    "host": bench_host,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="all of them if left out")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = arguments(
        parser,
        rounds=1,
        HEADS=((2, 1, 16, 16),),
        ROWS=((7, 9),),
        LOGITS=(9, 50),
        WEIGHT=(8, 6),
        MATRICES=((16, 32),),
        CALLS=3,
    )
    print(f"{host.hardware().short}, {DEVICE}, torch {torch.__version__}\n")
    print("| part | ms |\n|---|---|")
    for name, bench in PARTS.items():
        if chosen.part in (None, name):
            bench(chosen.rounds)


if __name__ == "__main__":
    main()
