"""Random swarms over the ten cities of the paper's network, for the placement benchmarks."""

import random
from dataclasses import replace

from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioPeer

GBIT = 125_000_000
V100_FLOPS = 52_780_000_000_000


CAPS_GBIT = (0.3, 0.5, 1, 2, 5)
CAP_WEIGHTS = {
    "uneven": (1, 1, 1, 1, 1),
    "crowded": (1, 1, 1, 1, 1),
    "slow": (5, 3, 1, 1, 1),
    "fast": (1, 1, 2, 3, 5),
    "split": (1, 0, 0, 0, 1),
}
"""How likely each cap is, by kind of instance. `crowded` ones have most peers in three cities."""


def uneven_cities(seed: int, kind: str = "uneven", count: int = 64) -> Scenario:
    """Equal devices, unevenly over ten cities. Each has a cap on all its links."""
    chance = random.Random(f"{kind} {seed}")
    world = read_scenario("uneven-world")
    cities = list(dict.fromkeys(peer.group for peer in world.peers))
    weights = [0.05 + chance.random() ** 2 for _ in cities]
    if kind == "crowded":
        full = chance.sample(range(len(cities)), 3)
        weights = [1 if city in full else 0.1 for city in range(len(cities))]
    homes = sorted(chance.choices(range(len(cities)), weights, k=count))
    peers = []
    for number, home in enumerate(homes):
        cap = int(chance.choices(CAPS_GBIT, CAP_WEIGHTS[kind])[0] * GBIT)
        name = f"{cities[home]}-{number + 1}"
        peers.append(ScenarioPeer(name, cities[home], V100_FLOPS, 16 * 10**9, 0, 0, cap))
    return replace(world, name=f"{kind}-{seed}", peers=tuple(peers), faults=())


def mixed_swarm(seed: int) -> Scenario:
    """4 to 64 peers in 1 to 10 cities, of mixed speed, memory, uplinks and link caps."""
    chance = random.Random(f"mixed {seed}")
    world = read_scenario("uneven-world")
    cities = list(dict.fromkeys(peer.group for peer in world.peers))
    chosen = chance.sample(cities, chance.randint(1, len(cities)))
    speeds: list[float] = chance.choice([[1.0], [1.0], [0.5, 1.0, 2.0], [0.2, 1.0], [0.25, 1.0]])
    memories: list[int] = chance.choice([[16], [8, 16, 24], [12, 48], [80]])
    uplinks: list[float] = chance.choice([[0], [0], [0, 0.02, 0.1, 1], [0.1, 0.5, 1]])
    caps: list[float] = chance.choice([[0], [0], [0.3, 0.5, 1, 2, 5]])
    count = chance.randint(4, 64)
    weights = [0.05 + chance.random() ** 2 for _ in chosen]
    homes = sorted(chance.choices(range(len(chosen)), weights, k=count))
    peers = tuple(
        ScenarioPeer(
            name=f"{chosen[home]}-{number + 1}",
            group=chosen[home],
            forward_flops=int(chance.choice(speeds) * V100_FLOPS),
            memory_bytes=chance.choice(memories) * 10**9,
            uplink_bytes_per_s=int(chance.choice(uplinks) * GBIT),
            downlink_bytes_per_s=0,
            link_cap_bytes_per_s=int(chance.choice(caps) * GBIT),
        )
        for number, home in enumerate(homes)
    )
    head = chance.random() < 0.3
    return replace(world, name=f"mixed-{seed}", peers=peers, faults=(), head=head)


def large_swarm(count: int) -> Scenario:
    """Ten cities; speeds, memories, uplinks and link caps all mixed."""
    chance = random.Random(f"large {count}")
    world = read_scenario("uneven-world")
    cities = list(dict.fromkeys(peer.group for peer in world.peers))
    homes = sorted(chance.choices(range(len(cities)), k=count))
    peers = tuple(
        ScenarioPeer(
            name=f"{cities[home]}-{number + 1}",
            group=cities[home],
            forward_flops=int(chance.choice([0.5, 1.0, 2.0]) * V100_FLOPS),
            memory_bytes=chance.choice([12, 24, 48]) * 10**9,
            uplink_bytes_per_s=int(chance.choice([0, 0.1, 1]) * GBIT),
            downlink_bytes_per_s=0,
            link_cap_bytes_per_s=int(chance.choice([0, 0.5, 1, 2]) * GBIT),
        )
        for number, home in enumerate(homes)
    )
    return replace(world, name=f"large-{count}", peers=peers, faults=())
