"""The fault campaign's own arithmetic, and that it sees what a trainer does wrong."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from campaign import batch, lives, own, run, small_disk, table  # noqa: E402
from campaign.faults import FAULTS, TRAINERS, fault_named  # noqa: E402
from campaign.hasten_life import TRAINER, Hasten  # noqa: E402
from campaign.ledger import Ledger, line_of, read  # noqa: E402

import fault_kit  # noqa: E402
from fault_kit import EVERY, Tell, forked  # noqa: E402
from fault_kit import batch as batch_of_step  # noqa: E402

ABOUT = {"torch": "2"}


def line(fault: str = "kills", good: int = 3, bad: int = 0, **more: Any) -> dict[str, Any]:
    outcomes = [lives.outcome(True, "went on")] * good + [lives.outcome(False, "stuck", "x")] * bad
    return line_of("hasten", fault, 0, 2.0, {"outcomes": outcomes, **more}, ABOUT)


class Careless:
    """A trainer as many are: one file, written in place, read without a look."""

    steps = 12

    def train(self, folder: Path, steps: int, tell: Tell, poison: int | None = None) -> None:
        torch.set_num_threads(1)
        folder.mkdir(exist_ok=True)
        model, _ = fault_kit.build()
        file, begin = folder / "state.bin", 0
        if file.exists():
            flat = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
            torch.nn.utils.vector_to_parameters(flat[1:].clone(), model.parameters())
            begin = int(flat[0])
        tell(f"R {begin}")
        for step in range(begin + 1, steps + 1):
            x, y = batch_of_step(step)
            loss = torch.nn.functional.cross_entropy(model.eval()(x), y)
            tell(f"L {step} {loss.item().hex()}")
            if step % EVERY == 0:
                weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
                file.write_bytes(
                    torch.cat([torch.tensor([float(step)]), weights]).numpy().tobytes()
                )

    def newest(self, folder: Path) -> list[Path]:
        return [folder / "state.bin"]


class Short(Hasten):
    """A run of a few saves."""

    steps = 30


def test_half_a_line_is_cut_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for good in (3, 4):
        ledger.add(line(good=good))
    with ledger.path.open("ab") as file:
        file.write(b'{"trainer": "has')
    assert read(ledger.path) == ledger.lines
    again = Ledger(tmp_path)
    again.add(line(good=5))
    assert Ledger(tmp_path).tally("hasten", "kills").good == 12


def test_a_tally_counts_cases_kinds_and_words(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(line(good=2, bad=1))
    ledger.add(line("flips", good=9))
    found = ledger.tally("hasten", "kills")
    assert (found.cases, found.good) == (3, 2)
    assert found.kinds == {"went on": 2, "stuck": 1}
    assert found.words == ["stuck: x"]
    assert ledger.tally("transformers", "kills").cases == 0


def test_what_is_not_possible_here_is_no_batch(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(line("full-disk", good=0, skipped="no namespaces"))
    found = ledger.tally("hasten", "full-disk")
    assert (found.cases, found.skipped) == (0, "no namespaces")
    assert "not possible here" in table.table(ledger)


def test_the_table_has_a_row_for_each_fault_and_says_where_it_is_from(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert "nothing was run" in table.table(ledger)
    ledger.add(line(good=250))
    text = table.table(ledger)
    for fault in FAULTS:
        assert f"(`{fault.name}`)" in text
    assert "| 250 of 250 | not run | not run | 25% |" in text
    assert "torch 2" in text


def test_all_kinds_advance_alike_and_a_batch_that_is_done_is_left_out(tmp_path: Path) -> None:
    ledger, kinds = Ledger(tmp_path), [(fault_named(name), "hasten") for name in ("kills", "nan")]
    for number in (0, 2):
        ledger.add(line("kills") | {"batch": number})
    ledger.add(line("nan", good=0, skipped="no namespaces"))  # so it isn't done
    wanted = [(fault.name, number) for fault, _, number in run.batches_of(kinds, 0.4, ledger)]
    kills = [("kills", number) for number in range(16) if number not in (0, 2)]  # 400 cases by 25
    assert wanted == [("nan", 0), *kills[:7], ("nan", 1), *kills[7:]]


def test_batches_side_by_side_are_all_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=60)

    def done(self: run.Campaign, batch: run.Batch) -> dict[str, Any]:
        both.wait()  # neither ends before the other has begun
        return {"outcomes": [lives.outcome(True, "went on")]}

    monkeypatch.setattr(run.Campaign, "_batch", done)
    batches = [(fault_named(name), "hasten", 0) for name in ("kills", "configs")]
    ends = time.monotonic() + 60
    assert run.Campaign(Ledger(tmp_path), {"hasten": sys.executable}, ends, 2).run(batches) == 0
    assert {line["fault"] for line in Ledger(tmp_path).lines} == {"kills", "configs"}
    late = run.Campaign(Ledger(tmp_path / "late"), {"hasten": sys.executable}, 0.0)
    assert late.run(batches) == 0
    assert late.ledger.lines == []


def test_every_fault_names_a_function_and_every_trainer_of_it_a_number() -> None:
    for fault in FAULTS:
        assert set(fault.does) == set(fault.wanted) == set(fault.batch) <= set(TRAINERS)
        for place in fault.does.values():
            room, _, function = place.partition(".")
            assert callable(getattr({"lives": lives, "own": own}[room], function))


@pytest.mark.parametrize("name", ["kills", "kills_saving", "flips", "damages", "power_cuts"])
@pytest.mark.long
def test_a_few_cases_of_hasten_are_all_good(name: str, tmp_path: Path) -> None:
    found = getattr(lives, name)(Short(), random.Random(5), tmp_path, 3)
    assert [o["good"] for o in found] == [True] * 3, found


def test_a_disk_that_is_really_full_costs_hasten_nothing(tmp_path: Path) -> None:
    told, code = forked(lambda tell: small_disk.mount_small_disk(tmp_path, 1 << 20), None)
    if code:
        pytest.skip(f"no mount namespace here: {told}")
    assert os.listdir(tmp_path) == []
    found = lives.full_disks(TRAINER, random.Random(5), tmp_path, 2)
    assert [o["kind"] for o in found] == ["training went on, the next start went on"] * 2


@pytest.mark.long
def test_damage_that_nobody_looks_for_is_seen_by_the_campaign(tmp_path: Path) -> None:
    for name in ("flips", "damages"):
        (tmp_path / name).mkdir()
    found = lives.flips(Careless(), random.Random(5), tmp_path / "flips", 12)
    assert not any(o["good"] for o in found)
    assert "not noticed, other losses" in {o["kind"] for o in found}
    found = lives.damages(Careless(), random.Random(5), tmp_path / "damages", 8)
    assert lives.STUCK in {o["kind"] for o in found}


def test_own_faults_are_refused_and_skipped(tmp_path: Path) -> None:
    found = own.configs(random.Random(5), tmp_path, 40) + own.nans(random.Random(5), tmp_path, 3)
    assert [o for o in found if not o["good"]] == []


def test_a_batch_is_the_same_again_and_says_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = batch.done("hasten", "configs", 3, 10, tmp_path)
    assert batch.done("hasten", "configs", 3, 10, tmp_path) == first
    assert len(first["outcomes"]) == 10
    monkeypatch.setattr(own, "missing", lambda: "no namespaces")
    found = batch.done("hasten", "cut-link", 0, 3, tmp_path)
    assert found == {"outcomes": [], "skipped": "no namespaces"}
    assert json.dumps(found)
