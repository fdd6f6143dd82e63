"""What a lone pipeline's guardians cost a step.

With one pipeline every layer has one holder. The holder says Prepared only when its guardian has
the step's gradients (`guardians`). It sends them uncoded when its stage has done its last backward:

    Prepared of a stage = its end + gradient / rate of the link + there and back

Holders that send to one guardian share its downlink. Where all this would take more than 2% of the
step, guardians lag (`cuts`), and nobody waits for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.cuts import has_room_for_cuts, lags
from p2p_dtfm.core.cost_model.guardians import (
    GUARDED_COPIES,
    LEAST_ROOM_BYTES,
    May,
    Way,
    anybody,
    assigned,
)
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns
from p2p_dtfm.core.cost_model.tables.stage_memory import StageMemory

WAYS_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Guarded:
    """One holder's gradients, on their way to its guardian; peers are numbers."""

    holder: int
    guardian: int
    size_bytes: int
    bytes_per_s: int
    round_trip_ns: int
    may_lag: bool = True
    """Whether all stage-holders have room for copies of their own layers."""

    @property
    def transfer_ns(self) -> int:
        return MESSAGE_NS + duration_ns(self.size_bytes, self.bytes_per_s)


class Guarding:
    """The guardians of lone pipelines of one problem; a search asks for many."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        watchers = problem.watchers
        self._offers = problem.devices.offers
        memory_bytes = (*self._offers, *watchers.memory_bytes)
        self._room = dict(enumerate(memory_bytes)) | watchers.beside_bytes
        layers = map(problem.layers.of, range(problem.layer_count))
        self._sizes = [layer.guarded_bytes for layer in layers]
        self._downlinks = (
            *problem.links.downlink_bytes_per_s,
            *watchers.downlink_bytes_per_s,
        )
        self._ways: dict[tuple[int, int], tuple[int, int]] = {}
        self._may: May[int] = anybody if problem.ends is None else problem.may_have

    def by(
        self, peers: tuple[int, ...], cuts: tuple[int, ...], in_flight: tuple[int, ...]
    ) -> tuple[Guarded, ...]:
        """What each stage of the only pipeline sends its guardians, in order; without layers that
        nobody can guard."""
        watchers = self.problem.watchers
        held = {peer: list(range(cuts[at], cuts[at + 1])) for at, peer in enumerate(peers)}
        room = dict(self._room)
        for at, peer in enumerate(peers):
            if peer not in watchers.accelerated:
                stage = cuts[at], cuts[at + 1], in_flight[at]
                room[peer] -= self._memory(peer).used_bytes(*stage, self._offers[peer])
        others = [peer for peer in watchers.order if peer not in held]
        candidates = [*others, *(peer for peer in watchers.order if peer in held)]
        return guarded_of(held, candidates, room, self._sizes, self._way, self._may)

    def _memory(self, peer: int) -> StageMemory:
        devices = self.problem.devices
        return devices.stages.alone if peer in devices.processors else devices.stages

    def _way(self, holder: int, guardian: int) -> tuple[int, int]:
        """(bytes/s, round trip) from a holder to a guardian, remembered."""
        found = self._ways.get((holder, guardian))
        if found is None:
            if len(self._ways) > WAYS_LIMIT:
                self._ways.clear()
            found = self._ways[holder, guardian] = _link(self.problem, holder, guardian)
        return found

    def last_receipt_ns(self, guarded: Sequence[Guarded], ends_ns: dict[int, int]) -> int:
        """When the last receipt is back; 0 if there is none to wait for."""
        last = 0
        busy: dict[int, int] = {}
        for each in sorted(guarded, key=lambda each: (ends_ns[each.holder], each.holder)):
            arrived = ends_ns[each.holder] + each.transfer_ns
            downlink = self._downlinks[each.guardian]
            if downlink < UNLIMITED_BYTES_PER_S:
                begins = max(busy.get(each.guardian, 0), ends_ns[each.holder])
                busy[each.guardian] = begins + duration_ns(each.size_bytes, downlink)
                arrived = max(arrived, busy[each.guardian])
            last = max(last, arrived + each.round_trip_ns)
        return last


def guarded_of(
    held: Mapping[int, list[int]],
    candidates: Sequence[int],
    room_bytes: Mapping[int, int],
    sizes: Sequence[int],
    way: Way[int],
    may: May[int] = anybody,
) -> tuple[Guarded, ...]:
    """What each stage-holder that holds layers alone sends each guardian, in order.

    `room_bytes` is what stages leave of the members' memory, `sizes` each layer's reduced gradient.
    Earlier candidates come first (`guardians.assigned`).
    """
    room = {peer: max(LEAST_ROOM_BYTES, left) for peer, left in room_bytes.items()}
    guardians = assigned(held, candidates, room, lambda n: GUARDED_COPIES * sizes[n], way, may=may)
    sent: dict[tuple[int, int], int] = {}
    for holder, layers in held.items():
        for layer in layers:
            if layer in guardians:
                ends = holder, guardians[layer]
                sent[ends] = sent.get(ends, 0) + sizes[layer]
    for layer, guardian in guardians.items():
        room[guardian] -= GUARDED_COPIES * sizes[layer]
    own = {peer: sum(map(sizes.__getitem__, layers)) for peer, layers in held.items()}
    may_lag = has_room_for_cuts(own, room)
    return tuple(Guarded(*ends, size, *way(*ends), may_lag) for ends, size in sent.items())


def _link(problem: PlanningProblem, holder: int, guardian: int) -> tuple[int, int]:
    """(bytes/s, round trip) from a holder to a guardian."""
    other = guardian - problem.peer_count
    if other >= 0:
        watchers = problem.watchers
        return watchers.bytes_per_s[holder][other], watchers.round_trip_ns[holder][other]
    latency_ns = problem.links.latency_ns
    round_trip_ns = latency_ns[holder][guardian] + latency_ns[guardian][holder]
    return problem.links.bytes_per_s[holder][guardian], round_trip_ns


def waited_for(guarded: Sequence[Guarded], step_ns: int) -> tuple[Guarded, ...]:
    """The guardians that a step of `step_ns` waits for: all, or none where they lag since the step
    would wait too long."""
    waits_ns = (g.transfer_ns - MESSAGE_NS + g.round_trip_ns for g in guarded)
    may_lag = all(each.may_lag for each in guarded)
    return () if may_lag and lags(waits_ns, step_ns) else tuple(guarded)
