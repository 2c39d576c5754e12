"""What ranks tell each other in a step: sums over all, unless the communication method has its own
way.
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from hasten.core.job import WorkCounts
from hasten.core.setup import NoCompression, RankSync, SumsEachStep
from hasten.parts.comm import streaming_local_sgd as parts
from hasten.parts.comm.codecs import codec
from hasten.techniques.communication.local import LocalCommunication, Stream
from tiny import language_job, run, session_of


class ThreeAlike:
    """A layout of three ranks that all have the same."""

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return 3 * values


def test_by_default_counts_and_the_wish_to_stop_are_summed_in_one_go() -> None:
    rank_sync = SumsEachStep(ThreeAlike())
    mine = WorkCounts(examples=1, tokens=5, positions=8, trained_tokens=4, attention_pairs=25)
    assert rank_sync.counts(mine, stop=False) == (WorkCounts(3, 15, 24, 12, 75), False)
    assert rank_sync.counts(mine, stop=True)[1]
    assert rank_sync.sum(torch.ones(2)).tolist() == [3.0, 3.0]
    assert rank_sync.gather_states({"moment": torch.ones(1)}) == []


def test_a_wire_that_is_an_agreement_takes_the_place_of_the_default() -> None:
    session = session_of(language_job())
    assert not session.setup.rank_sync.diverged
    session.setup.communication = LocalCommunication(
        session.setup, "stream", lambda parameters: None
    )  # type: ignore[arg-type,return-value]
    assert isinstance(session.setup.communication, RankSync)
    assert session.setup.rank_sync is session.setup.communication
    assert not isinstance(NoCompression(), RankSync)


def test_ranks_that_train_apart_take_the_others_to_have_what_they_have() -> None:
    setup = session_of(language_job()).setup
    setup.layout.size = 3  # type: ignore[misc]
    communication = LocalCommunication(
        setup, "stream", lambda weights: parts.Stream(weights, codec("int4"), 2)
    )
    counts, stop = communication.counts(WorkCounts(1, 5, 8, 4, 25), stop=True)
    assert astuple(counts) == (3, 15, 24, 12, 75)
    assert not stop  # until an exchange has told the others
    assert communication.sum(torch.ones(2)).tolist() == [3.0, 3.0]


def test_on_one_rank_nothing_is_settled_and_counts_stay() -> None:
    session = session_of(language_job(), Stream())
    run(session)
    before = session.progress.tokens
    session.synchronize()
    assert session.progress.tokens == before
    assert isinstance(session.setup.communication, NoCompression)
