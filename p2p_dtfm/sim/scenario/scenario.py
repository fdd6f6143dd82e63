"""A scenario: named peers, the directed link between any two of them, and faults to come.

It is read from a file (`scenario_file`). It means the same to the planner, to the simulator and to
the shaped transport of a real local swarm. Integers throughout: ns, bytes, bytes/s, operations/s.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.virtual.virtual_network import NetworkLines
from p2p_dtfm.sim.scenario.scenario_file import (
    LARGEST_SCENARIO,
    FaultTable,
    LinkTable,
    PeerTable,
    ScenarioFile,
    WrongTables,
    line_of,
    parse_scenario_file,
)

EVERYONE = "*"
DEFAULT_MEMORY_GB = 16.0
OF_TWO_PEERS = ("cut", "corrupt")
"""Faults of the links between two peers. All others happen to one peer, or to all its links."""

Table = TypeVar("Table")


@dataclass(frozen=True, slots=True)
class ScenarioPeer:
    """One peer. A rate of 0 is no limit."""

    name: str
    group: str
    forward_flops: int | None
    """Operations per second, sustained in a forward pass; None for this machine's own speed."""
    memory_bytes: int
    uplink_bytes_per_s: int
    downlink_bytes_per_s: int
    link_cap_bytes_per_s: int
    price_micro_per_hour: int = 0
    """In millionths of a dollar."""


@dataclass(frozen=True, slots=True)
class ScenarioLink:
    """The way from one peer to another."""

    latency_ns: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class ScenarioFault:
    """Something that happens to a peer, or to its links with `other`, when `at_step` begins."""

    at_step: int
    kind: str
    peer: str
    other: str
    factor: float
    steps: int
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """Peers in file order, and the links between them."""

    name: str
    description: str
    peers: tuple[ScenarioPeer, ...]
    links: dict[tuple[str, str], ScenarioLink]
    """Links by peer, group or `*`. `link` knows which of them counts."""
    faults: tuple[ScenarioFault, ...]
    head: bool = True
    """Whether the model ends in a language-model head (see `workload_in`)."""
    origin: str = ""
    """The file that the scenario was read from, for messages."""
    founder: str = ""
    """The name of the first peer of the file, whichever peers are taken away or come."""

    def __post_init__(self) -> None:
        if not self.founder and self.peers:
            object.__setattr__(self, "founder", self.peers[0].name)
        object.__setattr__(self, "_by_name", {peer.name: peer for peer in self.peers})
        object.__setattr__(self, "_found", {})

    def peer(self, name: str) -> ScenarioPeer:
        """The peer of a name. Raises `UserError` for a name that the scenario does not have."""
        by_name: dict[str, ScenarioPeer] = self._by_name  # type: ignore[attr-defined]
        if name not in by_name:
            known = ", ".join(list(by_name)[:8])
            raise UserError(f"{self.name} has no peer {name!r}", f"its peers: {known} ...")
        return by_name[name]

    def link(self, origin: str, to: str) -> ScenarioLink:
        """The link between two peers: the most particular that the file states, within the caps.

        Raises `UserError` if the file states none.
        """
        found: dict[tuple[str, str], ScenarioLink] = self._found  # type: ignore[attr-defined]
        link = found.get((origin, to))
        if link is None:
            link = found[origin, to] = self._resolve(self.peer(origin), self.peer(to))
        return link

    def transfer_bytes_per_s(self, origin: str, to: str) -> int:
        """The rate of one transfer at a time: the least of the link's rate, the origin's uplink and
        the other end's downlink. Raises as `link` does."""
        lines = (self.peer(origin).uplink_bytes_per_s, self.peer(to).downlink_bytes_per_s)
        return min(filter(None, (self.link(origin, to).bytes_per_s, *lines)))

    def _resolve(self, origin: ScenarioPeer, to: ScenarioPeer) -> ScenarioLink:
        assert origin.name != to.name, f"{origin.name} has no link to itself"
        for ends in _ends_by_rank(origin, to):
            stated = self.links.get(ends)
            if stated is not None:
                caps = (origin.link_cap_bytes_per_s, to.link_cap_bytes_per_s)
                rate = min([stated.bytes_per_s, *(cap for cap in caps if cap)])
                return ScenarioLink(stated.latency_ns, rate)
        raise UserError(
            f"{self.origin or self.name}: no link from {origin.name} to {to.name}",
            f'add [[link]] with from = "{origin.group}", to = "{to.group}", latency_ms and '
            'bandwidth_mbps (and both = true), or one with from = "*", to = "*" for all the rest',
        )

    def with_twins(self, twins: dict[str, str]) -> "Scenario":
        """The same with one more peer for each new name, with the device and the links of another
        peer.

        To the peer that it resembles, the new peer has that peer's shortest link.
        """
        model_of = {peer.name: peer.name for peer in self.peers} | twins
        links = dict(self.links)
        for new in twins:
            for other in model_of:
                if other != new:
                    links[new, other] = self._between(model_of[new], model_of[other])
                    links[other, new] = self._between(model_of[other], model_of[new])
        more = tuple(replace(self.peer(model), name=new) for new, model in twins.items())
        return replace(self, peers=(*self.peers, *more), links=links)

    def _between(self, origin: str, to: str) -> ScenarioLink:
        if origin != to:
            return self.link(origin, to)
        others = (self.link(origin, peer.name) for peer in self.peers if peer.name != origin)
        return min(others, key=lambda link: (link.latency_ns, -link.bytes_per_s))

    def with_link_efficiency(self, efficiency: float) -> "Scenario":
        """The same peers with every link, uplink and downlink at a fraction of its rate."""
        if not 0 < efficiency <= 1:
            raise UserError(f"link efficiency {efficiency} is not in (0, 1]", "try 0.85")

        def scaled(rate: int) -> int:
            return max(1, round(rate * efficiency)) if rate else 0

        peers = tuple(
            replace(
                peer,
                uplink_bytes_per_s=scaled(peer.uplink_bytes_per_s),
                downlink_bytes_per_s=scaled(peer.downlink_bytes_per_s),
                link_cap_bytes_per_s=scaled(peer.link_cap_bytes_per_s),
            )
            for peer in self.peers
        )
        links = {
            ends: replace(link, bytes_per_s=scaled(link.bytes_per_s))
            for ends, link in self.links.items()
        }
        return replace(self, peers=peers, links=links)

    def with_peers(self, names: tuple[str, ...]) -> "Scenario":
        """Only these peers, in this order."""
        return replace(self, peers=tuple(self.peer(name) for name in names))


def _ends_by_rank(origin: ScenarioPeer, to: ScenarioPeer) -> Iterator[tuple[str, str]]:
    """Ends of links, the most particular first. A peer's name beats its group's, which beats `*`;
    the origin counts first.

    Within a group a link counts only if it names the group (or a peer) at both ends, or `*` at
    both.
    """
    yield origin.name, to.name
    yield origin.name, to.group
    yield origin.group, to.name
    yield origin.group, to.group
    yield origin.name, EVERYONE
    yield EVERYONE, to.name
    if origin.group != to.group:
        yield origin.group, EVERYONE
        yield EVERYONE, to.group
    yield EVERYONE, EVERYONE


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises `UserError` naming the line and the fix."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the scenario file {path}: {error}",
            "give the path of a file like those in configs/scenarios/",
        ) from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, origin: str) -> Scenario:
    """A scenario from the text of its file; `origin` names the file in errors."""
    try:
        file = parse_scenario_file(text, origin)
    except WrongTables as error:
        if error.rest is None:
            raise
        crossing = _Builder(error.rest, text, origin).mistakes_found()
        raise WrongTables([*error.told, *crossing.items()], None) from error
    return _Builder(file, text, origin).build()


class _Builder:
    """Turns validated tables into a scenario, and checks what crosses tables."""

    def __init__(self, file: ScenarioFile, text: str, origin: str) -> None:
        self.file = file
        self.text = text
        self.origin = origin
        self.groups = {group.name: group.count for group in file.group}
        self.peers: dict[str, ScenarioPeer] = {}
        self.mistakes: dict[str, str] = {}
        """Fix by cause, in the order in which the mistakes were found."""

    def build(self) -> Scenario:
        """Build the scenario. Raises `UserError` that names every mistake."""
        scenario = self._build()
        if self.mistakes:
            raise UserError("\n".join(self.mistakes), tuple(dict.fromkeys(self.mistakes.values())))
        return scenario

    def mistakes_found(self) -> dict[str, str]:
        """The mistakes in a file some of whose tables are None."""
        self._build()
        return self.mistakes

    def _build(self) -> Scenario:
        for number, group in enumerate(self.file.group):
            for name in (group.name, *(f"{group.name}-{at + 1}" for at in range(group.count))):
                clash = name in self.peers or (name != group.name and name in self.groups)
                if clash or list(self.groups).index(group.name) != number:
                    self._refuse(("group", number, "name"), f"{name!r} names two things")
                if name != group.name:
                    self.peers[name] = ScenarioPeer(
                        name=name,
                        group=group.name,
                        forward_flops=_scaled(group.forward_tflops, 1e12) or None,
                        memory_bytes=_scaled(group.memory_gb or DEFAULT_MEMORY_GB, 1e9),
                        uplink_bytes_per_s=_rate(group.uplink_mbps),
                        downlink_bytes_per_s=_rate(group.downlink_mbps),
                        link_cap_bytes_per_s=_rate(group.link_cap_mbps),
                        price_micro_per_hour=_scaled(group.price_per_hour, 1e6),
                    )
        if len(self.peers) > LARGEST_SCENARIO:
            self._refuse(
                ("group", 0, "count"), f"{counted(len(self.peers), 'peer')} > {LARGEST_SCENARIO:,}"
            )
        for number, peer in _present(self.file.peer):
            self._override(number, peer)
        return Scenario(
            name=self.file.name,
            description=self.file.description,
            peers=tuple(self.peers.values()),
            links=self._links(),
            faults=tuple(self._fault(n, fault) for n, fault in _present(self.file.fault)),
            head=self.file.workload.head,
            origin=self.origin,
        )

    def _override(self, number: int, table: PeerTable) -> None:
        if table.name not in self.peers:
            self._refuse(("peer", number, "name"), f"no peer is called {table.name!r}")
            return
        peer = self.peers[table.name]
        self.peers[table.name] = replace(
            peer,
            forward_flops=_scaled(table.forward_tflops, 1e12) or peer.forward_flops,
            memory_bytes=_scaled(table.memory_gb, 1e9) or peer.memory_bytes,
            uplink_bytes_per_s=_rate(table.uplink_mbps) or peer.uplink_bytes_per_s,
            downlink_bytes_per_s=_rate(table.downlink_mbps) or peer.downlink_bytes_per_s,
            link_cap_bytes_per_s=_rate(table.link_cap_mbps) or peer.link_cap_bytes_per_s,
            price_micro_per_hour=(
                peer.price_micro_per_hour
                if table.price_per_hour is None
                else _scaled(table.price_per_hour, 1e6)
            ),
        )

    def _links(self) -> dict[tuple[str, str], ScenarioLink]:
        links: dict[tuple[str, str], ScenarioLink] = {}
        for number, table in _present(self.file.link):
            for key, end in (("from", table.origin), ("to", table.to)):
                if end != EVERYONE and end not in self.groups and end not in self.peers:
                    self._refuse(("link", number, key), f"no group or peer is called {end!r}")
            link = ScenarioLink(_scaled(table.latency_ms, 1e6), _rate(table.bandwidth_mbps))
            for ends in _directions(table):
                if links.get(ends, link) != link:
                    self._refuse(
                        ("link", number, "from"), f"a second link from {ends[0]} to {ends[1]}"
                    )
                links[ends] = link
        return links

    def _fault(self, number: int, table: FaultTable) -> ScenarioFault:
        for key, name in (("peer", table.peer), ("other", table.other)):
            if name and name not in self.peers:
                self._refuse(("fault", number, key), f"no peer is called {name!r}")
        if table.other and table.kind not in OF_TWO_PEERS:
            self._refuse(
                ("fault", number, "other"),
                f"only {' and '.join(OF_TWO_PEERS)} have an 'other' end, not {table.kind!r}",
                fix=f"leave out 'other', or make it a {OF_TWO_PEERS[0]}",
            )
        return ScenarioFault(
            table.at_step,
            table.kind,
            table.peer,
            table.other,
            table.factor,
            table.steps,
            table.seconds,
        )

    def _refuse(self, path: tuple[str | int, ...], cause: str, fix: str = "") -> None:
        """Note a mistake. `fix` replaces the usual advice, which is to change the value and lists
        the groups."""
        line = line_of(self.text, path)
        where = f"{self.origin}:{line}" if line else self.origin
        groups = ", ".join(
            f"{name} ({name}-1{f' to {name}-{count}' if count > 1 else ''})"
            for name, count in list(self.groups.items())[:8]
        )
        self.mistakes[f"{where}: {cause}"] = fix or f"change {path[-1]!r} there; groups: {groups}"


def _present(tables: Sequence[Table | None]) -> Iterator[tuple[int, Table]]:
    return ((number, table) for number, table in enumerate(tables) if table is not None)


def _directions(table: LinkTable) -> list[tuple[str, str]]:
    ends = [(table.origin, table.to)]
    return [*ends, (table.to, table.origin)] if table.both else ends


def _rate(mbps: float | None) -> int:
    """bytes/s, at least 1; 0 for an absent limit."""
    return 0 if mbps is None else max(1, _scaled(mbps, 1e6 / 8))


def _scaled(value: float | None, unit: float) -> int:
    return 0 if value is None else math.floor(value * unit + 0.5)


def lines_of(scenario: Scenario) -> NetworkLines:
    """A scenario's links as a virtual network has them. Peers are numbers in the file's order.

    A pair whose link the scenario does not state raises `UserError` when the link is used.
    """
    peers = scenario.peers

    def link(origin: int, to: int) -> tuple[int, int]:
        stated = scenario.link(peers[origin].name, peers[to].name)
        return stated.latency_ns, stated.bytes_per_s

    return NetworkLines(
        link,
        [peer.uplink_bytes_per_s for peer in peers],
        [peer.downlink_bytes_per_s for peer in peers],
    )
