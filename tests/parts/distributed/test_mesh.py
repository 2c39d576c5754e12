"""The mesh: every rank has one place, partners are neighbours, the product is checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.distributed.mesh import MeshSizes

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes)
def test_partners_are_neighbours_and_every_share_has_as_many(dp: int, shard: int, tp: int) -> None:
    mesh = MeshSizes(dp, shard, tp)
    places = [mesh.data_rank(rank) for rank in range(mesh.size)]
    assert places == sorted(places)
    assert [places.count(p) for p in range(mesh.data_size)] == [tp] * mesh.data_size
    mesh.check(dp * shard * tp)


def test_a_product_that_is_not_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="dp 2 x shard 1 x tp 2 is 4 ranks and 3 are running"):
        MeshSizes(dp=2, tp=2).check(3)
    with pytest.raises(ValueError, match="tp is 0"):
        MeshSizes(tp=0)
