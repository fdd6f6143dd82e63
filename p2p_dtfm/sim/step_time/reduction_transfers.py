"""Reducing each segment's gradients among its holders, in virtual time.

- flat: each of h holders owns 1/h of the segment, receives that part from all others and sends
  them the sum.
- weighted: the same with parts sized for the links (`core.cost_model.segment_weights`).
- central: one holder receives everything and sends the sum back (a parameter server).
- hierarchical: central within each group of the scenario, weighted among the groups' first.
- chain: DT-FM's: reduced along the holders in order, then broadcast back, each as a stream of
  small chunks, so the slowest link of the chain sets the time.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S
from p2p_dtfm.core.cost_model.segment_weights import segment_weights
from p2p_dtfm.core.cost_model.step_timing import StepAtWork
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.core.virtual.exchange import ShardedExchange, StarExchange
from p2p_dtfm.sim.scenario.execution import ReductionKind
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.step_time.step_work import SegmentWork
from p2p_dtfm.sim.step_time.timeline import ReductionSpan

Contribute = Callable[[int], None]


class _Segment:
    """A segment, or a piece of one, on its way."""

    __slots__ = ("contribute", "end_ns", "left", "start_ns", "work")

    def __init__(self, work: SegmentWork) -> None:
        self.work = work
        self.left = len(work.holders)
        """Holders that do not have the sum yet."""
        self.start_ns: int | None = None
        self.end_ns = 0
        self.contribute: Contribute = lambda peer: None


class Reductions:
    """All segments of a step."""

    def __init__(
        self,
        step: StepAtWork,
        scenario: Scenario,
        segments: tuple[SegmentWork, ...],
        kind: ReductionKind,
    ) -> None:
        self._step = step
        self._time = step.time
        self._network = step.network
        self._scenario = scenario
        self._of_layer: dict[tuple[int, int], _Segment] = {}
        """By holder and the layer that is final last."""
        self._segments = [_Segment(work) for work in segments]
        self._weights: dict[int, dict[int, int]] = {}
        """For a weighted reduction: each holder's weight, by its segment's first layer."""
        self.reduced_ns = 0
        """When the last holder had its last sum."""
        prepare = {
            "chain": self._chain,
            "central": self._central,
            "flat": self._flat,
            "weighted": self._weighted,
            "hierarchical": self._hierarchical,
        }[kind]
        for segment in self._segments:
            for peer in segment.work.holders:
                self._of_layer[peer, segment.work.first_layer] = segment
            if len(segment.work.holders) > 1:
                segment.contribute = prepare(segment)
            else:
                segment.contribute = self._sum_of(segment)

    def contribute(self, layer: int, peer: int) -> None:
        """Note that this peer's own gradients of the segment, or piece, that begins at `layer` are
        whole."""
        segment = self._of_layer[peer, layer]
        if segment.start_ns is None:
            segment.start_ns = self._time.now_ns
        segment.contribute(peer)

    def spans(self) -> tuple[ReductionSpan, ...]:
        """The spans of segments with more than one holder."""
        spans: dict[int, ReductionSpan] = {}
        for piece in self._segments:
            work, start_ns = piece.work, piece.start_ns or 0
            if len(work.holders) < 2:
                continue
            held = spans.get(work.segment)
            if held is None:
                held = ReductionSpan(work.segment, work.holders, 0, start_ns, piece.end_ns)
            spans[work.segment] = replace(
                held,
                gradient_bytes=held.gradient_bytes + work.gradient_bytes,
                start_ns=min(held.start_ns, start_ns),
                end_ns=max(held.end_ns, piece.end_ns),
            )
        return tuple(spans.values())

    def _sum_of(self, segment: _Segment) -> Contribute:
        def sum_arrived(peer: int) -> None:
            segment.left -= 1
            assert segment.left >= 0, "a holder has the sum once"
            segment.end_ns = self.reduced_ns = self._time.now_ns
            self._step.note_ready(peer)

        return sum_arrived

    def _chain(self, segment: _Segment) -> Contribute:
        holders = segment.work.holders
        waiting = set(holders)
        sum_arrived = self._sum_of(segment)

        def contribute(peer: int) -> None:
            waiting.remove(peer)
            if not waiting:
                segment.start_ns = self._time.now_ns
                spent_ns = chain_ns(self._scenario, holders, segment.work.gradient_bytes)
                for holder in holders:
                    self._time.at(segment.start_ns + spent_ns, sum_arrived, holder)

        return contribute

    def _central(self, segment: _Segment) -> Contribute:
        holders, size = segment.work.holders, segment.work.gradient_bytes
        centre = min(holders, key=lambda peer: (self._slowest_spoke_ns(peer, holders, size), peer))
        star = StarExchange(
            self._network,
            centre,
            holders,
            size,
            lambda _: star.broadcast(self._sum_of(segment)),
        )
        return star.contribute

    def _flat(self, segment: _Segment) -> Contribute:
        holders = segment.work.holders
        return self._sharded(segment, holders, (1,) * len(holders), self._sum_of(segment))

    def _weighted(self, segment: _Segment) -> Contribute:
        if not self._weights:
            self._weights = self._divided()
        holders = segment.work.holders
        weights = tuple(self._weights[segment.work.segment][holder] for holder in holders)
        return self._sharded(segment, holders, weights, self._sum_of(segment))

    def _divided(self) -> dict[int, dict[int, int]]:
        """The parts of whole segments. Each piece of a segment is divided alike."""
        sizes: dict[int, int] = {}
        holders: dict[int, tuple[int, ...]] = {}
        for work in (each.work for each in self._segments if len(each.work.holders) > 1):
            sizes[work.segment] = sizes.get(work.segment, 0) + work.gradient_bytes
            holders[work.segment] = tuple(sorted(work.holders))
        divided = [(holders[first], size) for first, size in sizes.items()]
        found = segment_weights(divided, self._pair_rate, self._limit)
        return {
            first: dict(zip(holders[first], weights, strict=True))
            for first, weights in zip(sizes, found, strict=True)
        }

    def _hierarchical(self, segment: _Segment) -> Contribute:
        groups: dict[str, list[int]] = {}
        for peer in segment.work.holders:
            groups.setdefault(self._scenario.peers[peer].group, []).append(peer)
        stars: dict[int, StarExchange] = {}
        sum_arrived = self._sum_of(segment)
        leaders = tuple(members[0] for members in groups.values())
        if len(leaders) > 1:
            (weights,) = segment_weights([(leaders, 1)], self._pair_rate, self._limit)
            gathered = self._sharded(
                segment, leaders, weights, lambda leader: stars[leader].broadcast(sum_arrived)
            )
        else:

            def gathered(leader: int) -> None:
                stars[leader].broadcast(sum_arrived)

        size, of_member = segment.work.gradient_bytes, {}
        for members in groups.values():
            star = StarExchange(self._network, members[0], tuple(members), size, gathered)
            stars[members[0]] = star
            of_member.update(dict.fromkeys(members, star))
        return lambda peer: of_member[peer].contribute(peer)

    def _sharded(
        self,
        segment: _Segment,
        holders: tuple[int, ...],
        weights: tuple[int, ...],
        has_all: Contribute,
    ) -> Contribute:
        size = segment.work.gradient_bytes
        return ShardedExchange(self._network, holders, weights, size, has_all).contribute

    def _pair_rate(self, a: int, b: int) -> int:
        return min(self._link_rate(a, b), self._link_rate(b, a))

    def _limit(self, peer: int) -> int:
        here = self._scenario.peers[peer]
        limits = (here.uplink_bytes_per_s, here.downlink_bytes_per_s)
        return min(limit or UNLIMITED_BYTES_PER_S for limit in limits)

    def _link_rate(self, origin: int, to: int) -> int:
        peers = self._scenario.peers
        return self._scenario.link(peers[origin].name, peers[to].name).bytes_per_s

    def _slowest_spoke_ns(self, centre: int, holders: tuple[int, ...], size: int) -> int:
        others = [peer for peer in holders if peer != centre]
        rate = min(min(self._link_rate(a, centre), self._link_rate(centre, a)) for a in others)
        here = self._scenario.peers[centre]
        for shared in (here.uplink_bytes_per_s, here.downlink_bytes_per_s):
            rate = min(rate, shared // len(others)) if shared else rate
        return size * SECOND_NS // max(1, rate)


def chain_ns(scenario: Scenario, holders: tuple[int, ...], size: int) -> int:
    """DT-FM's reduction: `size` bytes along the chain of holders and back again."""
    peers = [scenario.peers[holder].name for holder in holders]
    rates, latency_ns = [], 0
    for origin, to in itertools.pairwise(peers):
        for a, b in ((origin, to), (to, origin)):
            rates.append(scenario.transfer_bytes_per_s(a, b))
            latency_ns += scenario.link(a, b).latency_ns
    return 2 * -(-size * SECOND_NS // min(rates)) + latency_ns
