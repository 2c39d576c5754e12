"""How long a job is, against the steps that it trains."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.core.job import Stop
from hasten.parts.data.collate import tokenized_example
from hasten.recipe.build import total_steps
from tiny import language_job, run, session_of


@pytest.mark.parametrize("tokens", [1, 40, 41, 80, 241])
def test_the_steps_of_a_token_limit_are_those_that_reach_it(tokens: int) -> None:
    """Of 40 tokens each, six in an epoch."""
    data = [tokenized_example(np.arange(3, 13)) for _ in range(24)]
    session = session_of(language_job(data=data, batch=4, stop=Stop(tokens=tokens)))
    job, sampler = session.setup.job, session.setup.sampler
    assert sampler is not None
    assert total_steps(job, sampler) == len(run(session)) == -(-tokens // 40)
