"""Runs with experts shared out over ranks are those of one process, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.communication.local import LocalSteps
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.parallel import ParallelLayout
from ranks import on_ranks, once_on_ranks
from techniques.expert_session_jobs import CASES, all_compiled, compiled, on_four, on_two
from tiny import job_context, language_job, run, session_of, tiny_model

found = once_on_ranks(on_two)


def facts_on(ranks: int, architecture: str = "deepseek_v3") -> JobContext:
    return job_context(language_job(), architecture, World(0, 0, ranks))


def check(ranks: list[Any]) -> None:
    """Losses, eval loss, norms and weights of the first rank; the same norm on all."""
    for name, case in ranks[0].items():
        assert case["losses"] < case["within"], name
        assert case["norms"] < 10 * case["within"], name
        assert case["weights"] < case["within"], name
        assert case["biases"] == 0, name
        assert case["clipped"], name
        assert case["effective"], name
        assert all(rank[name]["norms_here"] == case["norms_here"] for rank in ranks)


def test_a_run_on_two_ranks_is_that_of_one_process(found: list[Any]) -> None:
    """Accumulated, unequal tokens and passes, ranks without an example, clipping, evaluation."""
    assert len(found[0]) == len(CASES)
    check(found)


@pytest.mark.long  # groups of two here, and four ranks beside shards in test_layout_hybrid
def test_a_run_on_four_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(on_four, tmp_path, 4)
    assert {name.rpartition(" ")[2] for name in ranks[0]} == {"2", "4"}
    check(ranks)


@pytest.mark.long  # blocks are compiled in test_compile, in one process
@pytest.mark.parametrize(
    "job", [pytest.param(compiled, id="experts"), pytest.param(all_compiled, id="all parts")]
)
def test_it_runs_in_compiled_blocks(job: Any, tmp_path: Path) -> None:
    check(on_ranks(job, tmp_path))


def test_its_probe_says_what_travelled(found: list[Any]) -> None:
    said = found[0]["v3, float64, groups of 2"]["evidence"]
    assert said.startswith("2 of 4 experts of each of 1 layers on a rank; ")
    assert "went to other ranks" in said


def test_alone_it_changes_nothing_and_says_so() -> None:
    job = language_job(lambda: tiny_model("deepseek_v3"))
    session = session_of(job, ExpertParallel(size=2), architecture="deepseek_v3")
    run(session)
    assert not ExpertParallel(size=2).check_effect(session).effective


def test_ranks_that_choose_their_own_blocks_are_refused() -> None:
    """Tokens travel in recomputed passes too: ranks have to make the same ones."""
    job = language_job(lambda: tiny_model("deepseek_v3"))
    plan = Plan((ExpertParallel(), ActivationCheckpointing(budget=0.5)))
    with pytest.raises(InputError, match="leave budget out"):
        prepare(job, plan, facts_on(2))


def test_ranks_that_train_apart_are_refused() -> None:
    job = language_job(lambda: tiny_model("deepseek_v3"))
    setup = prepare(job, Plan((ExpertParallel(), LocalSteps())), facts_on(2))
    assert isinstance(setup.layout, ParallelLayout)
    with pytest.raises(InputError, match="ranks can't train apart"):
        setup.layout.apply_data_parallel(
            tiny_model("deepseek_v3"), torch.device("cpu"), setup.communication
        )
