"""Real daemons on this machine that play a scenario: which daemon plays which peer, over which
links."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.shaping import Shape, ShapedLink, ShapedPeer
from p2p_dtfm.ports.granted import granted_processors
from p2p_dtfm.sim.scenario.scenario import Scenario

PLAYERS_LIMIT = 64
SHAPE_FILE = "shape.json"


@dataclass(frozen=True)
class PlayedPeer:
    """A daemon that plays a peer of the scenario. `arguments` are its own."""

    name: str
    home: Path
    arguments: tuple[str, ...]
    emulated: bool
    """Whether its device only takes the time of the device that the scenario names."""


def cast_scenario(scenario: Scenario, homes: list[Path], shape_path: Path) -> list[PlayedPeer]:
    """Gives each peer of the scenario an identity in a home of its own, and writes the shape file.

    It makes the identities before any daemon starts. So one file tells all daemons who is who, and
    no message between daemons has to. Raises `UserError`.
    """
    if len(scenario.peers) > PLAYERS_LIMIT:
        raise UserError(
            f"{scenario.name} has {counted(len(scenario.peers), 'peer')}; at most {PLAYERS_LIMIT} "
            "daemons are started on one machine",
            (
                f"copy the file and lower the counts of its groups to {PLAYERS_LIMIT} in all",
                f"or run it in virtual time: p2p-dtfm simulate {scenario.name}",
            ),
        )
    assert len(homes) == len(scenario.peers), "one home for each peer"
    peer_ids = {}
    for peer, home in zip(scenario.peers, homes, strict=True):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        peer_ids[peer.name] = Identity.load_or_create(Home(home).identity).peer_id
    shape_of(scenario, peer_ids).save(shape_path)
    players = []
    for peer, home in zip(scenario.peers, homes, strict=True):
        arguments = ["--shape", str(shape_path)]
        if peer.forward_flops is not None:
            arguments += ["--device", f"emulated:{peer.forward_flops / 1e12:.12g}"]
            arguments += ["--memory-gib", f"{peer.memory_bytes / (1 << 30):.3f}"]
        emulated = peer.forward_flops is not None
        players.append(PlayedPeer(peer.name, home, tuple(arguments), emulated))
    return players


def shape_of(scenario: Scenario, peer_ids: dict[str, str]) -> Shape:
    """The links of a scenario, between the identities that play its peers."""
    return Shape(
        scenario=scenario.name,
        peers=tuple(
            ShapedPeer(
                name=peer.name,
                peer_id=peer_ids[peer.name],
                uplink_bytes_per_s=peer.uplink_bytes_per_s,
                downlink_bytes_per_s=peer.downlink_bytes_per_s,
            )
            for peer in scenario.peers
        ),
        links=tuple(
            ShapedLink(peer_ids[one.name], peer_ids[two.name], link.latency_ns, link.bytes_per_s)
            for one, two in itertools.permutations(scenario.peers, 2)
            for link in (scenario.link(one.name, two.name),)
        ),
    )


def threads_of(players: list[PlayedPeer]) -> int:
    """CPU threads for each daemon that really computes."""
    computing = sum(not player.emulated for player in players) or len(players)
    return max(1, int(granted_processors()) // computing)
