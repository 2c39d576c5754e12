"""A recipe's keys for what can go wrong: read, refused with advice, and put where they act."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.core.health import SpikePolicy, SpikeWatch
from hasten.core.loop import Evaluation
from hasten.errors import InputError
from hasten.recipe.build import supervision_of
from hasten.recipe.prepare import evaluations_before
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques.checkpoint import Checkpoints
from hasten.training.folder import LineFile, archive_previous_run, keep_lines_until
from hasten.training.run import _earlier_evaluations, set_step_checks, train, watch_notices
from sample_data import small
from tiny import language_job, session_of
from waiting import until

GOOD = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}


def recipe(**changes: Any) -> Any:
    return recipe_from({**GOOD, **changes}, "recipe.yaml")


def test_the_keys_reach_the_supervisor() -> None:
    keys = {"max_restarts": 4, "hang_seconds": 9, "start_seconds": 8, "nproc": 3, "min_nproc": 2}
    found = supervision_of(recipe(**keys))
    assert (found.max_restarts, found.fewest) == (4, 2)
    assert (found.limits.hang, found.limits.start) == (9, 8)


def test_loss_spike_takes_its_settings_and_goes_through_yaml() -> None:
    assert recipe().loss_spike is None
    assert recipe(loss_spike={}).loss_spike == SpikePolicy()
    found = recipe(loss_spike={"sigmas": 3, "skip_data": False})
    assert found.loss_spike == SpikePolicy(sigmas=3, skip_data=False)
    import yaml

    assert recipe_from(yaml.safe_load(found.to_yaml()), "again") == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_restarts": -1}, "max_restarts"),
        ({"hang_seconds": 0}, "hang_seconds"),
        ({"nproc": 2, "min_nproc": 3}, "min_nproc is 3, above nproc, which is 2"),
        ({"loss_spike": {"sigmaz": 3}}, "loss_spike"),
        ({"loss_spike": {"lower": 7}}, "lower is 7"),
        ({"loss_spike": True}, "loss_spike"),
        ({"leave_command": "rm x"}, "leave_command"),
        ({"check_replicas": -1}, "check_replicas"),
        ({"max_skipped": 0}, "max_skipped"),
        ({"max_restart": 1}, "did you mean 'max_restarts'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        recipe(**changes)


def test_guards_are_set_and_a_policy_without_checkpoints_is_refused(tmp_path: Path) -> None:
    bare = session_of(language_job(steps=2))
    set_step_checks(bare, recipe(max_skipped=4, check_replicas=6), tmp_path)
    guards = bare.setup.step_checks
    assert (guards.max_skipped, guards.replicas_every) == (4, 6)
    assert guards.quarantine == tmp_path / "quarantined.jsonl"
    with pytest.raises(InputError, match="loss_spike goes back to a checkpoint"):
        set_step_checks(bare, recipe(loss_spike={}), tmp_path)
    saving = session_of(language_job(steps=2), Checkpoints(), folder=tmp_path / "checkpoints")
    set_step_checks(saving, recipe(loss_spike={"at_most": 9}), tmp_path)
    assert isinstance(saving.setup.spike_policy, SpikeWatch)
    assert saving.setup.spike_policy.policy.at_most == 9


def test_a_file_to_leave_by_that_is_there_already_ends_the_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "leave").touch()
    session = session_of(language_job(steps=50))
    with watch_notices(session, recipe(leave_file=str(tmp_path / "leave"))):
        assert until(lambda: session.stop_requested)
    assert session.preempted
    assert session.stop_requested


def test_lines_of_steps_that_are_done_again_are_taken_out_and_half_a_line_too(
    tmp_path: Path,
) -> None:
    lines = LineFile(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        lines.add({"step": step, "loss": 1.0})
    LineFile(tmp_path / "evaluations.jsonl").add({"step": 5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    keep_lines_until(tmp_path, 4)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == [1, 2, 3, 4]
    assert (tmp_path / "evaluations.jsonl").read_text() == ""
    keep_lines_until(tmp_path / "empty", 4)  # nothing there, nothing to do


def test_lines_that_a_full_disk_does_not_take_follow_once_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    lines = LineFile(tmp_path / "metrics.jsonl")
    with pytest.warns(UserWarning, match="can't be written: No space left on device"):
        lines.add({"step": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        lines.add({"step": 2})
    lines._file = (tmp_path / "room").open("ab", buffering=0)
    lines.add({"step": 3})
    found = [json.loads(line) for line in (tmp_path / "room").read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3]


def test_an_attempt_knows_what_those_before_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "evaluations.jsonl"
    session = session_of(language_job(steps=2))
    assert evaluations_before(session, file, "eval_loss") == []
    lines = [
        *('{"step": 2, "tokens": 7, "eval_loss": 1.5, "own": 3}', '{"step": 3}', "[1]"),
        *('{"step": 3, "tokens": 8, "eval_loss": null}', "half a"),
        *('{"step": 4, "tokens": 9, "eval_loss": 1.0}',),
        *('{"step": 6, "tokens": 9, "eval_loss": 0.5}', '{"step": 7, "tok'),
    ]
    file.write_text("\n".join(lines))
    by_loss = [Evaluation(2, 7, 1.5), Evaluation(4, 9, 1.0), Evaluation(6, 9, 0.5)]
    assert evaluations_before(session, file, "eval_loss") == by_loss
    assert evaluations_before(session, file, "own") == [Evaluation(2, 7, 1.5, {"own": 3.0})]


@pytest.mark.parametrize(("last_loss", "kept"), [(2.0, ("best",)), (0.5, ())], ids=str)
def test_a_resumed_run_has_the_evaluations_up_to_its_step(
    tmp_path: Path, last_loss: float, kept: tuple[str, ...]
) -> None:
    """The best weights stay unless they are of a later step."""
    session = session_of(language_job(steps=2))
    session.progress.step = 4
    losses = {2: 1.5, 4: 1.0, 6: last_loss}
    lines = [{"step": step, "tokens": 7, "eval_loss": loss} for step, loss in losses.items()]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe: Any = SimpleNamespace(resume="auto", best_metric="eval_loss")
    earlier, keep = _earlier_evaluations(session, recipe, tmp_path)
    assert [evaluation.step for evaluation in earlier] == [2, 4]
    assert keep == ("evaluations.jsonl", *kept)


def test_what_went_wrong_moves_aside_with_the_run_it_is_of(tmp_path: Path) -> None:
    for name in ("quarantined.jsonl", "spikes.jsonl", "restarts.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "mine.txt").write_text("not of hasten")
    archive_previous_run(tmp_path, keep_checkpoints=False)
    assert len(list((tmp_path / "previous" / "1").iterdir())) == 4
    assert (tmp_path / "mine.txt").exists()


def test_links_that_wait_in_the_folder_are_not_written_through(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    output.mkdir()
    names = ["metrics.jsonl", "evaluations.jsonl", "recipe.yaml", "model", "summary.json"]
    for name in [*names, ".summary.json.0123.part"]:
        (output / name).symlink_to(elsewhere / name)  # to nothing
    archive_previous_run(output, keep_checkpoints=False)
    assert [path.name for path in output.iterdir()] == ["previous"]
    assert all((output / "previous" / "1" / name).is_symlink() for name in names)


def a_file(path: Path) -> None:
    path.write_text("")


def a_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("plant", [a_file, a_link])
def test_an_earlier_run_moves_into_no_file_and_through_no_link(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "metrics.jsonl").write_text("{}\n")
    plant(output / "previous")
    with pytest.raises(InputError, match=r"previous is no folder.*choose another output"):
        archive_previous_run(output, keep_checkpoints=False)
    assert (output / "metrics.jsonl").read_text() == "{}\n"
    assert not [*tmp_path.glob("elsewhere/*")]


def test_a_run_prepares_its_data_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    a_link(tmp_path / "run" / "data")
    with pytest.raises(InputError, match=r"data is a link.*give its target"):
        train(Recipe(**small(tmp_path)), tell=lambda text: None)
    assert not [*tmp_path.glob("elsewhere/*")]


def test_a_folder_in_the_place_of_a_file_of_the_run_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run" / "stop").mkdir(parents=True)
    with pytest.raises(InputError, match=r"can't write .*stop: .*; remove it, or choose another"):
        train(Recipe(**small(tmp_path)), tell=lambda text: None)


def test_a_run_that_was_not_done_is_moved_with_a_word_on_how_to_go_on(tmp_path: Path) -> None:
    def left(saved: bool, done: bool) -> str:
        for step in (5, 10) if saved else ():
            (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        if done:
            (tmp_path / "summary.json").write_text("{}")
        return archive_previous_run(tmp_path, keep_checkpoints=False)

    assert left(saved=False, done=False) == ""
    assert left(saved=True, done=True) == ""
    said = left(saved=True, done=False)
    newest = tmp_path / "previous" / "3" / "checkpoints" / "step-00000010"
    assert f"resume={newest} continues it" in said
    assert newest.is_dir()
    assert archive_previous_run(tmp_path, keep_checkpoints=False) == ""  # nothing is there any more
