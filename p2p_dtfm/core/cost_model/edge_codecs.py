"""In which codecs a pipeline may cross its boundaries, where the run allows several.

Fewer bytes help where a link holds up the pipeline; elsewhere, encoding only costs time. For a
given cut, a few assignments are worth timing:

- each edge takes the first codec, in the run's order, in which it holds up nobody: neither the
  busiest stage nor the slowest edge in its fewest bytes;
- each edge takes the codec in which a tensor arrives soonest, which counts where microbatches are
  few and filling the pipeline is most of the step;
- all edges take the same codec.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from p2p_dtfm.core.cost_model.codings import Coding, Codings, Edge, Edges
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns


class _Way(NamedTuple):
    """The way from one stage to a neighbour."""

    allowed: tuple[Coding, ...]
    bytes_per_s: int
    """The rate of one tensor; half a shared limit where a middle stage has two at a time."""
    sender_ns: int
    """A block's forward at the sender; `receiver_ns` at the receiver."""
    receiver_ns: int

    def sent_ns(self, coding: Coding) -> int:
        return MESSAGE_NS + duration_ns(coding.wire_bytes, max(1, self.bytes_per_s))

    def fewest_ns(self) -> int:
        return min(map(self.sent_ns, self.allowed))

    def first_within(self, limit_ns: int) -> Coding:
        return next(coding for coding in self.allowed if self.sent_ns(coding) <= limit_ns)

    def soonest(self) -> Coding:
        return min(self.allowed, key=self._there_ns)

    def _there_ns(self, coding: Coding) -> int:
        ends_ns = coding.encode_ns(self.sender_ns) + coding.decode_ns(self.receiver_ns)
        return ends_ns + self.sent_ns(coding)


def assignments(
    problem: PlanningProblem, codings: Codings, peers: tuple[int, ...], busiest_ns: int
) -> list[Edges]:
    """The assignments worth timing for these peers in this order; of equal ones, take the first.
    `busiest_ns` is how long the busiest peer computes a microbatch."""
    ways = list(_ways(problem, codings, peers))
    limit_ns = max(busiest_ns, *(way.fewest_ns() for pair in ways for way in pair))
    found = [
        _edges(ways, lambda way: way.first_within(limit_ns)),
        _edges(ways, _Way.soonest),
    ]
    found += ((Edge(*each),) * len(ways) for each in uniform_choices(codings))
    return list(dict.fromkeys(found))


def uniform_choices(codings: Codings) -> list[Edge]:
    """Edges with one codec both ways. Where the run does not allow it for gradients, these have the
    codec with the fewest bytes."""
    least = min(codings.gradients, key=lambda coding: coding.wire_bytes)
    by_name = {coding.name: coding for coding in codings.gradients}
    return [Edge(coding, by_name.get(coding.name, least)) for coding in codings.activations]


def _edges(ways: list[tuple[_Way, _Way]], choice: Callable[[_Way], Coding]) -> Edges:
    return tuple(Edge(choice(there), choice(back)) for there, back in ways)


def _ways(
    problem: PlanningProblem, codings: Codings, peers: tuple[int, ...]
) -> Iterator[tuple[_Way, _Way]]:
    """The ways of each edge, there and back."""
    last = len(peers) - 1

    def way(allowed: tuple[Coding, ...], sender: int, receiver: int) -> _Way:
        one, other = peers[sender], peers[receiver]
        sent, received = (1 if position in (0, last) else 2 for position in (sender, receiver))
        rate = min(
            problem.links.bytes_per_s[one][other],
            problem.links.uplink_bytes_per_s[one] // sent,
            problem.links.downlink_bytes_per_s[other] // received,
        )
        times = problem.devices.layer_ns
        ends = times[one].block_forward_ns, times[other].block_forward_ns
        return _Way(allowed, rate, *ends)

    for here, there in pairwise(range(len(peers))):
        yield way(codings.activations, here, there), way(codings.gradients, there, here)
