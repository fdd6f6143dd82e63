"""How long peers around the world take to agree on a view: the real core in virtual time.

    python -m benchmarks.agreement [--peers N] [--scenario FILE-OR-NAME] [--quick] [--events E]
                                   [--real-ids] [--json]

Members and links are those of a scenario (default: the paper's case 5, eight regions); a message
takes its link's latency and its own bytes at the link's rate. Planning takes no time here. A crash
ends a process on a machine that lives. Its streams end behind what was sent on them, and it is
suspected a while later (`noticed_s`, a setting). Time runs from the first peer that opens a view
after the event, even if that attempt fails, to the last one that has all Ready. The lower bound
beside it is for any protocol without a leader in which an agreement follows everyone's word on
everyone's word: news of it, contributions, Ready, each to all. The target is three times the
largest round trip, 1 MiB and 2,000 messages sent by each. In a swarm of more than 16 peers each
speaks with its neighbours of the overlay, as daemons do. A leaver with a stage gives the stage up
in one view and goes in the next; `leave` is the first of the two.

A scenario with fewer peers than asked for has each of its groups multiplied; beyond 64 peers their
records are brief. A scenario's names are short and it has no addresses: with `--real-ids` each peer
has an id as long as a daemon's, and two addresses. `kib_least` is the least that any protocol
needs where all must plan the same: each new record, once to each peer.
"""

import argparse
import gc
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from p2p_dtfm.core.consensus.actions import SECOND_NS, WAN, ViewAgreed
from p2p_dtfm.core.membership.leaving import leavers
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage
from p2p_dtfm.core.messages.on_the_wire import compressed
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.canonical import encode, encode_for_wire
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Link, PeerRecord, packed
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.hash_training import Tensor
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.scenario.brief_records import with_brief_records
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from p2p_dtfm.sim.scenario.what_if import what_if

SCENARIO = "paper-5-world-wide"
FEWEST_PEERS = 8
"""With fewer peers nobody could join, leave or crash beside those that hold the stages."""
ID_BEGINS, ID_LENGTH = "12D3KooW", 52
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
TARGET_ROUND_TRIPS, TARGET_KIB, TARGET_MESSAGES = 3, 1024, 2000
MANY_ABOVE = 64
JOINS_AT_ONCE = 100
EVENTS = ("join", "leave", "crash", "joins")
LAYERS = 4
LIMIT_BYTES = 1 << 20
"""The largest size of a message between daemons."""
_COST = LayerCost(1, 1, 1, 1)
WORKLOAD = Workload(LAYERS - 2, 1, 0, 1, _COST, _COST, _COST, 1)


def small_plan(snapshot: Snapshot) -> Plan | NoPlan:
    """One pipeline, with the other peers as spares. The plan does not matter here, except that a
    peer that leaves has no place in it."""
    leaving = leavers(snapshot.records)
    names = [member.peer_id for member in snapshot.members]
    names.sort(key=lambda name: name in leaving)
    stages = tuple(Stage(name, n, n + 1, 1) for n, name in enumerate(names[:LAYERS]))
    return Plan((Pipeline(stages, 0, 1),), tuple(names[LAYERS:]), 1)


class WatchedPeer(SimulatedPeer):
    """Notes when it has agreed."""

    world: "ScenarioWorld"

    def _measured_links(self) -> dict[str, Link]:
        return self.record.links

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("opens view"):
            number = int(text.split()[2].rstrip(":"))
            self.world.opened.setdefault(number, (self.world.now_ns, self.name))

    def _agreed(self, action: ViewAgreed) -> None:
        super()._agreed(action)
        self.world.expected[action.view.id.number] = len(action.view.snapshot.contributors)
        self.world.agreed.setdefault(action.view.id.number, {})[self.name] = self.world.now_ns


class ScenarioWorld(AgreementWorld):
    """Messages take the time of the scenario's links."""

    peer_type = WatchedPeer

    def __init__(self, scenario: Scenario, records: dict[str, PeerRecord]) -> None:
        template = next(iter(records.values()))
        super().__init__(1, WORKLOAD, template, small_plan, timing=WAN)
        self.scenario, self.records = scenario, records
        self.plan_ns = 1
        self.compute_ns = (SECOND_NS, 2 * SECOND_NS)
        self.opened: dict[int, tuple[int, str]] = {}
        self.agreed: dict[int, dict[str, int]] = {}
        self.expected: dict[int, int] = {}
        self.message_count = self.byte_count = 0
        self.comes_ns: dict[tuple[str, str], int] = {}
        """When the last message from one peer to another comes."""
        self.recorded: set[str] = set()
        self.by_kind: dict[str, tuple[int, int]] = {}
        self._measured: tuple[object, int] = (None, 0)

    def add_record(self, name: str) -> None:
        peer = self.peers[name] = self.peer_type(name, self.records[name], self)
        peer.start()

    def send(
        self, sender: str, receiver: str, message: AgreementMessage | SignedPrepared | Tensor
    ) -> None:
        peer = self.peers[receiver]
        if not peer.alive or peer.gone:
            return
        if self._measured[0] is not message:
            payload = encode_for_wire(message)
            if len(payload) > LIMIT_BYTES:
                raise Violation(f"a {type(message).__name__} of {len(payload)} bytes")
            self._measured = message, len(compressed(message, payload))
        size = self._measured[1]
        self.message_count += 1
        self.byte_count += size
        name = type(message).__name__
        count, total = self.by_kind.get(name, (0, 0))
        self.by_kind[name] = count + 1, total + size
        link = self.scenario.link(sender, receiver)
        delay_ns = link.latency_ns + (size * SECOND_NS // link.bytes_per_s)
        process, ends = peer.process, (sender, receiver)
        self.comes_ns[ends] = max(self.comes_ns.get(ends, 0), self.now_ns + delay_ns)
        self.after(delay_ns, lambda: peer.run(process, lambda: peer.receive(sender, message)))

    def _notice(self, peer: SimulatedPeer, name: str) -> None:
        """A stream ends behind what was sent on it."""
        ends_ns = self.now_ns + self.scenario.link(name, peer.name).latency_ns
        ends_ns = max(ends_ns, self.comes_ns.get((name, peer.name), 0)) + 1
        peer.later(ends_ns - self.now_ns, lambda: peer.liveness.stream_reset(name, peer.now_ns))

    def new_record_bytes(self, names: list[str]) -> int:
        """Bytes of the records of members that were in no agreement before, as each signs its
        record."""
        new = [name for name in names if name not in self.recorded]
        self.recorded |= set(new)
        return sum(len(encode(packed(self.records[name]))) for name in new)

    def is_agreed(self, number: int) -> bool:
        agreed = self.agreed.get(number, {})
        if not agreed or len(agreed) < self.expected[number]:  # asked after each message
            return False
        return set(self._contributors(number)) <= set(agreed)

    def member_names(self, number: int) -> list[str]:
        return [m.peer_id for m in self._view(number).members]

    def _contributors(self, number: int) -> list[str]:
        return [m.peer_id for m in self._view(number).snapshot.contributors]

    def _view(self, number: int) -> View:
        for peer in self.peers.values():
            for view in (peer.agreement.view, peer.agreement.next_view):
                if view is not None and view.id.number == number:
                    return view
        raise KeyError(number)


def bound_ns(scenario: Scenario, names: list[str], opener: str) -> int:
    """The bound: news from the opener to each, contributions from each to all, Ready from each to
    all."""

    def hop(known: dict[str, int]) -> dict[str, int]:
        return {
            to: max(
                at + (scenario.link(origin, to).latency_ns if origin != to else 0)
                for origin, at in known.items()
            )
            for to in names
        }

    news = hop({opener: 0})
    return max(hop(hop(news)).values())


@dataclass(frozen=True)
class Trigger:
    """An event in a world at a time, and the peers that the view after it takes along, or not."""

    event: str
    at_ns: int
    last_number: int
    """The number of the last view that was agreed on before."""
    joins: frozenset[str] = frozenset()
    crashes: frozenset[str] = frozenset()

    def is_met_by(self, member_names: list[str]) -> bool:
        return self.joins.issubset(member_names) and self.crashes.isdisjoint(member_names)


def measured(world: ScenarioWorld, trigger: Trigger) -> dict[str, object]:
    """Run until the view that the trigger leads to is agreed. Time runs from the first attempt
    since, even if that one fails."""
    began_s = time.process_time()
    counts = world.message_count, world.byte_count

    is_meant: dict[int, bool] = {}  # asked after each message

    def is_done() -> bool:
        for number in world.agreed:
            if number > trigger.last_number and number not in is_meant and world.is_agreed(number):
                is_meant[number] = trigger.is_met_by(world.member_names(number))
        return any(is_meant.values())

    world.run_until(is_done, limit_s=120)
    number = next(number for number, meant in is_meant.items() if meant)
    agreed = world.agreed[number]
    since = [it for it in world.opened.values() if it[0] >= trigger.at_ns]
    opened_ns, opener = min(since)
    names = sorted(agreed)
    longest_ns = largest_round_trip_ns(world.scenario, names)
    took_ns = max(agreed.values()) - opened_ns
    round_trips = took_ns / longest_ns
    messages_each = (world.message_count - counts[0]) // len(names)
    kib_each = (world.byte_count - counts[1]) // len(names) >> 10
    met = round_trips <= TARGET_ROUND_TRIPS
    met = met and kib_each <= TARGET_KIB and messages_each <= TARGET_MESSAGES
    return {
        "event": trigger.event,
        "peers": len(names),
        "noticed_s": (opened_ns - trigger.at_ns) / SECOND_NS,
        "agreed_s": took_ns / SECOND_NS,
        "lower_bound_s": bound_ns(world.scenario, names, opener) / SECOND_NS,
        "round_trips": round_trips,
        "messages_each": messages_each,
        "kib_each": kib_each,
        "kib_least": world.new_record_bytes(names) >> 10,
        "cpu_s": round(time.process_time() - began_s, 1),
        "ok": met,
    }


def largest_round_trip_ns(scenario: Scenario, names: list[str]) -> int:
    """The largest round trip of any two of these peers. Peers of a group are alike, so a few of
    each stand for it."""
    by_group: dict[str, list[str]] = {}
    for name in names:
        by_group.setdefault(scenario.peer(name).group, []).append(name)
    some = [name for group in by_group.values() for name in group[:2]]
    link = scenario.link
    return max(link(a, b).latency_ns + link(b, a).latency_ns for a in some for b in some if a != b)


def multiplied(scenario: Scenario, count: int) -> Scenario:
    """The scenario with at least so many peers. Each group is multiplied where there are fewer,
    except groups of one peer that do not say how two of them would be linked. Raises
    `UserError`."""
    if len(scenario.peers) >= count:
        return scenario
    sizes = Counter(peer.group for peer in scenario.peers)
    more = [group for group in sizes if _can_be_more(scenario, group)]
    if not more:
        raise UserError(
            f"{scenario.name} cannot be multiplied: no group says how two of its peers are linked",
            "add [[link]] with the group at both ends, or one with * at both",
        )
    fixed = sum(size for group, size in sizes.items() if group not in more)
    times = -(-(count - fixed) // (len(scenario.peers) - fixed))
    for group in more:
        if times > 1:
            scenario = what_if(scenario, f"+{(times - 1) * sizes[group]} {group}")
    side_by_side = sorted(scenario.peers, key=lambda peer: [*sizes].index(peer.group))
    return replace(scenario, peers=tuple(side_by_side))


def _can_be_more(scenario: Scenario, group: str) -> bool:
    some = what_if(scenario, f"+1 {group}")
    two = [peer.name for peer in some.peers if peer.group == group][-2:]
    try:
        return bool(some.link(two[0], two[1]) and some.link(two[1], two[0]))
    except UserError:
        return False


def with_real_ids(scenario: Scenario) -> Scenario:
    """The same peers under names as long as those of daemons."""
    ids = {peer.name: _real_id(peer.name) for peer in scenario.peers}
    links = {
        (ids.get(origin, origin), ids.get(to, to)): link
        for (origin, to), link in scenario.links.items()
    }
    peers = tuple(replace(peer, name=ids[peer.name]) for peer in scenario.peers)
    return replace(scenario, peers=peers, links=links, faults=())


def _real_id(name: str) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
    digits = (BASE58[number // 58**at % 58] for at in range(ID_LENGTH - len(ID_BEGINS)))
    return ID_BEGINS + "".join(digits)


def home_addresses(peer_id: str) -> tuple[str, ...]:
    """Two addresses, as of a home with a forwarded port."""
    return tuple(
        f"/ip4/{host}/tcp/31330/p2p/{peer_id}" for host in ("192.168.100.100", "203.0.113.100")
    )


class Play:
    """A world, and the peers that act in it. Each event begins when the result of the one before is
    complete."""

    def __init__(self, scenario: Scenario, count: int, real_ids: bool = False) -> None:
        scenario = multiplied(scenario, count)
        scenario = with_real_ids(scenario) if real_ids else scenario
        every = [peer.name for peer in scenario.peers]
        names = [every[at * len(every) // count] for at in range(count)]
        run_spec = read_run_spec("gpt3-xl", 24, 1024)
        snapshot = with_brief_records(scenario_snapshot(scenario, run_spec))
        records = {it.peer_id: it for it in snapshot.records}
        if real_ids:
            records = {
                name: msgspec.structs.replace(it, addresses=home_addresses(name))
                for name, it in records.items()
            }
        self.world = ScenarioWorld(scenario, records)
        many = JOINS_AT_ONCE if count > 2 * JOINS_AT_ONCE else max(2, count // 8)
        self.newcomers = [names[1 + at * (count - 2) // many] for at in range(many)]
        later = set(self.newcomers)
        self.first = [name for name in names if name not in later]
        self.pause_ns = (5 if count > MANY_ABOVE else 10) * SECOND_NS
        for name in self.first:
            self.world.add_record(name)

    def run(self, events: Sequence[str]) -> Iterator[dict[str, object]]:
        """A row for the founding and for each of `events`, as soon as it is over."""
        world, founder = self.world, self.first[0]
        for name in self.first[1:-1]:
            world.send(name, founder, world.peers[name].agreement.wants_view())
        world.run_to(world.now_ns + SECOND_NS)
        began = Trigger("found", world.now_ns, 0)
        world.found(founder)
        yield measured(world, began)
        for event in events:
            world.run_to(world.now_ns + self.pause_ns)
            yield measured(world, self._begin(Trigger(event, world.now_ns, max(world.agreed))))

    def _begin(self, trigger: Trigger) -> Trigger:
        """Perform the event; the result says which peers it concerns."""
        world, first = self.world, self.first
        if trigger.event == "join":
            world.send(first[-1], first[0], world.peers[first[-1]].agreement.wants_view())
            return replace(trigger, joins=frozenset(first[-1:]))
        if trigger.event == "leave":
            world.leave(first[1])
            return trigger
        if trigger.event == "crash":
            world.crash(first[2], lose_disk=False)
            return replace(trigger, crashes=frozenset(first[2:3]))
        for at, name in enumerate(self.newcomers):
            world.add_record(name)
            asked = first[3 + at % (len(first) - 4)]
            world.send(name, asked, world.peers[name].agreement.wants_view())
        what = f"{len(self.newcomers)} joins"
        return replace(trigger, event=what, joins=frozenset(self.newcomers))


def main(words: Sequence[str] | None = None) -> int:
    arguments = _asked(words)
    gc.disable()  # nothing here is in circles, and looking for them is a third of the time
    met: list[bool] = []
    try:
        count = 16 if arguments.quick else arguments.peers
        play = Play(read_scenario(arguments.scenario), count, arguments.real_ids)
        for row in play.run(arguments.events):
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                _show(row, is_first=not met)
            met.append(bool(row["ok"]))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    finally:
        gc.enable()
    if arguments.json:
        print(json.dumps({"target_round_trips": TARGET_ROUND_TRIPS, "met": all(met)}))
    return 0


def _asked(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", default=SCENARIO, help="a file, or a name that comes along")
    parser.add_argument("--peers", type=int, default=64, help="those who join among them")
    parser.add_argument("--quick", action="store_true", help="16 peers instead of 64")
    parser.add_argument("--real-ids", action="store_true", help="with ids and addresses of daemons")
    parser.add_argument("--json", action="store_true", help="a line for each event, then a verdict")
    parser.add_argument(
        "--events",
        type=lambda text: text.split(","),
        default=EVENTS,
        help="what follows the founding, in this order, each once: some of %(default)s",
    )
    arguments = parser.parse_args(words)
    if not set(arguments.events) <= set(EVENTS) or len(set(arguments.events)) < len(
        arguments.events
    ):
        parser.error(f"--events: each of {', '.join(EVENTS)} once at most")
    if arguments.peers < FEWEST_PEERS:
        parser.error(f"--peers: {FEWEST_PEERS} or more, not {arguments.peers}")
    return arguments


def _show(row: dict[str, object], is_first: bool) -> None:
    if is_first:
        print("  ".join(f"{key:>13}" for key in row))
    shown = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
    print("  ".join(f"{value:>13}" for value in shown), flush=True)


if __name__ == "__main__":
    sys.exit(main())
