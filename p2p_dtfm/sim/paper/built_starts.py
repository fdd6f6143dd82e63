"""Where the search for a paper placement begins: regions chained, dealt and packed, speeds layered.

Annealing alone rarely finds that a run of stages could lie within fast neighbourhoods. Each edge
between two groups is as slow as its slowest pair, and improves only when all its pairs are fast. So
such runs are built. For a threshold, take the graph of the pairs that are faster. Its components
hold so many disjoint chains of L peers. If there are as many chains as replicas, they make a run of
L stages whose edges are all fast. What is left is packed again, at last in the order of a chain.

The contrary matters as much. A peer that is slow to all others slows its group, and both edges of
that group. So slow peers are put together in as few groups as hold them. Exchanges of two peers
rarely lead there, either.
"""

from collections.abc import Iterator
from typing import NamedTuple

from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.sim.paper.cost import PaperProblem

THRESHOLDS = 24
MOST_LAYERS = 3
"""The most layers in a layered start, besides the fastest one."""
Placement = tuple[int, ...]
"""Peers of the first stage, then of the second, and so on."""


class _Choices(NamedTuple):
    """How one packing decides. None stands for the rule instead of chance."""

    thresholds: list[int]
    prng: Prng | None


class Packer:
    """Builds starts for one problem."""

    def __init__(self, problem: PaperProblem) -> None:
        count = problem.peer_count
        table = problem.pipeline_ns
        self.stages, self.replicas = problem.stage_count, problem.replica_count
        self.pair = [list(table[a * count : (a + 1) * count]) for a in range(count)]
        self.nearest = [
            min(length for b, length in enumerate(row) if b != a) for a, row in enumerate(self.pair)
        ]
        lengths = sorted(set(table) - {0}) or [0]
        self.thresholds = lengths
        if len(lengths) > THRESHOLDS:  # the lower half, since fast pairs make neighbourhoods
            self.thresholds = [
                lengths[(len(lengths) - 1) * at // (2 * THRESHOLDS)] for at in range(THRESHOLDS)
            ]

    def starts(self, prng: Prng, packings: int, layerings: int) -> Iterator[Placement]:
        """Distinct placements, the plainest first. Packings and layerings are made by chance."""
        seen: set[Placement] = set()
        for placement in self._all_starts(prng, packings, layerings):
            if placement not in seen:
                seen.add(placement)
                yield placement

    def _all_starts(self, prng: Prng, packings: int, layerings: int) -> Iterator[Placement]:
        count = self.stages * self.replicas
        yield tuple(range(count))
        chain = self.chain(list(range(count)))
        yield tuple(chain)
        yield tuple(
            chain[r * self.stages + s] for s in range(self.stages) for r in range(self.replicas)
        )
        for at in range(0, len(self.thresholds), 2):
            yield self._pack(_Choices(self.thresholds[: at + 1], None))
            yield self._pack(_Choices(self.thresholds[at : at + 1], None))
        for _ in range(packings):
            picked = {prng.below(len(self.thresholds)) for _ in range(1 + prng.below(3))}
            yield self._pack(_Choices([self.thresholds[at] for at in sorted(picked)], prng))
        for _ in range(layerings):
            yield self._layered(prng)

    def _layered(self, prng: Prng) -> Placement:
        """Peers ordered by their own best pair, the slowest first, and cut into layers at random
        speeds.

        Within a layer they are chained or shuffled. The slow groups lie at one end of the path or,
        dealt out in turn, at both.
        """
        levels = sorted(set(self.nearest), reverse=True)
        count = 1 + prng.below(MOST_LAYERS)
        least = {levels[prng.below(len(levels))] for _ in range(count)}
        left = list(range(self.stages * self.replicas))
        order: list[int] = []
        for nearest in [*sorted(least, reverse=True), 0]:
            layer = [peer for peer in left if self.nearest[peer] >= nearest]
            left = [peer for peer in left if self.nearest[peer] < nearest]
            if prng.below(2):
                prng.shuffle(layer)
                order += layer
            elif layer:
                order += self.chain(layer)
        size = self.replicas
        groups = [order[at * size : (at + 1) * size] for at in range(self.stages)]
        if prng.below(2):
            groups = groups[0::2] + groups[1::2][::-1]
        return tuple(peer for group in groups for peer in group)

    def _pack(self, choices: _Choices) -> Placement:
        left = list(range(self.stages * self.replicas))
        groups: list[list[int]] = []
        for threshold in choices.thresholds:
            while self.stages - len(groups) > 1:
                components = self._components(left, threshold)
                length = self._run_length(components, self.stages - len(groups), choices.prng)
                if length == 0:
                    break
                chains = self._chains(components, length, choices.prng)
                groups += [[chain[at] for chain in chains] for at in range(length)]
                used = {peer for chain in chains for peer in chain}
                left = [peer for peer in left if peer not in used]
        groups += self._rest(left, self.stages - len(groups), choices.prng)
        return tuple(peer for group in groups for peer in group)

    def _rest(self, left: list[int], groups: int, prng: Prng | None) -> list[list[int]]:
        chain = self.chain(left)
        if prng is not None and prng.below(10) < 3:
            return [chain[at::groups] for at in range(groups)]
        return [chain[at * self.replicas : (at + 1) * self.replicas] for at in range(groups)]

    def _run_length(self, components: list[list[int]], room: int, prng: Prng | None) -> int:
        """The longest run that the components can carry, or another by chance; 0 for none."""
        lengths = [
            length
            for length in range(room, 1, -1)
            if sum(len(component) // length for component in components) >= self.replicas
        ]
        if not lengths:
            return 0
        if prng is not None and prng.below(2):
            return lengths[prng.below(len(lengths))]
        return lengths[0]

    def _chains(
        self, components: list[list[int]], length: int, prng: Prng | None
    ) -> list[list[int]]:
        """One chain of `length` peers for each replica, where least is wasted or by chance."""
        able = [component for component in components if len(component) >= length]
        if prng is not None and prng.below(2):
            prng.shuffle(able)
        else:
            able.sort(key=lambda component: (len(component) % length, len(component), component))
        chains: list[list[int]] = []
        for component in able:
            if len(chains) >= self.replicas:
                break
            chain = self.chain(component)
            chains += [
                chain[at * length : (at + 1) * length] for at in range(len(component) // length)
            ]
        return chains[: self.replicas]

    def _components(self, peers: list[int], threshold: int) -> list[list[int]]:
        """Connected components of the pairs within `threshold`; each sorted."""
        left = list(peers)
        components: list[list[int]] = []
        while left:
            component = [left.pop(0)]
            for here in component:
                row = self.pair[here]
                near = [peer for peer in left if row[peer] <= threshold]
                if near:
                    component += near
                    left = [peer for peer in left if row[peer] > threshold]
            components.append(sorted(component))
        return components

    def chain(self, peers: list[int]) -> list[int]:
        """The peers chained from the first, each time to the nearest that is left."""
        left = sorted(peers)
        chain = left[:1]
        del left[:1]
        while left:
            row = self.pair[chain[-1]]
            nearest = min(left, key=row.__getitem__)
            left.remove(nearest)
            chain.append(nearest)
        return chain
