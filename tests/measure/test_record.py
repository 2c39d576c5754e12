"""The record: what a kill leaves is a whole experiment's beginning, and a second start ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.measure.ablation import Design
from hasten.measure.experiment import design_words
from hasten.measure.record import ExperimentRecord
from hasten.measure.rounds import Rounds, variants_of
from simulation import KINDS, NAMES, PLANS, log, pretend

DESIGN = Design(rounds=4, steps=2, warmup=1, evaluations=2)
TWO = {name: PLANS[name] for name in ("baseline", "all")}


class Killed(BaseException):
    """Like a kill: nobody catches it."""


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The record of a finished experiment."""
    path = tmp_path / "record.jsonl"
    with ExperimentRecord(path, "k") as record:
        pretend(tmp_path, DESIGN, plans=TWO, record=record)
    return path.read_bytes()


def test_a_finished_experiment_answers_from_its_record(tmp_path: Path, whole: bytes) -> None:
    began = len(log(tmp_path))
    with ExperimentRecord(tmp_path / "record.jsonl", "k") as record:
        found = pretend(tmp_path, DESIGN, plans=TWO, record=record)
    assert len(log(tmp_path)) == began  # no process was started
    assert [len(variant.rounds) for variant in found.variants] == [4, 4]
    assert not found.design["resumed"]
    assert (tmp_path / "record.jsonl").read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 3])
def test_after_a_kill_only_the_missing_rounds_are_measured(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "record.jsonl"

    def tell(text: str, share: float) -> None:
        if text.startswith(f"round {kept + 1}/"):
            raise Killed

    with ExperimentRecord(path, "k") as record, pytest.raises(Killed):
        pretend(tmp_path, DESIGN, plans=TWO, record=record, tell=tell)
    with path.open("ab") as file:
        file.write(b'{"event": "turn", "variant": "base')  # in the middle of a line
    with ExperimentRecord(path, "k") as record:
        found = pretend(tmp_path, DESIGN, plans=TWO, record=record)
        rounds = Rounds(record.events, "baseline", DESIGN)
    assert [len(variant.rounds) for variant in found.variants] == [4, 4]
    assert [key for key in rounds.complete("all") if key[0] == 1] == [
        (1, number) for number in range(1, kept + 1)
    ]
    assert found.design["resumed"]
    for variant in found.variants:
        tokens = [at for at, _ in variant.losses]
        assert tokens == sorted(set(tokens))  # one sitting's curve, not two glued together
        assert variant.eval_data[-1][0] == tokens[-1]


def test_after_a_kill_at_the_end_the_techniques_are_asked_once_more(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"

    def tell(text: str, share: float) -> None:
        if text == "finishing all":
            raise Killed

    with ExperimentRecord(path, "k") as record, pytest.raises(Killed):
        pretend(tmp_path, DESIGN, plans=TWO, record=record, tell=tell)
    before = len(log(tmp_path))
    with ExperimentRecord(path, "k") as record:
        found = pretend(tmp_path, DESIGN, plans=TWO, record=record)
    assert log(tmp_path)[before:] == [f"start {NAMES['all']}", f"steps {NAMES['all']} 1"]
    assert found.variants[-1].ledger is not None
    assert found.variants[-1].eval_data[-1][0] == found.variants[-1].losses[-1][0] == 90


@given(share=st.floats(0, 1))
def test_any_beginning_of_a_record_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    whole = _recorded(tmp_path_factory)
    cut = int(share * len(whole))
    path = tmp_path_factory.mktemp("cut") / "record.jsonl"
    path.write_bytes(whole[:cut])
    with ExperimentRecord(path, "k") as record:
        events = list(record.events)
    variants = variants_of(events, TWO, KINDS, DESIGN)
    assert len(variants[0].rounds) == len(variants[1].rounds) <= DESIGN.rounds
    assert design_words(events, "baseline", DESIGN)["rounds"] == DESIGN.rounds
    text = path.read_text()
    assert text.endswith("\n")
    assert all(json.loads(line) for line in text.splitlines())


_KEPT: list[bytes] = []


def _recorded(factory: pytest.TempPathFactory) -> bytes:
    if not _KEPT:
        folder = factory.mktemp("whole")
        with ExperimentRecord(folder / "record.jsonl", "k") as record:
            pretend(folder, DESIGN, plans=TWO, record=record)
        _KEPT.append((folder / "record.jsonl").read_bytes())
    return _KEPT[0]


def test_the_record_of_another_experiment_is_not_touched(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(InputError, match="another experiment"):
        ExperimentRecord(tmp_path / "record.jsonl", "other")
    assert (tmp_path / "record.jsonl").read_bytes() == whole


@pytest.mark.parametrize("content", ["[1]\n", "hello\n", '{"record": 1}\n', '{"key": "k"}\n7\n'])
def test_a_file_that_is_no_record_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="not the record of an experiment"):
        ExperimentRecord(path, "k")


def test_a_record_of_a_later_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"record": 3, "key": "k"}\n{"event": "run", "at": 0.0}\n')
    before = path.read_bytes()
    with pytest.raises(InputError, match="version 3"):
        ExperimentRecord(path, "k")
    assert path.read_bytes() == before


def test_a_folder_that_takes_no_files_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        ExperimentRecord(tmp_path / "file" / "record.jsonl", "k")


def test_a_full_disk_in_a_turn_loses_that_turn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    with ExperimentRecord(path, "k") as record:
        append, seen = record.append, []

        def full(event: str, **details: object) -> None:
            seen.append(event)
            if seen.count("turn") == 4:
                raise OSError(28, "No space left on device")
            append(event, **details)

        monkeypatch.setattr(record, "append", full)
        with pytest.raises(OSError, match="No space"):
            pretend(tmp_path, DESIGN, plans=TWO, record=record)
    with ExperimentRecord(path, "k") as record:
        assert len(Rounds(record.events, "baseline", DESIGN).complete("all")) == 1
        assert [
            len(a.rounds) for a in pretend(tmp_path, DESIGN, plans=TWO, record=record).variants
        ] == [*(4, 4)]


def test_an_experiment_needs_no_file(tmp_path: Path) -> None:
    found = pretend(tmp_path, Design(rounds=1, steps=1), plans=TWO)
    assert not (tmp_path / "record.jsonl").exists()
    assert len(found.variants[0].rounds) == 1
