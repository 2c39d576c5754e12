"""How much faster bf16 is than float32 on this processor: measured, since its flags don't tell.

Of two processors that list bf16 products one may gain by them in training and the other lose. A
library that compiles a kernel for every shape it meets does so in bf16 more often than in float32,
and training goes on meeting new lengths. So the measurement never repeats a length:

  1. a small pass in each format; if bf16 is many times slower there, that is the answer
  2. rounds: both formats take the same forward and backward pass (products and attention of a few
     layers, over documents of lengths that no round before had), and take turns at going first
  3. the median of the rounds' ratios, with the interval of the sign test: one round that others
     disturbed moves neither

It runs on one thread, and the seconds are those that this thread worked: time in which others had
its core doesn't count. Several threads would wait for each other on a busy machine (with two the
same measurement took 2 to 18 s). The result is kept in a file for this machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.parts.kernels import amx
from hasten.parts.kernels.build import processor_flags
from hasten.parts.nn import fused_functions

FOLDER = Path("~/.cache/hasten/measured")
WIDTH, HEADS, INNER, LAYERS = 256, 4, 688, 3
DOCUMENTS = (50, 80, 120, 170, 230, 320)  # tokens of the first round's; each round adds one to each
FEWEST, MOST = 6, 25  # rounds; 25 is less than any two documents differ by, so no length comes back
SECONDS = 2.0  # of wall time, after which no round begins; the fewest are done anyway
HOPELESS = 6.0  # times slower in the small pass: there are no products in bf16 at all
DOUBT = 0.05

Turn = Callable[[torch.dtype, Sequence[int]], float]  # seconds of a pass over such documents


@dataclass(frozen=True)
class Gain:
    """The speed of bf16 over float32's: the median ratio of rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def sure(self) -> bool:
        """Whether bf16 is faster beyond doubt."""
        return self.low > 1

    def __str__(self) -> str:
        found = f"{self.ratio:.2f}× [{self.low:.2f}, {self.high:.2f}] the speed of float32"
        open_still = self.low <= 1 <= self.high
        return f"{found} on this processor{', which leaves it open' if open_still else ''}"


def bf16_gain(cpu: str, folder: Path | None = None) -> Gain:
    """What was measured on this machine before, or is measured now, which takes about two seconds.

    ``cpu`` is the processor's name. ``folder`` keeps the result: ``.cache/hasten/measured`` in the
    user's home if left out. Where that can't be written, this process alone remembers it.
    """
    return _kept(cpu, amx.library().library is not None, folder or FOLDER)


@functools.cache
def _kept(cpu: str, own_kernels: bool, folder: Path) -> Gain:
    flags, source = sorted(processor_flags()), Path(__file__).read_bytes()
    text = repr((cpu, flags, torch.__version__, own_kernels, source))
    with contextlib.suppress(RuntimeError):  # the user has no home
        folder = folder.expanduser()
    path = folder / f"bf16-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    found = _read(path)
    if found is None:
        with _one_thread():
            found = measure()
        _write(path, {**asdict(found), "cpu": cpu, "torch": torch.__version__})
    return found


def _read(path: Path) -> Gain | None:
    """A result that was kept; None where there is none, or nonsense."""
    try:
        told = json.loads(path.read_text())
        found = Gain(*(told[key] for key in ("ratio", "low", "high", "rounds")))
        return found if 0 < found.low <= found.ratio <= found.high < math.inf else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, found: dict[str, object]) -> None:
    """Keep it where that is possible; another process may do the same at the same time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, path)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(turn: Turn | None = None, wall: Callable[[], float] = time.monotonic) -> Gain:
    """Rounds of both formats until the time is over."""
    turn = turn or _turn
    began = wall()
    plain, half = (_best_small(turn, dtype) for dtype in (torch.float32, torch.bfloat16))
    if half > HOPELESS * plain:
        return Gain(plain / half, plain / half, plain / half, 1)
    ratios: list[float] = []
    while len(ratios) < FEWEST or (len(ratios) < MOST and wall() - began < SECONDS):
        lengths = [length + len(ratios) for length in DOCUMENTS]
        order = [torch.float32, torch.bfloat16][:: -1 if len(ratios) % 2 else 1]
        seconds = {dtype: turn(dtype, lengths) for dtype in order}
        ratios.append(seconds[torch.float32] / seconds[torch.bfloat16])
    return Gain(statistics.median(ratios), *median_interval(ratios), len(ratios))


def _best_small(turn: Turn, dtype: torch.dtype) -> float:
    """The second of two passes over one short document: the first starts threads and libraries."""
    return min(turn(dtype, (24,)) for _ in range(2))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of at least six values between which the median lies with 95 %, by the sign test.

    Of n values, k or fewer lie below the true median as often as a coin shows k heads in n throws.
    """
    count, cut, chance = len(values), 0, 0.5 ** len(values)
    while 2 * (chance + math.comb(count, cut + 1) * 0.5**count) <= DOUBT:
        cut += 1
        chance += math.comb(count, cut) * 0.5**count
    ordered = sorted(values)
    return ordered[cut], ordered[-1 - cut]


def _turn(dtype: torch.dtype, lengths: Sequence[int]) -> float:
    """Seconds that this thread works on a forward and backward pass."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype).requires_grad_()

    sides = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER))
    layers = [[values(*side) for side in sides] for _ in range(LAYERS)]
    x = values(sum(lengths), WIDTH)
    began = time.thread_time()
    for layer in layers:
        x = _layer(x, layer, lengths)
    x.float().square().mean().backward()
    return max(time.thread_time() - began, 1e-9)


def _layer(x: Tensor, weights: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Attention and a gated MLP, each with its residual."""
    mixed, out, inner, down = weights
    query, key, value = _linear(x, mixed).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
    x = x + _linear(_attention(query, key, value, lengths).reshape(x.shape), out)
    gate, up = _linear(x, inner).chunk(2, dim=1)
    return x + _linear(F.silu(gate) * up, down)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `fused_layers` has it in this format: on hasten's own kernels, where they run here."""
    if amx.fits(x, weight):
        return fused_functions.linear(x, weight, None)
    return F.linear(x, weight)


def _attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """As `document_attention` has it: (T, heads, d), causal inside each document."""
    if amx.fits(query, key, value):
        starts = tuple(itertools.accumulate(lengths, initial=0))
        return fused_functions.attend(query, key, value, starts, query.shape[-1] ** -0.5)
    pieces = [t.transpose(0, 1)[None].split(list(lengths), dim=2) for t in (query, key, value)]
    found = [F.scaled_dot_product_attention(*p, is_causal=True) for p in zip(*pieces, strict=True)]
    return torch.cat(found, dim=2)[0].transpose(0, 1)
