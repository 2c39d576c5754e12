"""Experiments on a real recipe, whose variants only pretend to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.launch.ranks import rank_variables
from hasten.measure import recipe_experiment
from hasten.measure.ablation import Design
from hasten.measure.experiment import ExperimentContext
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.recipe.schema import Recipe
from hasten.report import speedup
from hasten.report.schema import read_report
from hasten.report.speedup import ablate, greedy_recipe
from hasten.techniques import CATALOGUE
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from simulation import JOB, Workers, log
from tiny import job_context, language_job

DESIGN = Design(rounds=4, steps=1, warmup=1)
SPEEDS = {"packed": 1.5, "document_attention": 1.0, "labelled_token_loss": 1.2}


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, text: str) -> None:
        self.lines.append(text)

    def begin(self) -> None:
        pass

    def show(self, text: str, share: float) -> None:
        assert 0 <= share <= 1


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe of a job of some records."""
    folder = tmp_path_factory.mktemp("job")
    pairs = [(a, b) for a in range(6) for b in range(6)]
    records = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Recipe(
        model="deepseek-llm-tiny",
        dataset=str(data),
        eval_data=4,
        vocabulary=300,
        cutoff_len=32,
        global_batch_size=4,
        max_steps=9,
        device="cpu",
        output=str(folder / "out"),
        plan=list(SPEEDS),
    )


@pytest.fixture
def recipe(sums: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Its variants are as fast as the product of their techniques' speeds."""
    plan = Plan.from_list(sums.plan, CATALOGUE)
    told = {}
    for count in range(1 << len(plan)):
        chosen = [t for place, t in enumerate(plan) if count >> place & 1]
        rate = 100.0
        for technique in chosen:
            rate *= SPEEDS[technique.name()]
        told["+".join(t.name() for t in chosen) or "baseline"] = {"rate": rate}
    path = tmp_path / "told.json"
    path.write_text(json.dumps({"variants": told, "log": str(tmp_path / "log")}))
    (tmp_path / "log").write_text("")

    def worker(subject: Any, at: Path, plan: Plan) -> WorkerSpec:
        assert at.is_file()
        return WorkerSpec(JOB, {"recipe": str(path), "plan": plan.to_list()})

    def table(pool: WorkerPool, spec: Any, ranks: int, meter: Any) -> ExperimentContext:
        return ExperimentContext(Workers.of_pretenders(), spec, 10_000, 2)

    monkeypatch.setattr(recipe_experiment, "recipe_worker", worker)
    monkeypatch.setattr(recipe_experiment, "experiment_context", table)
    return sums.model_copy(update={"output": str(tmp_path / "out")})


def test_an_experiment_is_measured_once(recipe: Recipe, tmp_path: Path) -> None:
    first = ablate(recipe, design=DESIGN)
    starts = len(log(tmp_path))
    assert starts
    heard = Heard()
    again = ablate(recipe, design=DESIGN, audience=heard)
    assert len(log(tmp_path)) == starts
    assert any(line.startswith("measured before: ") for line in heard.lines)
    assert again["variants"] == first["variants"]
    assert again["design"] == first["design"]
    anew = ablate(recipe, design=DESIGN, fresh=True)
    assert len(log(tmp_path)) == 2 * starts
    assert [variant["name"] for variant in anew["variants"]] == [
        variant["name"] for variant in first["variants"]
    ]


def test_its_report_has_what_the_page_expects(recipe: Recipe) -> None:
    design = Design(rounds=4, steps=1, warmup=1, noise=True)
    found = read_report(ablate(recipe, "cumulative", design=design))
    assert [(variant["name"], variant["kind"]) for variant in found["variants"]] == [
        ("baseline", "baseline"),
        ("baseline again", "again"),
        ("+ packed", "cumulative"),
        ("+ document_attention", "cumulative"),
        ("+ labelled_token_loss", "all"),
    ]
    assert [variant["ratio"]["median"] for variant in found["variants"]] == pytest.approx(
        [1, 1, 1.5, 1.5, 1.8]
    )
    assert set(found["design"]) == {
        *("rounds", "steps", "warmup", "seed", "builds", "seconds", "round_seconds"),
        *("budget_seconds", "grouping", "dropped", "resumed", "redone_rounds", "ranks"),
        *("epoch_examples", "epoch_tokens"),
    }
    assert all(len(variant["foreign_load"]) == 4 for variant in found["variants"])


def test_whatever_decides_the_numbers_makes_another_experiment(
    recipe: Recipe, tmp_path: Path
) -> None:
    ablate(recipe, design=DESIGN)
    for change in ({"learning_rate": 1e-3}, {"plan": ["packed"]}, {"cutoff_len": 24}, {"seed": 3}):
        before = len(log(tmp_path))
        ablate(recipe.model_copy(update=change), design=DESIGN)
        assert len(log(tmp_path)) > before, change


def test_a_price_makes_no_other_experiment(recipe: Recipe, tmp_path: Path) -> None:
    ablate(recipe, design=DESIGN)
    before = len(log(tmp_path))
    priced = recipe.model_dump() | {"price": {"currency": "EUR", "per_device_hour": 2.0}}
    assert ablate(Recipe(**priced), design=DESIGN)["cost"]["currency"] == "EUR"
    assert len(log(tmp_path)) == before


def test_changed_sources_make_another_experiment(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablate(recipe, design=DESIGN)
    before = len(log(tmp_path))
    monkeypatch.setattr(recipe_experiment, "source_digest", lambda: "of another version")
    ablate(recipe, design=DESIGN)
    assert len(log(tmp_path)) == 2 * before


@pytest.mark.parametrize("order", ["slots", "gain"])
def test_gradual_optimisation_keeps_what_pays(recipe: Recipe, order: Any) -> None:
    climbed = greedy_recipe(recipe, order=order, design=DESIGN)
    assert climbed.plan == Plan([Packed(), LabelledTokenLoss()])
    tried = [rung.technique for rung in climbed.rungs]
    assert tried[0] == "packed"
    assert sorted(tried) == sorted(SPEEDS)
    assert tried.index("labelled_token_loss") == (1 if order == "gain" else 2)
    assert climbed.report is not None
    assert read_report(climbed.report)["variants"][-1]["ratio"]["median"] == pytest.approx(1.8)
    assert [row["kept"] for row in climbed.report["design"]["greedy"]].count(True) == 2


def test_the_cost_of_a_climb_has_all_its_experiments(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    usual = speedup.measured

    def noted(*given: Any) -> Any:
        found = usual(*given)
        found.design["seconds"] = 2.0 ** len(spent)
        spent.append(found.design["seconds"])
        return found

    monkeypatch.setattr(speedup, "measured", noted)
    priced = recipe.model_dump() | {"price": {"currency": "EUR", "per_device_hour": 2.0}}
    report = greedy_recipe(Recipe(**priced), design=DESIGN).report
    assert report is not None
    assert spent == [1, 2, 4, 8]  # three decisions came before it
    assert report["cost"]["experiment"]["seconds"] == pytest.approx(15)


def test_where_nothing_pays_nothing_is_kept(recipe: Recipe) -> None:
    poor = recipe.model_copy(update={"plan": ["document_attention"]})
    climbed = hasten.gradual_optimize(poor, design=DESIGN)  # of a model too: hosts/test_gradual.py
    assert not len(climbed.plan)
    assert climbed.report is None


def test_what_cannot_be_compared_is_refused_in_a_sentence(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        ablate(recipe.model_copy(update={"plan": []}))
    with pytest.raises(InputError, match="nothing to compare"):
        greedy_recipe(recipe.model_copy(update={"plan": []}))
    with pytest.raises(InputError, match="is not in the plan"):
        ablate(recipe, only=["muon"])
    assert log(tmp_path) == []


def test_variants_start_with_the_recipe_s_transport_as_a_training_does(recipe: Recipe) -> None:
    transport = {"GLOO_SOCKET_IFNAME": "eth0"}
    job = recipe.model_copy(update={"transport": transport})
    subject = ExperimentSubject(job, job_context(language_job()), Plan(()), "data")
    assert subject.environment(subject.plan) == transport


def test_variants_of_two_ranks_have_the_ranks_own_layout_as_their_baseline(
    recipe: Recipe, tmp_path: Path
) -> None:
    two = recipe.model_copy(update={"nproc": 2, "plan": ["packed", "ddp"]})
    found = read_report(ablate(two, design=DESIGN))
    assert found["design"]["ranks"] == 2
    assert [variant["techniques"] for variant in found["variants"]] == [[], ["packed"]]
    with pytest.raises(InputError, match="nothing to compare"):
        ablate(two.model_copy(update={"plan": ["ddp"]}))
    sized = two.model_copy(update={"plan": [{"ddp": {"bucket_cap_mb": 5}}]})
    before = len(log(tmp_path))
    assert ablate(sized, design=DESIGN)["variants"][-1]["techniques"] == ["ddp(bucket_cap_mb=5)"]
    assert len(log(tmp_path)) > before


def test_turns_that_would_leave_exchanges_out_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    apart = recipe.model_copy(update={"nproc": 2, "plan": [{"local_steps": {"every": 6}}]})
    with pytest.raises(InputError, match=r"exchanges once in 6 steps.*give --steps 6"):
        ablate(apart, design=DESIGN)
    assert log(tmp_path) == []
    ablate(apart, design=Design(rounds=2, steps=12, warmup=1))
    assert log(tmp_path)


def test_an_experiment_starts_its_ranks_itself(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="an experiment starts its own"):
        ablate(recipe)


def test_each_rank_of_an_variant_knows_its_place_and_shares_the_cores(tmp_path: Path) -> None:
    one, two = (dict(place) for place in rank_variables(2, 4, tmp_path))
    assert (one["RANK"], two["RANK"]) == ("0", "1")
    assert one["WORLD_SIZE"] == two["OMP_NUM_THREADS"] == "2"
    assert one["HASTEN_RENDEZVOUS"] == two["HASTEN_RENDEZVOUS"]
    assert one["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert rank_variables(1, 4, tmp_path) == [{}]
