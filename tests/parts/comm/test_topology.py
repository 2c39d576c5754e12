"""Topologies, what the system says of links, and the cost model against counts made by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hasten.parts.comm.collective_plan import rail_order
from hasten.parts.comm.link_model import (
    bucket_bytes,
    flat,
    hierarchical,
    leader,
    route_costs,
)
from hasten.parts.comm.topology import (
    CHOICES,
    NAMED,
    Link,
    Topology,
    default_interface,
    host_name,
    hosts_of,
    with_detected_links,
    with_named_links,
)

FAST, SLOW = Link(1e-5, 1e10), Link(1e-4, 1.25e7)
MANY = 10**7

hosts_and_ranks = some.tuples(some.integers(1, 5), some.integers(1, 5))


def grid(hosts: int, ranks: int, dealt: bool = False) -> tuple[tuple[int, ...], ...]:
    if dealt:
        return tuple(tuple(range(h, hosts * ranks, hosts)) for h in range(hosts))
    return tuple(tuple(range(h * ranks, (h + 1) * ranks)) for h in range(hosts))


def counted_ring(hosts: tuple[tuple[int, ...], ...], order: tuple[int, ...], size: float) -> float:
    """Bytes that the busiest host sends in a ring all-reduce, message by message."""
    place = {rank: index for index, host in enumerate(hosts) for rank in host}
    sent = [0.0] * len(hosts)
    for _, at in itertools.product(range(2 * (len(order) - 1)), range(len(order))):
        one, other = order[at], order[(at + 1) % len(order)]
        if place[one] != place[other]:
            sent[place[one]] += size / len(order)
    return max(sent)


@given(hosts_and_ranks, some.booleans(), some.booleans())
def test_a_ring_costs_what_counting_its_messages_gives(
    shape: tuple[int, int], dealt: bool, ordered: bool
) -> None:
    topology = Topology(grid(*shape, dealt), FAST, SLOW, "")
    order = topology.order if ordered else tuple(range(topology.ranks))
    cost = flat(topology, MANY, ordered)
    assert cost.host_bytes == pytest.approx(counted_ring(topology.hosts, order, 4.0 * MANY))
    assert cost.link_seconds == pytest.approx(cost.host_bytes / SLOW.bandwidth)


@given(hosts_and_ranks)
def test_hierarchy_sends_as_much_as_one_rank_per_host_would(shape: tuple[int, int]) -> None:
    hosts, ranks = shape
    topology = Topology(grid(hosts, ranks), FAST, SLOW, "")
    numbers = 1000 * hosts * ranks
    expected = 2 * (hosts - 1) / hosts * 4 * numbers
    for way in (hierarchical, leader):
        assert way(topology, numbers).host_bytes == pytest.approx(expected)


@given(hosts_and_ranks)
def test_rails_hold_every_rank_once_and_one_of_each_host(shape: tuple[int, int]) -> None:
    hosts, ranks = shape
    topology = Topology(grid(hosts, ranks, dealt=True), FAST, SLOW, "")
    order = rail_order(topology)
    assert sorted(order) == list(range(hosts * ranks))
    for start in range(0, len(order), hosts):
        rail = order[start : start + hosts]
        assert [topology.host_of(rank) for rank in rail] == list(range(hosts))


def test_a_ring_leaves_its_last_host_too() -> None:
    topology = Topology(((0,), (1, 2), (3,)), FAST, SLOW, "")
    assert topology.crossings((0, 1, 3, 2)) == 2  # from rank 1, and from rank 2 back to rank 0


def test_the_cheapest_way_depends_on_size_and_link() -> None:
    topology = Topology(grid(2, 8), FAST, SLOW, "")
    assert route_costs(topology, 1)[0].way == "leader"
    assert route_costs(topology, MANY)[0].way == "hierarchical"
    assert [c.way for c in route_costs(topology, MANY, on_nccl=True)] == ["flat"]
    one_host = Topology(grid(1, 4), FAST, SLOW, "")
    assert [c.way for c in route_costs(one_host, MANY)] == ["flat"]


@given(hosts_and_ranks, some.floats(1e-6, 0.1), some.floats(1e6, 1e11))
def test_latency_takes_a_tenth_of_a_bucket_at_most_unless_it_is_the_largest(
    shape: tuple[int, int], latency: float, bandwidth: float
) -> None:
    hosts, ranks = shape
    if hosts == 1:
        return
    topology = Topology(grid(hosts, ranks), FAST, Link(latency, bandwidth), "")
    size = bucket_bytes(topology)
    cost = flat(topology, size // 4)
    assert 2**20 <= size <= 2**28
    assert size == 2**28 or cost.fixed_seconds / cost.seconds < 0.1001


def test_hosts_are_told_apart_by_name_in_the_order_of_their_first_rank() -> None:
    assert hosts_of(["b", "a", "b", "a", "c"]) == ((0, 2), (1, 3), (4,))
    assert host_name() == host_name()
    topology = Topology(((0, 2), (1, 3)), FAST, SLOW, "")
    assert topology.crossings(topology.order) == 1
    assert topology.crossings((0, 1, 2, 3)) == 2


@pytest.mark.parametrize("name", NAMED)
def test_a_name_says_where_its_figures_are_from(name: str) -> None:
    topology = with_named_links(name, grid(2, 8))
    assert topology.source.startswith(f"{name}: ")
    assert topology.within.bandwidth > topology.between.bandwidth / 8
    assert name in CHOICES


def test_what_cannot_be_a_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="every rank from 0 on"):
        Topology(((0, 2),), FAST, SLOW, "")
    with pytest.raises(ValueError, match="no host may be empty"):
        Topology(((0,), ()), FAST, SLOW, "")
    with pytest.raises(ValueError, match="more than 0"):
        Link(0.0, 0.0)
    with pytest.raises(ValueError, match="same number of ranks"):
        hierarchical(Topology(((0, 1), (2,)), FAST, SLOW, ""), 10)


def test_the_default_route_names_an_interface(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    local = "eth1 0002000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    routes.write_text(head + local + "eth7 00000000 0102000A 0003 0 0 0 00000000 0 0 0\n")
    assert default_interface(routes) == "eth7"
    routes.write_text(head + local)
    assert default_interface(routes) == ""
    assert default_interface(tmp_path / "missing") == ""


def test_detection_says_what_it_assumed() -> None:
    topology = with_detected_links(grid(2, 1), interface="none-such")
    assert "none-such says nothing, assumed within" in topology.source
    assert "links of the GPUs" in with_detected_links(grid(2, 1), within=FAST).source
