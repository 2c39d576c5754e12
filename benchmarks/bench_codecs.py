"""How fast codecs encode and decode on one thread, in GB of float32 numbers per second.

    OMP_NUM_THREADS=1 python benchmarks/bench_codecs.py [--numbers 10800000] [--rounds 30] [--torch]
    OMP_NUM_THREADS=1 python benchmarks/bench_codecs.py --processor native,x86-64-v3 --minutes 3

All ways take turns; a figure is a way's quickest turn, since whatever else a machine does only adds
time. ``copy`` is memory alone: one tensor copied to another. ``--torch`` takes the ways without a
compiler too; ``--processor x86-64-v3`` compiles for AVX2 without AVX-512, and of several processors
all kernels take turns. No round begins after ``--minutes``.

Columns: a plain message; with error feedback, the residual put elsewhere, or replaced where it is
(which looks first whether all is finite); codes rounded by chance; one message decoded, or added;
the mean of four ranks' messages, per message.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from smoke import arguments
from torch import Tensor

from hasten.machine import host as machine
from hasten.parts.comm.codecs import CastCodec, QuantisedCodec
from hasten.parts.kernels import build, codec_reference
from hasten.parts.kernels import codec as compiled

RANKS = 4
COLUMNS = ("encode", "feedback", "in place", "by chance", "decode", "add", "mean of 4")
Turns = dict[str, tuple[Callable[[], object], int]]  # column: a turn, and the tensors it handles


class Bench:
    """Tensors that all ways share, so that none has them warmer than another."""

    def __init__(self, numbers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.flat = torch.randn(numbers, generator=generator) * 1e-3
        self.residual, self.kept, self.out = (torch.zeros(numbers) for _ in range(3))

    def quantised(self, way: ModuleType, bits: int) -> Turns:
        flat, residual, kept, out = self.flat, self.residual, self.kept, self.out
        communication, n = QuantisedCodec(bits), len(self.flat)
        messages = communication.encode(flat).repeat(RANKS, 1)
        size, blocks = -(-n // 256) * 32 * bits, -(-n // 256)
        codes = messages[:, :size]
        scales = messages[:, size : size + 2 * blocks].view(torch.int16)

        def encode(rest: Tensor | None, into: Tensor | None, seed: int | None = None) -> None:
            way.encode(flat, rest, into, codes[0], scales[0], 256, bits, seed)

        def in_place() -> None:
            way.finite(flat, residual, codec_reference.INFINITE)
            encode(residual, residual)

        def decode(ranks: int, add: bool) -> None:
            way.decode(codes[:ranks], scales[:ranks], out, 256, bits, 1 / ranks, add)

        return {
            "encode": (lambda: encode(None, None), 1),
            "feedback": (lambda: encode(residual, kept), 1),
            "in place": (in_place, 1),
            "by chance": (lambda: encode(None, None, 7), 1),
            "decode": (lambda: decode(1, False), 1),
            "add": (lambda: decode(1, True), 1),
            "mean of 4": (lambda: decode(RANKS, False), RANKS),
        }

    def topk(self, way: ModuleType, k: int) -> Turns:
        flat, residual, kept, out = self.flat, self.residual, self.kept, self.out
        chosen = -(-len(flat) // 256) * k
        places = torch.empty(RANKS, chosen, dtype=torch.uint8)
        sent = torch.empty(RANKS, chosen, dtype=torch.int16)
        for rank in range(RANKS):
            compiled.topk_encode(flat, None, None, places[rank], sent[rank], k)

        def encode(rest: Tensor | None, into: Tensor | None) -> None:
            way.topk_encode(flat, rest, into, places[0], sent[0], k)

        def decode(ranks: int, add: bool) -> None:
            way.topk_decode(places[:ranks], sent[:ranks], out, k, 1 / ranks, add)

        return {
            "encode": (lambda: encode(None, None), 1),
            "feedback": (lambda: encode(residual, kept), 1),
            "decode": (lambda: decode(1, False), 1),
            "add": (lambda: decode(1, True), 1),
            "mean of 4": (lambda: decode(RANKS, False), RANKS),
        }

    def cast(self, name: str) -> Turns:
        flat, residual, kept, out, n = self.flat, self.residual, self.kept, self.out, len(self.flat)
        communication = CastCodec(name)
        messages = communication.encode(flat).repeat(RANKS, 1)
        first = messages[0]
        return {
            "encode": (lambda: communication.encode(flat, first), 1),
            "feedback": (
                lambda: communication.encode_with_feedback(flat, residual, first, kept),
                1,
            ),
            "in place": (lambda: communication.encode_with_feedback(flat, residual, first), 1),
            "decode": (lambda: communication.decode(first, n, out), 1),
            "add": (lambda: communication.decode(first, n, out, add=True), 1),
            "mean of 4": (lambda: communication.decode_mean(messages, n, out), RANKS),
        }

    def ways(self, with_torch: bool) -> dict[str, Turns]:
        found: dict[str, Turns] = {"copy": {"encode": (lambda: self.kept.copy_(self.flat), 1)}}
        modules = {"": compiled} | ({", torch": codec_reference} if with_torch else {})
        for label, module in modules.items():
            found |= {f"int{bits}{label}": self.quantised(module, bits) for bits in (8, 4)}
            found |= {f"topk {k} of 256{label}": self.topk(module, k) for k in (3, 13)}
        return found | {name: self.cast(name) for name in ("half", "bf16")}


def library(processor: str) -> Callable[[], build.LoadedLibrary]:
    """What stands for ``codec.library`` while kernels for that processor have their turn."""
    limit = replace(machine.isa_limit(), compiler_flags=(f"-march={processor}",))
    vars(build)["isa_limit"] = lambda: limit
    build.build_library.cache_clear()
    found = build.build_library("codec")
    if found.library is None:
        raise SystemExit(found.reason)
    return lambda: found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=10_800_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch", action="store_true", help="the ways without a compiler too")
    parser.add_argument("--processor", default="native", help="compile for these: x86-64-v3")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    asked = arguments(parser, numbers=10_000, rounds=1)
    torch.set_num_threads(1)
    bench, processors = Bench(asked.numbers), asked.processor.split(",")
    libraries = {p: library(p) for p in processors}
    ways: dict[str, tuple[str, Turns]] = {}
    for place, processor in enumerate(processors):
        compiled.library = libraries[processor]
        for name, turns in bench.ways(asked.torch and not place).items():
            many = len(processors) > 1 and name.startswith(("int", "topk")) and "torch" not in name
            ways.setdefault(f"{name}, {processor}" if many else name, (processor, turns))
    quickest: dict[tuple[str, str], float] = {}
    end, rounds = time.monotonic() + 60 * asked.minutes, 0
    while rounds < asked.rounds and (not rounds or time.monotonic() < end):
        rounds += 1
        for name, (processor, turns) in ways.items():
            compiled.library = libraries[processor]
            for column, (turn, tensors) in turns.items():
                bench.residual.zero_()
                began = time.perf_counter()
                turn()
                taken = (time.perf_counter() - began) / tensors
                quickest[name, column] = min(taken, quickest.get((name, column), taken))
    print(
        f"{asked.numbers / 1e6:.1f} M numbers, one thread, {rounds} rounds, torch "
        f"{torch.__version__}, kernels for {asked.processor}; this processor "
        f"{'has' if 'avx512f' in machine.processor_flags() else 'lacks'} AVX-512"
    )
    print(f"| GB/s of float32 | {' | '.join(COLUMNS)} |")
    print("|---|" + "---|" * len(COLUMNS))
    for name in ways:
        speeds = (quickest.get((name, column)) for column in COLUMNS)
        shown = ("-" if s is None else f"{4e-9 * asked.numbers / s:.1f}" for s in speeds)
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
