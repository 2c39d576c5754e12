"""A comparison of two checkouts finds what was planted, and hides only what is listed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.techniques import CATALOGUE
from script_modules import load

SCRIPTS = Path(__file__).parents[2] / "scripts"
Act = Callable[[Path], str]


items, worker = load("parity_items"), load("parity_worker")
parity = load("parity")


class FakeWorker:
    """Stands for the process of a checkout: a function writes into the folder and speaks."""

    def __init__(self, side: Path, act: Act, code: int = 0) -> None:
        self.side, self._act, self._code = side, act, code

    def run(self, item: Any, folder: Path, words: Any) -> dict[str, Any]:
        return {"exit code": self._code, "out": self._act(folder), "err": ""}


def compared(folder: Path, old: Act, new: Act, ends: tuple[int, int] = (0, 0), **item: Any) -> Any:
    """The outcome of one item; ``ends`` are the exit codes."""
    made = items.Item(**{"part": "training", "name": "one", "commands": (("train",),), **item})
    places = [folder / side for side in parity.SIDES]
    results = [
        parity.run_items(FakeWorker(place, act, code), [made])
        for place, act, code in zip(places, (old, new), ends, strict=True)
    ]
    return parity.compare(made.part, *results, tuple(places))


def writes(name: str, content: str | bytes) -> Act:
    def act(folder: Path) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return ""

    return act


def says(text: str) -> Act:
    return lambda folder: text


PLANTED: dict[str, tuple[str, Any, Any, str]] = {
    "the last bit": ("m.jsonl", '{"loss": 0.1}', '{"loss": 0.10000000000000002}', "m.jsonl/0/loss"),
    "a float for a whole number": ("a.json", '{"a": 1}', '{"a": 1.0}', "a.json/values/a"),
    "the order of keys": (
        *("a.json", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "a.json/values, order of keys"),
    ),
    "an indentation": ("a.json", '{"a": 1}', '{\n"a": 1}', "a.json/lines"),
    "a key that is gone": ("a.json", '{"a": 1}', "{}", "a.json/values/a"),
    "one more entry": ("a.json", "[1]", "[1, 2]", "a.json/values, length"),
    "a byte": ("w.safetensors", b"\xff\x00", b"\xff\x01", "w.safetensors"),
    "a word": ("a.yaml", "a: 1\nb: 2\n", "a: 1\nb: 3\n", "a.yaml, line 2"),
    "the end of a line": ("a.yaml", "a: 1\nb: 2\n", "a: 1\nb: 2", "a.yaml, line 2"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_difference_is_found_in_its_place(tmp_path: Path, case: str) -> None:
    name, old, new, place = PLANTED[case]
    (found,) = compared(tmp_path / "1", writes(name, old), writes(name, new)).differences
    assert found.place == f"files/{place}"
    assert found.old != found.new
    assert not compared(tmp_path / "2", writes(name, old), writes(name, old)).differences


def test_floats_are_told_to_the_last_bit(tmp_path: Path) -> None:
    numbers = 0.1, 0.10000000000000002
    acts = [writes("a.json", json.dumps(number)) for number in numbers]
    (found,) = compared(tmp_path, *acts).differences
    assert numbers[0].hex() in found.old
    assert numbers[1].hex() in found.new


def test_a_long_value_is_shown_from_where_the_two_part() -> None:
    shown = str(parity.Difference("report", "one", "page", "x" * 900 + "old", "x" * 900 + "new"))
    assert "xold" in shown
    assert "xnew" in shown
    assert len(shown) < 500


def test_a_file_that_one_side_alone_writes_is_a_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, writes("run/a.txt", "a"), writes("b.txt", "b")).differences
    assert [(one.place, parity.ABSENT in (one.old, one.new)) for one in found] == [
        ("files/run/a.txt", True),
        ("files/b.txt", True),
    ]


def test_exit_codes_and_words_are_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, says("error: no data"), says("error: no file"), (2, 1))
    assert [one.place for one in found.differences] == ["command 1/exit code", "command 1/out"]


def test_an_item_that_old_cannot_do_is_in_vain_unless_it_should_be_refused(tmp_path: Path) -> None:
    refused = says("no data"), says("no data"), (2, 2)
    found = compared(tmp_path / "1", *refused)
    assert (found.differences, found.in_vain) == ([], ["one, exit code 2: no data"])
    found = compared(tmp_path / "2", *refused, codes=(0, 2))
    assert (found.differences, found.in_vain, found.refusals) == ([], [], 1)


def test_an_item_whose_view_shows_nothing_is_in_vain(tmp_path: Path) -> None:
    views = {"view": lambda folder: json.loads((folder / "numbers.json").read_text())["steps"]}
    acts = writes("numbers.json", '{"steps": 5}'), writes("numbers.json", '{"steps": 6}')
    (found,) = compared(tmp_path / "1", *acts, compared=(), **views).differences
    assert (found.place, found.old, found.new) == ("view", "5", "6")
    acts = (writes("numbers.json", "{}"),) * 2
    assert compared(tmp_path / "2", *acts, **views).in_vain == ["one: KeyError: 'steps'"]


def test_what_is_copied_and_stays_as_it_was_is_not_compared(tmp_path: Path) -> None:
    made = tmp_path / "old" / "made" / "maker" / "run"
    made.mkdir(parents=True)
    for name in ("kept.txt", "changed.txt"):
        (made / name).write_text(name)
    edited: list[Path] = []
    acts = writes("run/changed.txt", "longer than before"), writes("run/changed.txt", "short")
    found = compared(tmp_path, *acts, copies={"run": "maker/run"}, edit=edited.append)
    assert [one.place for one in found.differences] == ["files/run/changed.txt"]
    assert [path.parents[1].name for path in edited] == list(parity.SIDES)


def test_a_command_that_one_side_alone_lists_is_a_difference(tmp_path: Path) -> None:
    def lists(*names: str) -> Act:
        text = "\n\nCommands:\n" + "".join(f"  {name}  Does it.\n" for name in names)
        return lambda folder: text if folder.name == "--help" else "Usage"

    item = items.help_of("")
    made = {"part": item.part, "name": item.name, "commands": item.commands, "listed": True}
    found = compared(tmp_path, lists("train", "plan"), lists("train"), **made)
    assert found.items == 3
    assert ("plan --help", "item") in [(one.item, one.place) for one in found.differences]


def test_every_entry_of_what_may_differ_has_a_reason_and_looks_for_one_thing() -> None:
    for allowed in parity.MAY_DIFFER:
        assert len(allowed.reason.split()) >= 3, allowed
        assert bool(allowed.key) != bool(allowed.pattern), allowed
    assert max(Counter(one.name for one in parity.MAY_DIFFER).values()) == 1


HIDDEN = {
    "seconds": ("training", writes("run/summary.json", '{"seconds": 1.5, "loss": 2}')),
    "a line of progress": ("training", says("  5%  step 1  ETA 3 s\ndone\n")),
    "speed": ("data", says("done: 5 steps, 50 tokens in 3 s, 1,200 tokens/s, peak 400 MB\n")),
}
CHANGED = {
    "seconds": writes("run/summary.json", '{"seconds": 9.5, "loss": 2}'),
    "a line of progress": says("done\n"),
    "speed": says("done: 5 steps, 50 tokens in 2 min, 900 tokens/s, peak 401 MB\n"),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_what_is_listed_may_differ_in_its_parts_and_nowhere_else(tmp_path: Path, case: str) -> None:
    part, old = HIDDEN[case]
    found = compared(tmp_path / "1", old, CHANGED[case], part=part)
    assert not found.differences
    assert found.used


def test_a_second_is_compared_where_nothing_is_measured(tmp_path: Path) -> None:
    old, new = (writes("plan.json", f'{{"step_seconds": {number}}}') for number in (1.5, 1.25))
    assert compared(tmp_path / "1", old, new, part="planner").differences
    assert not compared(tmp_path / "2", old, new, part="training").differences


def test_the_folder_of_each_side_may_differ_and_other_paths_may_not(tmp_path: Path) -> None:
    def path(folder: Path) -> str:
        return f"saved: {folder}/run"

    assert not compared(tmp_path / "1", path, path).differences
    assert compared(tmp_path / "2", says("saved: /a"), says("saved: /b")).differences


def test_each_part_has_items_with_names_of_their_own(tmp_path: Path) -> None:
    asked = {part: [worker.PROBES[probe]()] for part, probe in items.ASKED.items()}
    parts = {p: list(getattr(items, p)(tmp_path, *asked.get(p, ()))) for p in items.PARTS}
    made = {item.name for item in items.makers(tmp_path)}
    for part, several in parts.items():
        folders = Counter(parity._file_name(item.name) for item in several)
        assert max(folders.values()) == 1, part
        assert {item.part for item in several} == {part}
        assert {path.partition("/")[0] for i in several for path in i.copies.values()} <= made
        assert 1 <= len(items.sample(several)) <= 8 or part == "commands"
    imported = [item for item in parts["files"] if item.name.startswith("import")]
    assert (len(imported), len(parts["planner"]), len(parts["report"])) == (72, 20, 5)
    assert len(items.LISTS["bad"]) >= 30
    assert len(items.LISTS["plans"]) == 12


def test_every_technique_of_the_exam_is_trained() -> None:
    exam = load("exam", Path(__file__).parents[1] / "contract" / "test_techniques.py")
    plans = [items.LISTS["instead"].get(kind.name(), [kind.name()]) for kind in CATALOGUE]
    plans += [[more] for more in items.LISTS["more"]]
    trained = {t for plan in plans for t in Plan.from_list(plan, CATALOGUE)}
    changed = {kind for kind in CATALOGUE if kind.name() in items.LISTS["instead"]}
    assert {t for t in exam.INSTANCES if type(t) not in changed} <= trained
    assert {type(t) for t in trained} == set(CATALOGUE)


@pytest.mark.parametrize("name", worker.PLACES)
def test_every_internal_name_is_found_in_this_tree(name: str) -> None:
    assert worker.find(name) is not None


def test_a_name_that_is_nowhere_is_told_with_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker.PLACES, "gone", ("hasten.gone:gone", "hasten.core.job:gone"))
    with pytest.raises(LookupError, match="none of its places: hasten"):
        worker.find("gone")


def test_folders_that_are_no_checkouts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity.main([str(tmp_path), str(tmp_path)]) == 2
    assert "has no src/hasten" in capsys.readouterr().err


def test_the_record_of_an_experiment_is_cut_within_a_line(tmp_path: Path) -> None:
    events = [
        {"event": "turn", "variant": "all", "round": number, "n": 50 * "x"} for number in range(9)
    ]
    place = tmp_path / "run" / "experiments" / "key"
    place.mkdir(parents=True)
    lines = [json.dumps(one) for one in ({"record": 1, "key": "key"}, *events)]
    (place / "record.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("report.json", "report.html", "bundle.json"):
        (tmp_path / "run" / name).write_text("{}")
    items.cut_experiment(tmp_path)
    left = (place / "record.jsonl").read_text()
    assert left.count("\n") == 6
    assert not left.endswith("\n")
    assert not (tmp_path / "run" / "report.json").exists()
