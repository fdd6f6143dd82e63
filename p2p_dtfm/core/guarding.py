"""What a lone pipeline's guardians cost a step.

With one pipeline every layer has one holder, who says Prepared only when its guardian has the
step's gradients (`guardians`). They set out uncoded when the stage has done its last backward:

    Prepared of a stage = its end + gradient / rate of the link + there and back

Where several send to one guardian they share its downlink. A guardian that could not keep up never
gets in place, and nobody waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.guardians import assigned, keeps_up
from p2p_dtfm.core.problem import MESSAGE_NS, UNLIMITED_BYTES_PER_S, Problem, duration_ns
from p2p_dtfm.core.workload import STATE_COPIES


@dataclass(frozen=True, slots=True)
class Guarded:
    """One holder's gradients, on their way to its guardian; peers are numbers."""

    holder: int
    guardian: int
    size_bytes: int
    bytes_per_s: int
    round_trip_ns: int

    @property
    def transfer_ns(self) -> int:
        return MESSAGE_NS + duration_ns(self.size_bytes, self.bytes_per_s)


def guarded_by(
    problem: Problem, peers: tuple[int, ...], cuts: tuple[int, ...], in_flight: tuple[int, ...]
) -> tuple[Guarded, ...]:
    """Of each stage of the only pipeline, in order; without those that nobody can guard."""
    count = problem.peer_count
    sizes = {
        peer: sum(
            problem.layer_bytes(layer).guarded_bytes for layer in range(cuts[at], cuts[at + 1])
        )
        for at, peer in enumerate(peers)
    }
    watchers = problem.watchers
    room = dict(enumerate((*problem.memory_bytes, *watchers.memory_bytes)))
    for at, peer in enumerate(peers):
        first, end = cuts[at], cuts[at + 1]
        room[peer] -= problem.state_bytes(first, end)
        room[peer] -= in_flight[at] * problem.saved_bytes(first, end)
    candidates = sorted(watchers.order, key=lambda peer: peer in sizes)
    wanted = {peer: STATE_COPIES * size for peer, size in sizes.items()}
    found = []
    for holder, guardian in assigned(wanted, candidates, room).items():
        if guardian < count:
            rate = problem.bytes_per_s[holder][guardian]
            latency = problem.latency_ns
            round_trip = latency[holder][guardian] + latency[guardian][holder]
        else:
            rate = watchers.bytes_per_s[holder][guardian - count]
            round_trip = watchers.round_trip_ns[holder][guardian - count]
        found.append(Guarded(holder, guardian, sizes[holder], rate, round_trip))
    return tuple(found)


def in_place(guarded: Sequence[Guarded], step_ns: int) -> tuple[Guarded, ...]:
    """Those that keep up with steps of this length."""
    return tuple(g for g in guarded if keeps_up(g.size_bytes, g.transfer_ns, step_ns))


def guarded_ns(problem: Problem, guarded: Sequence[Guarded], ends_ns: dict[int, int]) -> int:
    """When the last receipt is back; 0 if there is none to wait for."""
    last = 0
    busy: dict[int, int] = {}
    for each in sorted(guarded, key=lambda each: (ends_ns[each.holder], each.holder)):
        arrived = ends_ns[each.holder] + each.transfer_ns
        downlink = downlink_of(problem, each.guardian)
        if downlink < UNLIMITED_BYTES_PER_S:
            begins = max(busy.get(each.guardian, 0), ends_ns[each.holder])
            busy[each.guardian] = begins + duration_ns(each.size_bytes, downlink)
            arrived = max(arrived, busy[each.guardian])
        last = max(last, arrived + each.round_trip_ns)
    return last


def downlink_of(problem: Problem, peer: int) -> int:
    """Of any member, by its number."""
    both = (*problem.downlink_bytes_per_s, *problem.watchers.downlink_bytes_per_s)
    return both[peer]
