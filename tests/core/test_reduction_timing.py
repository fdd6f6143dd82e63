"""Reductions timed link by link, against times worked out by hand."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.cost_model.placement_problem import (
    UNLIMITED_BYTES_PER_S,
    PlanningProblem,
    problem_of,
)
from p2p_dtfm.core.cost_model.reduction_timing import Reduction, reduced_ns
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS
from p2p_dtfm.core.protocol.records import Link
from tests.core.planning import Peer, snapshot

SECOND = 1_000_000_000
LATENCY_NS = 5_000_000
BOTH_NS = 2 * (LATENCY_NS + MESSAGE_NS)
"""The messages of a one-chunk gradient and of its sum, besides the time that their bytes take."""


def problem(count: int, uplink_bytes_per_s: int = 0) -> PlanningProblem:
    """A problem with links of 10 bytes per second and 5 ms one way."""
    peers = [Peer(uplink_bytes_per_s=uplink_bytes_per_s)] * count
    return problem_of(snapshot(peers, link=Link(2 * LATENCY_NS, 10)))


def test_two_holders_send_a_part_and_a_sum_each() -> None:
    halves = Reduction((0, 1), (1, 1), 200)
    assert reduced_ns(problem(2), [halves], {0: 0, 1: 0}) == 20 * SECOND + BOTH_NS


def test_a_holder_that_is_ready_early_has_sent_its_gradient_before() -> None:
    halves = Reduction((0, 1), (1, 1), 200)
    late = reduced_ns(problem(2), [halves], {0: 0, 1: 50 * SECOND})
    assert late == 70 * SECOND + BOTH_NS, "the late one sends its gradient and its sum"
    thirds = Reduction((0, 1, 2), (1, 1, 0), 200)
    late = reduced_ns(problem(3), [thirds], {0: 0, 1: 0, 2: 50 * SECOND})
    assert late == 70 * SECOND + BOTH_NS, "parts this small travel in one chunk"
    many = Reduction((0, 1, 2), (1, 1, 0), 200 << 20)
    whole_ns = (100 << 20) * SECOND // 10
    late = reduced_ns(problem(3), [many], {0: 0, 1: 0, 2: 2 * whole_ns})
    assert late == pytest.approx(3 * whole_ns + whole_ns // 32, rel=1e-6), "in 32 of them"


def test_an_uplink_is_shared_by_all_that_a_holder_sends() -> None:
    parts = Reduction((0, 1, 2), (1, 1, 1), 300)
    free = reduced_ns(problem(3), [parts], dict.fromkeys(range(3), 0))
    shared = reduced_ns(problem(3, uplink_bytes_per_s=10), [parts], dict.fromkeys(range(3), 0))
    assert free == 20 * SECOND + BOTH_NS
    assert shared == 40 * SECOND + 2 * LATENCY_NS


def test_segments_of_one_pair_follow_one_another() -> None:
    """The second segment's gradients set out before the first one's sums, which hides a latency."""
    one, other = Reduction((0, 1), (1, 1), 200), Reduction((0, 1), (1, 1), 100)
    whole = reduced_ns(problem(2), [one, other], {0: 0, 1: 0})
    assert whole == 30 * SECOND + LATENCY_NS + 4 * MESSAGE_NS


def test_without_limits_nothing_but_latency_is_left() -> None:
    limited = problem(2)
    rates = ((UNLIMITED_BYTES_PER_S,) * 2,) * 2
    unlimited = replace(limited, links=replace(limited.links, bytes_per_s=rates))
    spent = reduced_ns(unlimited, [Reduction((0, 1), (1, 1), 200)], {0: 0, 1: 0})
    assert LATENCY_NS <= spent <= 2 * BOTH_NS + 10
