"""What is counted of a model before it is built, beside what its layers add up to."""

from __future__ import annotations

import pytest

from hasten.models.architecture import Architecture
from hasten.models.memory import routed_weights


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_the_share_of_routed_experts_is_known_from_the_outer_sizes(name: str) -> None:
    one = Architecture.from_config(name)
    found = routed_weights(one.parameters(), one.hidden, one.layers, one.vocabulary, one.tied)
    assert found == pytest.approx(one.expert_parameters(), rel=0.05)


def test_a_model_smaller_than_its_embeddings_has_no_routed_expert() -> None:
    assert routed_weights(1000, 64, 2, 100) == 0
    assert routed_weights(10**6, 64, 2, 100, tied=True) > routed_weights(10**6, 64, 2, 100)
