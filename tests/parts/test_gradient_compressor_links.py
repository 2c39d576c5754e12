"""Compressed gradients over real links: bytes on the interface, a link that is cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from netlab import lab_with_links

JOBS = Path(__file__).parents[1] / "compression_link_jobs.py"


def command(*given: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", str(JOBS), *map(str, given)]


def answer(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def test_the_interface_counts_what_was_predicted_before_the_first_step() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="1gbit") as lab:
        for method in ("none", "bf16", "int8", "int4", "topk", "powersgd"):
            for result in lab.run(command("sent", method), seconds=120):
                assert result.code == 0, result.output
                found = answer(result.output)
                assert found["interface"] == pytest.approx(found["predicted"], rel=0.05), method
                assert found["collectives"] == pytest.approx(found["predicted"], rel=0.01), method


def test_a_link_that_is_cut_for_some_seconds_is_waited_for_and_one_for_good_is_an_error() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="100mbit") as lab:
        for heals in (True, False):
            running = lab.begin(command("steps", 30, 0.05, 60 if heals else 3), seconds=120)
            end = time.monotonic() + 60
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
                for rank, found in enumerate((one, other)):
                    assert f"rank {rank}: gradients could not travel" in found["error"]
