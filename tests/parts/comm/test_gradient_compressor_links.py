"""Compressed gradients over real links: bytes on the interface, a link that is cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.launch.lab import MODES
from labs import lab_with_links
from netlab import Lab
from parts.comm.compression_kit import METHODS

pytestmark = pytest.mark.waits

JOBS = Path(__file__).with_name("compression_link_jobs.py")


def command(*given: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", str(JOBS), *map(str, given)]


def answer(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def test_the_interface_counts_what_was_predicted_before_the_first_step() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="1gbit") as lab:
        results = lab.run(command("sent", *METHODS), seconds=240)
    assert [r.code for r in results] == [0, 0], [r.output for r in results]
    for result in results:
        for method, seen in answer(result.output).items():
            assert seen["interface"] == pytest.approx(seen["predicted"], rel=0.05), method
            assert seen["collectives"] == pytest.approx(seen["predicted"], rel=0.01), method


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_lab_counts_what_was_predicted(mode: Any) -> None:
    alone = mode == "loopback"
    try:
        lab = Lab(2, 1, None if alone else "1gbit", mode=mode).start()
    except InputError as error:
        pytest.skip(str(error))
    with lab:
        results = lab.run(command("loop", *METHODS), seconds=240)
        counted = lab.bytes(0)[0]
    assert [r.code for r in results] == [0, 0], [r.output for r in results]
    for found in (answer(r.output) for r in results):
        predicted = {method: seen["predicted"] for method, seen in found.items()}
        if alone:
            assert counted == pytest.approx(sum(predicted.values()), rel=0.001)
        else:
            seen = {method: seen["interface"] for method, seen in found.items()}
            assert seen == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_a_link_that_is_cut_for_some_seconds_is_waited_for_and_one_for_good_is_an_error() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="100mbit") as lab:
        for heals in (True, False):
            # Where it doesn't heal, more steps than are done before the link is cut.
            steps = ("steps", 30, 0.05, 60) if heals else ("steps", 5000, 0.05, 4)
            running = lab.begin(command(*steps), seconds=150)
            end = time.monotonic() + 100
            while not list(running.place.glob("*.step-5")):
                assert time.monotonic() < end, running.log(0).read_text()
                time.sleep(0.02)
            lab.cut(1)
            if heals:
                time.sleep(2)
                lab.heal(1)
            one, other = (answer(r.output) for r in running.wait())
            if heals:
                assert one == other
                assert not one["error"]
            else:
                for found in (one, other):  # both are alive and say so where they met
                    assert "averaging gradients failed though every rank is alive" in found["error"]
                    assert "rank 0: " in found["error"]
                    assert "rank 1: " in found["error"]
