"""``hasten report`` of several runs, ``hasten speedup --rerun``, and the studies of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.report import report
from hasten.cli.rerun import conclusion
from hasten.measure.ablation import Design, Variant
from hasten.measure.experiment import Measured, design_words
from hasten.report.bundle import VariantChange, read_bundle
from hasten.report.runs import section, studies_of
from sample_data import small, small_recipe
from told import Hasten

pytestmark = pytest.mark.usefixtures("bf16_products")


def test_runs_are_compared_priced_and_their_differences_named(
    tmp_path: Path, hasten: Hasten
) -> None:
    (tmp_path / "price.yaml").write_text("currency: CNY\nper_device_hour: 0.6\n")
    path = small_recipe(tmp_path, price=str(tmp_path / "price.yaml"))
    for name, plan in (("a", "[]"), ("b", "[packed]")):
        code, out, err = hasten("train", path, f"output={tmp_path / name}", f"plan={plan}")
        assert code == 0, err
        assert "CNY" in out
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["cost"]["total"] == pytest.approx(0.6 * summary["seconds"] / 3600)
    assert summary["energy"]["kwh"] is None or summary["energy"]["kwh"] > 0
    assert summary["energy"]["source"]
    code, out, err = hasten("report", tmp_path / "a", tmp_path / "b")
    assert code == 0, err
    assert "differs in the recipe" in out
    assert "packed" in out
    assert "not fair" not in out
    code, out, _ = hasten("report", "--json", tmp_path / "a", tmp_path / "b")
    found = json.loads(out)
    assert [row["steps"] for row in found["runs"]] == [3, 3]
    assert list(found["differs"]) == ["plan"]
    assert found["runs"][0]["tokens"] == found["runs"][1]["tokens"] == found["equal"]["value"]
    code, out, _ = hasten("report", "--json", tmp_path / "a")
    assert json.loads(out)["steps"] == 3
    code, _, err = hasten("report", tmp_path / "a", tmp_path / "nothing")
    assert code == 2
    assert "holds no run" in err


def pretend(monkeypatch: pytest.MonkeyPatch, gain: list[float]) -> None:
    """Experiments are measured at once: eight rounds in which every plan has the gain."""

    def measured(at: Any, plans: Any, design: Design, *others: Any, **named: Any) -> Measured:
        base = [1000.0 + 10 * i for i in range(design.rounds)]
        variants = []
        for name, plan in plans.items():
            own = [v * (gain[0] + i / 1000) if len(plan) else v for i, v in enumerate(base)]
            effective = [{"technique": t.name(), "effective": True, "evidence": ""} for t in plan]
            kind = named["kinds"][name]
            variants.append(
                Variant(
                    name, plan, rounds=own, baseline_rounds=base, effective=effective, kind=kind
                )
            )
        return Measured(variants, design_words([], next(iter(plans)), design))

    monkeypatch.setattr("hasten.measure.recipe_experiment.measure_variants", measured)


def test_an_experiment_is_stored_done_again_and_a_planted_loss_is_exit_code_4(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = [1.5]
    pretend(monkeypatch, gain)
    price = {"currency": "CNY", "per_device_hour": 0.6}
    path = small_recipe(tmp_path, plan=["packed", "autocast"], price=price)
    kept_there = tmp_path / "before"
    code, _, err = hasten("speedup", path, "--design", "all", "--bundle", kept_there)
    assert code == 0, err
    stored = read_bundle(kept_there)
    assert stored == read_bundle(tmp_path / "run")
    assert next(iter(stored.plans)) == "baseline"
    assert list(stored.plans)[-1] == "all"
    assert [Path(str(s["path"])).name for s in stored.data] == ["gsm8k_train.jsonl"]
    cost = json.loads((tmp_path / "run" / "report.json").read_text())["cost"]
    assert cost["payback"]["text"]
    assert cost["experiment"]["money"] == pytest.approx(0.6 * cost["experiment"]["seconds"] / 3600)
    again = ("--output", tmp_path / "again")
    code, out, err = hasten("speedup", "--rerun", kept_there, *again)
    assert code == 0, out + err
    assert "since then: the same versions" in out
    assert "nothing lost by more than 2%" in out
    assert "baseline again" not in out
    gain[0] = 1.3
    code, out, err = hasten("speedup", "--rerun", tmp_path / "run", "--rounds", "5", *again)
    assert code == 4, out + err
    assert "lost: only packed, without packed, all" in out
    code, out, err = hasten("speedup", "--rerun", kept_there, "--tolerance", "0.2", *again)
    assert code == 0, out + err


def test_nothing_is_said_to_have_kept_its_gain_that_is_not_known_to() -> None:
    same, open_ = VariantChange("a", "same"), VariantChange("b", "undecided")
    assert conclusion([same], 0.005) == "nothing lost by more than 0.5%"
    assert (
        conclusion([same, open_], 0.02)
        == "nothing lost by more than 2%; undecided or not measured: b"
    )
    assert conclusion([same, open_, VariantChange("c", "lost")], 0.02) == "lost: c"


def test_a_climb_that_keeps_nothing_says_that_there_is_no_report(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, [1.0])
    path = small_recipe(tmp_path, plan=["packed"])
    asked = ("--design", "greedy", "--no-verify", "--json")
    code, out, err = hasten("speedup", path, *asked)
    assert code == 0, err
    assert "kept: nothing" in err
    assert "no report was written" in err
    assert json.loads(out) is None


def test_json_is_all_that_stdout_has_and_output_names_the_folder(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, [1.2])
    path, folder = small_recipe(tmp_path, plan=["packed"]), tmp_path / "elsewhere"
    code, out, err = hasten("speedup", path, "--no-verify", "--json", "-o", folder)
    assert code == 0, out + err
    report = json.loads(out)
    assert report == json.loads((folder / "report.json").read_text())
    assert report["variants"]
    assert f"report: {folder / 'report.html'}" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--order", "gain"), "give --design greedy"),
        (("--tolerance", "0.1"), "--tolerance: it has no effect without --rerun"),
        (("--no-verify", "--seeds", "3"), "leave --no-verify out"),
        (("--design", "greedy", "--only", "packed"), "shorten the plan"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(
    tmp_path: Path, hasten: Hasten, words: tuple[str, ...], said: str
) -> None:
    code, _, err = hasten("speedup", small_recipe(tmp_path, plan=["packed"]), *words)
    assert code == 2
    assert said in err
    assert not (tmp_path / "run" / "experiments").exists()


def test_the_articles_plan_puts_their_promises_beside_what_was_measured(
    tmp_path: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, [1.2])
    code, out, err = hasten("speedup", small_recipe(tmp_path), "plan=article")
    assert code == 0, out + err
    claims = json.loads((tmp_path / "run" / "report.json").read_text())["claims"]
    said = {c["claimed"]: c for c in claims}
    assert said["+12 % speed"]["verdict"].startswith("not comparable: needs several ranks")
    assert said["12.5 -> 18.4 it/s, +47 %"]["verdict"] == "fell short"
    assert any(c["verdict"].startswith("not comparable") for c in claims)
    assert {c["technique"].partition("(")[0] for c in claims} >= {"autocast", "fused_layers"}
    two = ("plan=article", "nproc=2", "--no-verify", "--design", "single")
    code, out, err = hasten("speedup", small_recipe(tmp_path), *two)
    assert code == 0, out + err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = {c["technique"].partition("(")[0]: c for c in report["claims"]}
    assert (rows["topk"]["claimed"], rows["topk"]["verdict"]) == ("1.12×", "held")
    assert "the whole plan" in rows
    assert report["design"]["ranks"] == 2
    assert "2 ranks in each variant" in out
    code, _, err = hasten("speedup", small_recipe(tmp_path), "plan=articel")
    assert code == 2
    assert "did you mean 'article'" in err


def test_other_data_and_other_settings_are_refused(tmp_path: Path, hasten: Hasten) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n')
    values = small(tmp_path, dataset=str(data), plan=["packed"])
    bundle = {
        "bundle": 1,
        "recipe": values,
        "plans": {"baseline": [], "plan": ["packed"]},
        "kinds": {},
        "design": {},
        "measured": {
            n: {"rounds": [1], "baseline_rounds": [1], "idle": []} for n in ("baseline", "plan")
        },
        "versions": {},
        "hardware": {},
        "data": [{"path": str(data), "bytes": 1, "sha256": "0"}],
    }
    kept_there = tmp_path / "bundle.json"
    kept_there.write_text(json.dumps(bundle))
    for words, said in (
        ((), "is not the file of the experiment"),
        (("dataset=/nothing.jsonl",), "is missing"),
        (("seed=3",), "of a stored experiment only"),
        (("--tolerance", "2"), "--tolerance"),
        (("--only", "packed"), "--only: it has no effect with --rerun"),
    ):
        code, _, err = hasten("speedup", "--rerun", kept_there, *words)
        assert code == 2
        assert said in err
    code, _, err = hasten("speedup", "--rerun", tmp_path / "data.jsonl")
    assert code == 2
    assert "can't be read" in err or "not a bundle" in err


SPEED = {
    "said": "1.500× of the speed with PRECISION=autocast. 3 trials; 3 trials were done.",
    "trials": [
        {"log_rate": None, "changes": {"ACTIVATION_CHECKPOINTING": "activation_checkpointing"}},
        {"log_rate": 0.4055, "changes": {"PRECISION": "autocast"}},
        {"log_rate": 0.0, "changes": {}},
    ],
}


def keep(run: Path, name: str, study: Any, at: float) -> Path:
    path = run / "studies" / name / "study.json"
    path.parent.mkdir(parents=True)
    path.write_text(study if isinstance(study, str) else json.dumps(study))
    os.utime(path, (at, at))
    return path


def test_studies_are_told_newest_first_with_their_best_trials(tmp_path: Path) -> None:
    keep(tmp_path, "a", SPEED, 100)
    keep(tmp_path, "b", {**SPEED, "said": "No significant difference"}, 200)
    text = section(studies_of(tmp_path))
    assert text.index("study: No significant") < text.index("study: 1.500×")
    assert "1.500× in its trial  PRECISION=autocast" in text
    assert text.index("PRECISION=autocast\n") < text.index("as the recipe\n")
    assert str(tmp_path / "studies" / "a" / "study.json") in text


def test_a_run_without_studies_has_no_section(tmp_path: Path) -> None:
    assert section(studies_of(tmp_path)) == ""


def test_of_many_studies_the_newest_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    for number in range(5):
        keep(tmp_path, f"{number}", {**SPEED, "said": f"number {number}"}, number)
    text = section(studies_of(tmp_path))
    assert "number 4" in text
    assert "number 1" not in text
    assert "2 older studies" in text


@pytest.mark.parametrize(
    "damaged",
    [
        "not JSON",
        "[]",
        json.dumps({"trials": [{"log_rate": "fast"}]}),
        json.dumps({"trials": 5}),
        json.dumps({"trials": [{"log_rate": 1e9, "changes": {}}]}),
        json.dumps({"trials": [{"log_rate": 1.0, "changes": []}]}),
    ],
)
def test_a_damaged_study_is_named_and_the_others_are_told(tmp_path: Path, damaged: str) -> None:
    keep(tmp_path, "bad", damaged, 200)
    keep(tmp_path, "good", SPEED, 100)
    text = section(studies_of(tmp_path))
    assert "PRECISION=autocast" in text
    assert "bad" in text


def test_the_report_of_a_recipe_that_was_only_tuned_is_its_studies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep(tmp_path, "a", SPEED, 100)
    report([tmp_path])
    assert capsys.readouterr().out.startswith("study: 1.500×")
    report([tmp_path], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"studies": {str(path.parent): SPEED}}
