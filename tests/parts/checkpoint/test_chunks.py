"""Any part of a tensor is read from chunks of any kind: rectangles, or pieces of its elements."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hasten.parts.checkpoint.chunks import CheckpointTensors, FlatShard
from hasten.parts.checkpoint.format import TENSORS, part_name

SHAPES = [(), (1,), (7,), (5, 6), (1, 9), (3, 4, 5), (2, 1, 3, 2), (4, 0, 3)]


def cuts(length: int, draw: random.Random) -> list[tuple[int, int]]:
    """A length in up to four pieces, some of them empty: (start, count)."""
    ends = [0, *sorted(draw.choices(range(length + 1), k=draw.randrange(4))), length]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def saved(path: Path, tensor: Tensor, flat: bool, draw: random.Random) -> CheckpointTensors:
    """The tensor in a file for each chunk."""
    shape = tuple(tensor.shape)
    if flat:
        pieces = cuts(tensor.numel(), draw)
        chunks = [((s,), tensor.flatten()[s : s + n].clone()) for s, n in pieces]
    else:
        boxes = itertools.product(*(cuts(length, draw) for length in shape))
        chunks = [
            (tuple(s for s, _ in box), tensor[tuple(slice(s, s + n) for s, n in box)].clone())
            for box in boxes
        ]
    parts: list[dict[str, Any]] = []
    for rank, (offset, values) in enumerate(chunks):
        save_file({"w": values.contiguous()}, path / part_name(rank, TENSORS))
        entry = {"dtype": "F32", "shape": shape, "offset": offset, "sizes": tuple(values.shape)}
        parts.append({"tensors": {"w": entry}})
    return CheckpointTensors(path, parts)


@pytest.mark.parametrize("flat", [True, False], ids=["pieces", "rectangles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_and_rectangles_are_read_from_both(
    tmp_path: Path, shape: tuple[int, ...], flat: bool
) -> None:
    for seed in range(8):
        draw = random.Random(f"{shape}{flat}{seed}")
        tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        folder = tmp_path / str(seed)
        folder.mkdir()
        read = saved(folder, tensor, flat, draw)
        assert torch.equal(read["w"], tensor)
        for start, count in cuts(tensor.numel(), draw):
            like = FlatShard(torch.empty(count), shape, start)
            assert torch.equal(read.like("w", like), tensor.flatten()[start : start + count])
        for box in itertools.product(*(cuts(length, draw) for length in shape)):
            offset, sizes = tuple(s for s, _ in box), tuple(n for _, n in box)
            window = tuple(slice(s, s + n) for s, n in box)
            assert torch.equal(read.part("w", offset, sizes), tensor[window])


@pytest.mark.parametrize(
    "entries",
    [
        [{"offset": [0], "sizes": [6]}, {"offset": [6], "sizes": [7]}],
        [{"offset": [0, 0], "sizes": [2, 3]}, {"offset": [6], "sizes": [6]}],
        [{"offset": [0, 0, 0], "sizes": [4, 3, 1]}],
        [{"offset": [0], "sizes": [5]}],
    ],
    ids=["beyond the end", "of two kinds", "more dimensions", "a piece is missing"],
)
def test_pieces_that_do_not_make_the_tensor_are_refused(
    tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    parts = [{"tensors": {"w": {"dtype": "F32", "shape": [4, 3], **entry}}} for entry in entries]
    with pytest.raises(ValueError, match=r"w|zip"):
        CheckpointTensors(tmp_path, parts)
