"""Compressed gradients, local steps and collectives over real links: bytes, links that are cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from labs import lab_with_links
from netlab import Lab
from netlab.lab import MODES

pytestmark = pytest.mark.waits

JOBS = Path(__file__).with_name("link_jobs.py")


def command(*given: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", str(JOBS), *map(str, given)]


def answers(results: Any) -> list[Any]:
    assert {r.code for r in results} == {0}, [r.output for r in results]
    return [json.loads(r.output.strip().splitlines()[-1]) for r in results]


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_lab_counts_what_was_predicted(mode: Any) -> None:
    alone = mode == "loopback"
    try:
        lab = Lab(2, 1, None if alone else "1gbit", mode=mode).start()
    except InputError as error:
        pytest.skip(str(error))
    with lab:
        ranks = answers(lab.run(command("compressed_loop", "none", "int4", "topk"), seconds=240))
        counted = lab.bytes(0)[0]
    for found in ranks:
        predicted = {method: seen["predicted"] for method, seen in found.items()}
        if alone:
            assert counted == pytest.approx(sum(predicted.values()), rel=0.001)
        else:
            seen = {method: seen["interface"] for method, seen in found.items()}
            assert seen == pytest.approx(predicted, rel=0.05)


SIZE = 4 * 500_000
# Bytes of a host's link / bytes of the tensor: a ring over four ranks carries 1.5 in good order and
# twice that in bad; hierarchy 1 and int4 an eighth of it, whatever the order. Headers come on top.
BOUNDS = {
    "none:hierarchical": (1.0, 1.03),
    "int4:hierarchical": (0.126, 0.14),
    "int8:hierarchical": (0.25, 0.27),
    "none:flat": (1.5, 1.57),  # its group is opened in the order of hosts
    "torch": (3.0, 3.2),  # ranks as they are numbered
}


def test_links_carry_what_the_formulas_say_in_the_worst_order_of_ranks() -> None:
    with lab_with_links(ranks=2, rate="1gbit", mtu=9000) as lab:
        found = answers(lab.run(command("reduced", 4, *BOUNDS), seconds=240))
    for case, (least, most) in BOUNDS.items():
        assert len({rank[case]["sum"] for rank in found}) == 1
        for rank in found:
            assert least < rank[case]["bytes"] / SIZE < most, case
    payload = 2 * found[0]["int4:hierarchical"]["payload"]  # of both ranks of a host
    assert payload / SIZE < found[0]["int4:hierarchical"]["bytes"] / SIZE < 1.1 * payload / SIZE


LIMIT = 2.0  # seconds until a rank that doesn't answer counts as gone
ENDLESS = 5000  # steps, more than are done before a link is cut


def test_a_cut_for_good_is_an_error_of_all_ranks_within_the_limit() -> None:
    with lab_with_links(hosts=2, ranks=1, rate="100mbit") as lab:
        running = lab.begin(command("steps", ENDLESS, 0.05, LIMIT), seconds=250)
        end = time.monotonic() + 150
        while not list(running.place.glob("*.step-5")):
            assert time.monotonic() < end, running.log(0).read_text()
            time.sleep(0.02)
        lab.cut(1)
        ranks = answers(running.wait())
    for found in ranks:
        said = found["error"]  # both are alive and say so where they met
        assert "averaging gradients failed though every rank is alive" in said
        assert "rank 0: " in said
        assert "rank 1: " in said
        # Ranks also ask each other who is missing, which takes as long again at most.
        assert found["seconds"] < 3 * LIMIT + 30
