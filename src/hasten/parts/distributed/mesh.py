"""Mesh of ranks: copies of a model, shards of each copy, and the split of its layers.

- dp: copies that average their gradients
- shard: pieces of each weight, gathered for a block's pass (FSDP2)
- tp: pieces of each layer, each computed on its rank (tensor parallel)

Ranks are numbered with ``tp`` innermost and ``dp`` outermost. So the ranks that
communicate most are neighbours: on one machine, if its ranks are numbered
consecutively.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "shard", "tp")


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis.

    Raises:
        ValueError: an axis without a rank.
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"{axis} is {size}; it is a number of ranks, at least 1")

    @property
    def size(self) -> int:
        return self.dp * self.shard * self.tp

    @property
    def data_size(self) -> int:
        """Returns the number of ranks, or groups of ranks, with different examples."""
        return self.dp * self.shard

    def data_rank(self, rank: int) -> int:
        """Returns the index of a rank, or of its group, among those."""
        return rank // self.tp

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    def check(self, world_size: int) -> None:
        """Raises ValueError unless the product of the axes is the number of ranks."""
        if self.size != world_size:
            raise ValueError(f"{self} is {self.size} ranks and {world_size} are running")

    def build(self, device_type: str) -> DeviceMesh:
        """Builds the mesh over all ranks of the process group; each of them calls it."""
        shape = (self.dp, self.shard, self.tp)
        return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def data_mesh(mesh: DeviceMesh, copies: bool = True) -> DeviceMesh:
    """Returns FSDP2's mesh: an axis of shards, and one of copies if it averages gradients."""
    return mesh["dp", "shard"] if copies and mesh["dp"].size() > 1 else mesh["shard"]
