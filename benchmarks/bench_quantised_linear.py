"""What a frozen layer costs in 8 or 4 bits: bytes, rounding error, and time of forward + backward.

    OMP_NUM_THREADS=1 python benchmarks/bench_quantised_linear.py

Layers take turns within each round; a row's time is the median over rounds of its ratio to the
frozen float32 layer of the same round. Float8 products, emulated, stand beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from smoke import arguments
from torch import Tensor, nn

from hasten.parts.nn.quantised import Float8Layers, QuantisedLinear


def layers(inside: int, outside: int) -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
    """Each layer with the bytes of its weight at rest; all begin from the same weight."""
    plain = nn.Linear(inside, outside, bias=False).requires_grad_(False)
    found: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "float32": (plain, plain.weight.nbytes)
    }
    for kind in ("int8", "nf4"):
        made = QuantisedLinear(plain, kind)
        found[kind] = (made, made.codes.nbytes + made.scale.nbytes)
    for recipe in ("rowwise", "blockwise"):
        copy = nn.Linear(inside, outside, bias=False).requires_grad_(False)
        copy.load_state_dict(plain.state_dict())
        Float8Layers(recipe, emulate=True).attach(nn.ModuleDict({"proj": copy}))
        found[f"float8 {recipe}, emulated"] = (copy, copy.weight.nbytes)
    return found


def seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    began = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sides", type=int, nargs=2, default=(1024, 2816))
    parser.add_argument("--rounds", type=int, default=15)
    options = arguments(parser, tokens=32, sides=(128, 256), rounds=2)
    torch.manual_seed(0)
    inside, outside = options.sides
    x = torch.randn(options.tokens, inside, requires_grad=True)
    made = layers(inside, outside)
    exact = made["float32"][0](x).detach()
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(options.rounds + 2):
        for name, (layer, _) in made.items():
            taken = seconds(layer, x)
            if turn >= 2:  # the first two warm up
                times[name].append(taken)
    print(f"{options.tokens} tokens through {inside} x {outside}, forward and dx")
    print(f"{'layer':<28} {'bits/weight':>11} {'error of y':>10} {'time':>7}")
    for name, (layer, held) in made.items():
        error = float((layer(x).detach() - exact).norm() / exact.norm())
        pairs = zip(times[name], times["float32"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:<28} {8 * held / (inside * outside):>11.2f} {error:>10.4f} {ratio:>6.2f}x")


if __name__ == "__main__":
    main()
