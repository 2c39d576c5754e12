"""PowerSGD: a matrix of gradients travels as two thin factors, one power iteration per step.

    stage 1   P = M Q of every matrix in the bucket, end to end, in one all-reduce
              all ranks: P made orthonormal, the same bits everywhere
    stage 2   Q = M' P, end to end, in one all-reduce; the mean is P Q'

(Vogels et al., arXiv:1905.13727, algorithm 1.) Q is the next step's start. Factors are bf16;
vectors, and matrices whose factors wouldn't be half as large, travel in float32 beside P. What a
rank remembers is what P times *its own* Q leaves of its own matrix, as in the paper. (With the mean
in its place, as in some implementations, what a rank's gradient has beyond the mean would pile up
on it as a random walk.)

The mean is decoded by a matrix product. Ranks on unlike processors may differ in its last bits, and
then drift apart: there `GradientCompressor.check` says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hasten.parts.comm.error_feedback import Piece, Pieces, numbers, parts_of
from hasten.parts.comm.exchange import FIRST, SECOND, Ranks, reduced_bytes
from hasten.parts.comm.ways import Finish, Outcome

WIRE = torch.bfloat16


class PowerSGDMean:
    """Factors of at most ``rank`` columns."""

    feedback = True

    def __init__(self, rank: int = 16) -> None:
        if rank < 1:
            raise ValueError(f"rank is {rank}; a factor has at least 1 column")
        self.rank = rank
        self._right: dict[str, Tensor] = {}  # Q of each matrix, the next step's start
        self._learnt: dict[str, Tensor] = {}  # by the step under way

    def start(self, flat: Tensor, residual: Tensor | None, pieces: Pieces, ranks: Ranks) -> Finish:
        matrices, rest = self._split(_sum(flat, residual), pieces)
        left_factors = [m @ self._start_of(p, m) for p, m in matrices]
        whole = _together(rest, flat).div_(ranks.world)
        factors = _together([f / ranks.world for f in left_factors], flat).to(WIRE)
        waiting = [ranks.all_reduce(t, FIRST) for t in (factors, whole) if len(t)]

        def finish() -> Outcome:
            for pending in waiting:
                pending.wait()
            # The same tensors on all ranks, so all go on or none does. Waits for the device.
            if not bool(factors.isfinite().all() & whole.isfinite().all()):
                return None, None
            bases = [_orthonormal(f) for f in _apart(factors.float(), left_factors)]
            own = [
                (m.T @ b / ranks.world).to(WIRE) for (_, m), b in zip(matrices, bases, strict=True)
            ]
            means = _together(own, flat).to(WIRE)
            if len(means):
                ranks.all_reduce(means, SECOND).wait()
            return self._outcome(
                pieces, matrices, bases, own, _apart(means.float(), own), whole, ranks.world
            )

        return finish

    def local(self, flat: Tensor, residual: Tensor | None, pieces: Pieces) -> Outcome:
        matrices, rest = self._split(_sum(flat, residual), pieces)
        if not bool(flat.isfinite().all()):  # waits for the device
            return None, None
        bases = [_orthonormal((m @ self._start_of(p, m)).to(WIRE).float()) for p, m in matrices]
        own = [(m.T @ b).to(WIRE) for (_, m), b in zip(matrices, bases, strict=True)]
        whole = _together(rest, flat)
        return self._outcome(pieces, matrices, bases, own, [q.float() for q in own], whole, 1)

    def sent_bytes(self, pieces: Pieces, world: int) -> int:
        sides = [_sides(p.shape) for p in pieces if self._pays(p.shape)]
        whole = sum(p.numbers for p in pieces if not self._pays(p.shape))
        columns = [min(self.rank, *side) for side in sides]
        sizes = (
            sum(2 * rows * k for (rows, _), k in zip(sides, columns, strict=True)),
            sum(2 * width * k for (_, width), k in zip(sides, columns, strict=True)),
            4 * whole,
        )
        return sum(reduced_bytes(size, world) for size in sizes)

    def settle(self, counted: bool) -> None:
        learnt, self._learnt = self._learnt, {}
        if counted:
            self._right |= learnt

    def state(self) -> dict[str, Any]:
        return {"right": {name: q.detach().to("cpu", copy=True) for name, q in self._right.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        self._right = {name: q.float().clone() for name, q in state.get("right", {}).items()}
        self._learnt = {}

    def _outcome(
        self,
        pieces: Pieces,
        matrices: list[tuple[Piece, Tensor]],
        bases: list[Tensor],
        own: list[Tensor],
        means: list[Tensor],
        whole: Tensor,
        world: int,
    ) -> Outcome:
        """The mean of all pieces end to end, and what this rank's own factors leave out."""
        mean = torch.empty(numbers(pieces), dtype=torch.float32, device=whole.device)
        left = torch.zeros_like(mean)
        found, beside = iter(zip(matrices, bases, own, means, strict=True)), 0
        for piece, into, over in zip(
            pieces, parts_of(mean, pieces), parts_of(left, pieces), strict=True
        ):
            if self._pays(piece.shape):
                (_, matrix), basis, mine, right = next(found)
                into.copy_((basis @ right.T).flatten())
                over.copy_((matrix - basis @ mine.float().T * world).flatten())
                self._learnt[piece.name] = right
            else:
                into.copy_(whole[beside : beside + piece.numbers])
                beside += piece.numbers
        return mean, left

    def _split(
        self, flat: Tensor, pieces: Pieces
    ) -> tuple[list[tuple[Piece, Tensor]], list[Tensor]]:
        """Pieces to be sent as factors, as matrices, and the others."""
        matrices, rest = [], []
        for piece, values in zip(pieces, parts_of(flat, pieces), strict=True):
            if self._pays(piece.shape):
                matrices.append((piece, values.view(_sides(piece.shape))))
            else:
                rest.append(values)
        return matrices, rest

    def _pays(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        rows, width = _sides(shape)
        columns = min(self.rank, rows, width)
        return 0 < 2 * 2 * columns * (rows + width) <= 4 * rows * width

    def _start_of(self, piece: Piece, matrix: Tensor) -> Tensor:
        """The last step's Q; at first chance, the same on every rank."""
        rows, width = matrix.shape
        known = self._right.get(piece.name)
        if known is None or known.shape != (width, min(self.rank, rows, width)):
            dice = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
            known = torch.randn(width, min(self.rank, rows, width), generator=dice)
        return known.to(matrix.device)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """As a matrix: experts one below the other, a convolution's filters one per row."""
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape[0], torch.Size(shape[1:]).numel()


def _sum(flat: Tensor, residual: Tensor | None) -> Tensor:
    return flat.float() if residual is None else flat.float() + residual


def _together(tensors: list[Tensor], like: Tensor) -> Tensor:
    flats = [t.flatten() for t in tensors]
    return torch.cat(flats) if flats else torch.zeros(0, device=like.device)


def _apart(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([t.numel() for t in like]) if like else ()
    return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found
