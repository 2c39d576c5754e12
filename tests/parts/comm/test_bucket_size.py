"""What must hold of any choice of a bucket's size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.comm.link_model import LATENCY_SHARE, by_link, flat
from hasten.parts.comm.topology import Link, Topology

LINKS = st.builds(Link, st.floats(1e-6, 0.05), st.floats(1e5, 1e10))


def two_hosts(link: Link) -> Topology:
    return Topology(((0,), (1,)), link, link, "planted")


@given(LINKS)
def test_delays_take_a_tenth_of_a_bucket_by_the_link(link: Link) -> None:
    topology = two_hosts(link)
    chosen = by_link(topology).megabytes
    delays = 2 * link.latency
    share = delays / flat(topology, chosen * 2**18).seconds
    assert 1 <= chosen <= 256
    assert share <= LATENCY_SHARE * 1.001 or chosen == 256


def test_a_slow_link_without_delay_wants_small_buckets_and_delay_large_ones() -> None:
    quick = two_hosts(Link(1e-5, 12e6))
    slow = two_hosts(Link(0.02, 12e6))
    assert by_link(quick).megabytes == 1
    assert by_link(slow).megabytes > 1
