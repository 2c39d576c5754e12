"""Sessions whose ranks train apart: averages, other techniques, bad steps, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.machine.environment import World
from hasten.techniques.communication.local import LocalSteps, Stream
from ranks import once_on_ranks
from techniques.apart_rank_jobs import COMPANY, LONG_COMPANY, accompanied_long, everything
from tiny import job_context, language_job

found = once_on_ranks(everything)


@pytest.fixture
def as_ddp(found: list[Any]) -> list[Any]:
    return [rank["averaged"] for rank in found]


@pytest.fixture
def company(found: list[Any]) -> list[Any]:
    return [rank["accompanied"] for rank in found]


company_long = once_on_ranks(accompanied_long)


@pytest.mark.parametrize("name", ["every step", "accumulated", "adaptive"])
def test_averaging_each_step_of_sgd_is_ddp_whatever_tokens_ranks_have(
    as_ddp: list[Any], name: str
) -> None:
    for rank in as_ddp:
        assert rank[name]["weights"] == pytest.approx(rank["ddp"]["weights"], abs=2e-6)
        assert rank[name]["held out"] == pytest.approx(rank["ddp"]["held out"], rel=1e-5)


def test_counts_over_all_ranks_are_exact_once_settled(as_ddp: list[Any]) -> None:
    for rank in as_ddp:
        for name in ("every step", "seldom"):
            assert rank[name]["progress"] == rank["ddp"]["progress"]
            assert rank[name]["more progress"][0] == rank["ddp"]["more progress"][0]


def test_an_evaluation_is_of_one_model_on_all_ranks(as_ddp: list[Any]) -> None:
    one, other = (rank["seldom"] for rank in as_ddp)
    assert one["unsettled"] != other["unsettled"]
    assert one["weights"] == other["weights"]
    assert one["held out"] == other["held out"]


def test_gradients_are_not_replicated_and_the_probes_say_so(as_ddp: list[Any]) -> None:
    for rank in as_ddp:
        assert rank["ddp"]["wrapped"] == "DistributedDataParallel"
        assert rank["every step"]["wrapped"] != "DistributedDataParallel"
        assert rank["every step"]["probe"] == [True, True]
        assert rank["seldom"]["probe"] == [True, False]  # the run was shorter than one round


@pytest.mark.parametrize("communication", ["stream", "local_steps"])
@pytest.mark.parametrize(
    ("ranks", "name"),
    [("company", name) for name in COMPANY if name not in LONG_COMPANY]
    + [pytest.param("company_long", name, marks=pytest.mark.long) for name in LONG_COMPANY],
)
def test_ranks_end_with_the_same_bits_beside_other_techniques(
    request: pytest.FixtureRequest, ranks: str, name: str, communication: str
) -> None:
    both = request.getfixturevalue(ranks)
    one, other = (rank[f"{name}, {communication}"] for rank in both)
    assert one["apart"] != other["apart"] or communication == "local_steps"
    assert one["synchronized"] == other["synchronized"]
    assert one["state"] == other["state"]
    assert one["loss"] == other["loss"]
    assert one["effective"]
    assert "exchanges among 2 ranks" in one["probe"]


def test_it_learns(company: list[Any]) -> None:
    for found in company[0].values():
        assert found["losses"][-1] < found["losses"][0]


def test_what_does_not_go_together_is_refused_in_words(found: list[Any]) -> None:
    for rank in found:
        assert "max_tokens" in rank["refused"][0]
        assert "weight_average" in rank["refused"][1]


def test_the_forecast_is_of_bytes_on_the_wire_and_of_the_anchor() -> None:
    context = job_context(language_job())
    for world in (2, 8):  # float32 is summed in a ring, as gradients are
        several = job_context(language_job(), world=World(0, 0, world))
        found = LocalSteps(every=10, codec="none").forecast(several)
        assert found.comm_bytes == pytest.approx(0.1)
    assert Stream(fragments=4).forecast(context).comm_bytes == pytest.approx(0.0159, rel=0.02)
    assert Stream().forecast(context).resident_bytes == 4 * context.model.parameters


def test_a_rank_whose_gradient_is_no_number_gives_its_step_up_alone(found: list[Any]) -> None:
    one, other = (rank["one_bad_step"] for rank in found)
    for communication in ("stream", "local_steps"):
        assert not any(one[communication]["skipped"])
        assert [i for i, s in enumerate(other[communication]["skipped"]) if s] == [1]
        assert one[communication]["weights"] == other[communication]["weights"]


def test_a_stop_that_one_rank_asks_for_comes_after_the_same_step_on_all(found: list[Any]) -> None:
    assert [rank["stopped_by_one"] for rank in found] == [{"stream": 4, "local_steps": 4}] * 2


def test_a_resumed_run_has_the_bits_of_the_whole_one_on_every_rank(found: list[Any]) -> None:
    for rank in found:
        for name, case in rank["resumed"].items():
            assert case["losses"][0] == case["losses"][1]
            assert case["weights"][0] == case["weights"][1]
            assert case["ranks"] == ["1"]
            assert f"plan: {name} was on" in case["other"]
