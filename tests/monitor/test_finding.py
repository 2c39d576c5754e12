"""Runs are found below a folder, and a folder without any is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.monitor import watching
from hasten.monitor.watching import check_places, find_runs
from watched import write_run


def test_a_run_is_named_by_its_folder_and_one_below_by_the_way(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "more" / "two")
    assert find_runs([one]) == {"one": one}
    assert find_runs([tmp_path]) == {"more/two": two, "one": one}


def test_runs_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert find_runs([one, two]) == {"run": one, str(two): two}
    assert find_runs([one, one]) == {"run": one}


def test_what_lies_inside_a_run_is_no_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_run(run / "previous" / "1")
    write_run(tmp_path / "previous" / "1")
    write_run(tmp_path / ".hidden")
    assert find_runs([tmp_path]) == {"run": run}


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert set(find_runs([tmp_path])) == {"run"}


def test_of_very_many_runs_the_newest_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST_RUNS", 2)
    for number in range(4):
        write_run(tmp_path / str(number))
    import os

    for number in range(4):
        for file in (tmp_path / str(number)).iterdir():
            os.utime(file, (number, number))
    assert set(find_runs([tmp_path])) == {"2", "3"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "there is no such folder"),
        (lambda p: p.write_text(""), "can't be looked into"),
        (lambda p: p.mkdir(), "no run is in it"),
        (lambda p: (p / "a/b/c/d/e/f").mkdir(parents=True), "no run is in it"),
    ],
)
def test_a_place_without_a_run_is_refused_in_one_sentence(
    tmp_path: Path, make: object, words: str
) -> None:
    place = tmp_path / "place"
    assert callable(make)
    make(place)
    with pytest.raises(InputError, match=words) as error:
        check_places([place])
    assert "\n" not in str(error.value)
