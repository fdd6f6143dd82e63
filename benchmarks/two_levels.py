"""Would it pay to reduce within neighbourhoods first, and then between them?

    python -m benchmarks.two_levels [--quick] [--json]

For groups of holders drawn from the shipped scenarios and some made-up networks, the least time
that each way can take, by linear programming over how much each holder sums:

- direct: each holder owns a part and exchanges with all others (what the swarm does)
- two levels: members of a neighbourhood own parts of its sum; those with the same part in each
  neighbourhood, best-connected first, exchange with one another; then back

Latency is left out, of which two levels have more. Below 1.00 two levels would be faster.
"""

import argparse
import itertools
import json
import random
import statistics
from typing import Any

import numpy
from scipy.optimize import linprog

from p2p_dtfm.core.schedule.shard_weights import shard_weights
from p2p_dtfm.sim.scenario.files import read_scenario

SCENARIOS = (
    "three-homes", "two-cities", "uneven-world", "paper-2-spot", "paper-3-two-sites",
    "paper-4-regional", "paper-5-world-wide",
)  # fmt: skip
DRAWS = 30
DRAWS_QUICK = 5
UNLIMITED = 1e15
PAYS = 0.95
"""Below this ratio two levels would have been built."""
SCALE = 1e6
Table = Any


class Network:
    """Rates between holders in bytes/s, symmetric, their own limits, and their neighbourhoods."""

    def __init__(self, rates: Table, limits: Table, groups: list[str]) -> None:
        self.rates, self.limits, self.groups = rates, limits, groups
        self.count = len(groups)

    @classmethod
    def drawn(cls, name: str, chance: random.Random) -> "Network":
        """Some peers of some groups of a scenario."""
        scenario = read_scenario(name)
        groups = sorted({peer.group for peer in scenario.peers})
        chosen = chance.sample(groups, min(len(groups), chance.choice((2, 3, 4, 8))))
        size = chance.choice((2, 3, 4, 8))
        peers = []
        for group in chosen:
            members = [peer for peer in scenario.peers if peer.group == group]
            peers += chance.sample(members, min(size, len(members)))
        rates = numpy.full((len(peers), len(peers)), UNLIMITED)
        for a, b in itertools.permutations(range(len(peers)), 2):
            rates[a, b] = scenario.link(peers[a].name, peers[b].name).bytes_per_s
        limits = [min(p.uplink_bytes_per_s or UNLIMITED, p.downlink_bytes_per_s or UNLIMITED)
                  for p in peers]  # fmt: skip
        return cls(numpy.minimum(rates, rates.T), limits, [peer.group for peer in peers])

    @classmethod
    def gateways(
        cls, size: int, groups: int, mbps: tuple[int, int, int], uplink_mbps: int
    ) -> "Network":
        """A network with one well connected member in each neighbourhood. `mbps`: near, between
        these members, else."""
        near, between, thin = (125_000.0 * rate for rate in mbps)
        count = size * groups
        rates = numpy.full((count, count), thin)
        for a, b in itertools.product(range(count), repeat=2):
            if a // size == b // size:
                rates[a, b] = near
            elif a % size == b % size == 0:
                rates[a, b] = between
        limit = 125_000.0 * uplink_mbps if uplink_mbps else UNLIMITED
        return cls(rates, [limit] * count, [str(n // size) for n in range(count)])


class _Program:
    """Least T with `coefficients . shares + constant <= T * rate` for all, and shares that add to
    1."""

    def __init__(self, shares: int) -> None:
        self.shares = shares
        self.rows: list[Table] = []
        self.bounds: list[float] = []

    def carries(self, coefficients: dict[int, float], rate: float, constant: float = 0.0) -> None:
        row = numpy.zeros(self.shares + 1)
        for share, coefficient in coefficients.items():
            row[share + 1] = coefficient
        row[0] = -rate / SCALE
        self.rows.append(row)
        self.bounds.append(-constant)

    def least_s(self) -> float:
        """Seconds for each byte of the segment."""
        whole = numpy.ones((1, self.shares + 1))
        whole[0, 0] = 0.0
        cost = numpy.zeros(self.shares + 1)
        cost[0] = 1.0
        found = linprog(cost, A_ub=numpy.array(self.rows), b_ub=self.bounds, A_eq=whole, b_eq=[1.0])
        assert found.success, found.message
        return float(found.x[0]) / SCALE


def direct_s(network: Network) -> float:
    program = _Program(network.count)
    for a, b in itertools.combinations(range(network.count), 2):
        program.carries({a: 1, b: 1}, network.rates[a, b])
    for a, limit in enumerate(network.limits):
        program.carries({a: network.count - 2}, limit, 1.0)
    return program.least_s()


def planned_s(network: Network) -> float:
    """Seconds of the direct way, with the parts that the swarm takes."""
    rates = [[int(rate) for rate in row] for row in network.rates]
    weights = numpy.array(shard_weights(rates, [int(x) for x in network.limits]), dtype=float)
    weights /= weights.sum()
    pairs = itertools.combinations(range(network.count), 2)
    links = max((weights[a] + weights[b]) / network.rates[a, b] for a, b in pairs)
    own = max(
        (1 + (network.count - 2) * weights[a]) / limit for a, limit in enumerate(network.limits)
    )
    return float(max(links, own))


def two_levels_s(network: Network) -> float | None:
    """The least seconds over how many members of each neighbourhood own a part; None: nothing to
    divide."""
    members: dict[str, list[int]] = {}
    for peer, group in enumerate(network.groups):
        members.setdefault(group, []).append(peer)
    if len(members) < 2 or max(map(len, members.values())) < 2:
        return None
    ranked = [
        sorted(group, key=lambda peer: -_outward(network, peer)) for group in members.values()
    ]
    most = min(map(len, ranked))
    return min(_with_owners(network, ranked, owners) for owners in range(1, most + 1))


def _outward(network: Network, peer: int) -> float:
    others = [n for n, group in enumerate(network.groups) if group != network.groups[peer]]
    mean: float = numpy.mean([network.rates[peer, other] for other in others])
    return min(mean, network.limits[peer])


def _with_owners(network: Network, ranked: list[list[int]], owners: int) -> float:
    """Share n * groups + g is what the n-th owner of neighbourhood g sums of part n."""
    groups = len(ranked)
    program = _Program(owners * groups)

    def part(owner: int) -> dict[int, float]:
        if owner >= owners:
            return {}
        return {owner * groups + g: 1.0 for g in range(groups)}

    for owner in range(owners):
        for g, h in itertools.combinations(range(groups), 2):
            rate = network.rates[ranked[g][owner], ranked[h][owner]]
            program.carries({owner * groups + g: 1, owner * groups + h: 1}, rate)
    for g, group in enumerate(ranked):
        for (a, peer), (b, other) in itertools.combinations(enumerate(group), 2):
            program.carries(part(a) | part(b), network.rates[peer, other])
        near = len(group) - 1
        for a, peer in enumerate(group):
            # within: what others own, then sums to all; between: a share to each, and back
            carried = {share: (near - 1 if near else 0) + 1.0 for share in part(a)}
            if a < owners:
                carried[a * groups + g] += groups - 2
            program.carries(carried, network.limits[peer], 1.0 if near else 0.0)
    return program.least_s()


def row_of(name: str, networks: list[Network]) -> dict[str, Any]:
    """Ratios over the networks."""
    pairs = [(two_levels_s(each), direct_s(each), planned_s(each)) for each in networks]
    ratios = [two / direct for two, direct, _ in pairs if two is not None]
    planned = [planned / direct for _, direct, planned in pairs]
    return {
        "network": name,
        "least": round(min(ratios), 2),
        "median": round(statistics.median(ratios), 2),
        "most": round(max(ratios), 2),
        "parts_over_best": round(max(planned), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer draws")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(1)
    draws = DRAWS_QUICK if options.quick else DRAWS
    rows = [row_of(name, [Network.drawn(name, chance) for _ in range(draws)]) for name in SCENARIOS]
    for size, groups, mbps, uplink in (
        (4, 2, (10_000, 1_000, 100), 0),
        (4, 4, (10_000, 1_000, 500), 0),
        (4, 4, (10_000, 1_000, 100), 1_000),
    ):
        name = f"gateways: {groups} x {size}, {mbps} Mbit/s, uplinks {uplink or 'unlimited'}"
        rows.append(row_of(name, [Network.gateways(size, groups, mbps, uplink)]))
    if options.json:
        print(json.dumps({"rows": rows, "built_if_below": PAYS}))
        return 0
    print(f"{'two levels / direct, least time':60s} least median   most | our parts / best parts")
    for row in rows:
        figures = f"{row['least']:6.2f} {row['median']:6.2f} {row['most']:6.2f}"
        print(f"{row['network']:60s}{figures} | {row['parts_over_best']:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
