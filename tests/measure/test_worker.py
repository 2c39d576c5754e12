"""The program of a worker: how recipes train in it, forked or spawned, alone or on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.plan import Plan
from hasten.measure.worker import RecipeJob, compiled
from hasten.measure.workers import Worker, WorkerError, WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.communication.compress import Half
from hasten.techniques.optimizer import FusedAdamW
from sample_data import small


def written(recipe: Recipe, folder: Path, ranks: int = 1) -> Path:
    prepare_run(recipe, lambda text: None, ranks=ranks)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    return path


def spec(path: Path, plan: Plan, *, ranks: int = 1, **more: Any) -> WorkerSpec:
    return WorkerSpec("recipe", {"recipe": str(path), "plan": plan.to_list(), **more}, {}, ranks)


def losses(worker: Worker, count: int) -> list[float]:
    return [step["loss"] for step in worker.request("steps", 600, count=count)["steps"]]


@pytest.mark.parametrize("changes", [{}, {"seed": 7}], ids=["recipe", "changed"])
def test_two_workers_of_a_plan_that_saves_train_side_by_side_and_leave_nothing(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    values = small(tmp_path, max_steps=6, global_batch_size=2)
    path = written(recipe_from(values, "test"), tmp_path)
    asked = spec(path, Plan([Checkpoints(interval=1)]), changes=changes)
    with WorkerPool(tmp_path) as pool:
        both = [pool.start(asked, name) for name in ("a", "b")]
        for worker in both:
            assert worker.ready()["startup_seconds"]
        one, two = (losses(worker, 2) for worker in both)
        assert list((tmp_path / "run").glob("variant-*"))
    assert one == two
    assert not list((tmp_path / "run").glob("variant-*"))


def test_compiling_is_counted_and_timed() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    before, spent = compiled()
    fast = torch.compile(double, backend="eager", dynamic=False)
    fast(torch.ones(3))
    once, longer = compiled()
    assert once == before + 1
    assert longer > spent
    fast(torch.ones(3))
    assert compiled() == (once, longer)  # nothing new
    fast(torch.ones(5))
    assert compiled()[0] == once + 1  # another shape, compiled again


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_worker_that_is_forked_trains_as_one_that_was_spawned(tmp_path: Path) -> None:
    path = written(
        recipe_from(small(tmp_path, plan=[], global_batch_size=2, max_steps=9), "test"), tmp_path
    )
    environ = {"OMP_NUM_THREADS": "2"}
    given = {"recipe": str(path), "plan": Plan([FusedAdamW()]).to_list()}
    asked = WorkerSpec("recipe", given, environ)

    def trained(pool: WorkerPool, name: str) -> list[float]:
        with pool.start(asked, name) as worker:
            worker.ready()
            found = losses(worker, 4)
            assert [a["effective"] for a in worker.request("finish", 600)["effective"]] == [True]
        return found

    with WorkerPool(tmp_path, fork=True, recipe=path) as pool:
        forked = [trained(pool, f"forked-{number}") for number in range(2)]
        text = path.read_text()
        path.write_text("no recipe")
        with pool.start(asked, "refused") as worker, pytest.raises(WorkerError, match="recipe"):
            worker.ready()
        path.write_text(text)
    with WorkerPool(tmp_path) as pool:
        assert forked == [trained(pool, "spawned")] * 2
    assert not list((tmp_path / "run").glob("variant-*"))


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_and_tell_of_their_own_switches(tmp_path: Path) -> None:
    recipe = recipe_from(
        small(tmp_path, nproc=2, plan=["half"], global_batch_size=4, max_steps=9), "test"
    )
    path = written(recipe, tmp_path, ranks=2)
    with WorkerPool(tmp_path) as pool:
        worker = pool.start(spec(path, Plan([Half(minimum=0)]), ranks=2), "variant")
        worker.ready()
        found = worker.request("steps", 600, count=3)
        last, end = worker.request("evaluate", 600), worker.request("finish", 600)
    assert [row["technique"] for row in end["effective"]] == ["half"]  # not the ranks' own layout
    assert end["effective"][0]["effective"] is True
    assert end["ledger"]["step"]["communication"] > 0
    assert end["ledger"]["parallel_efficiency"] > 0
    assert end["samples"]
    assert not found["apart"]
    alone = RecipeJob(recipe.model_copy(update={"nproc": 1, "plan": []}), {}, tmp_path / "variant")
    expected = alone.handle("steps", {"count": 3})["steps"]
    assert [s["tokens"] for s in found["steps"]] == [s["tokens"] for s in expected]
    assert last["tokens"] == sum(s["tokens"] for s in expected)
    assert [s["loss"] for s in found["steps"]] == pytest.approx(
        [s["loss"] for s in expected], rel=2e-3
    )
    eval_data = alone.handle("evaluate", {})["eval_loss"]
    assert last["eval_loss"] == pytest.approx(eval_data, rel=2e-3)
