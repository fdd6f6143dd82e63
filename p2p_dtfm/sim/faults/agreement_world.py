"""Peers of `core` in virtual time, over a network that delays, loses, repeats and is cut.

Everything follows from the seed. Steps commit by the real `Ledger`. The real `Agreement` decides
takeover and recovery. `Invariants` sees every takeover, commit and state.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

import msgspec

from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.liveness.liveness import WAN_LIVENESS, LivenessTiming
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot, ViewId
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.hash_training import Tensor
from p2p_dtfm.sim.faults.invariants import Invariants, Violation
from p2p_dtfm.sim.faults.lossy_network import DirectedLink, LossyNetwork
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer

TICK_NS = SECOND_NS // 4
EVENTS_EACH_LIMIT = 10_000
EVENT_LIMIT = 2_000_000
"""The most events in a whole world. Where there are many peers, the limit holds for each of
them."""


class AgreementWorld:
    """`planner` is a pure function of a snapshot. All peers start from the record `template`."""

    peer_type = SimulatedPeer

    def __init__(
        self,
        seed: int,
        workload: Workload,
        template: PeerRecord,
        planner: Callable[[Snapshot], Plan | NoPlan],
        network: LossyNetwork | None = None,
        timing: AgreementTiming | None = None,
    ) -> None:
        self.now_ns = 0
        self.peers: dict[str, SimulatedPeer] = {}
        self.story: list[str] = []
        self.chance = random.Random(seed)
        self.network = network or LossyNetwork()
        self.workload = workload
        self.planner = planner
        self.timing = timing or AgreementTiming()
        self.liveness_timing: LivenessTiming = WAN_LIVENESS
        self.tick_ns = TICK_NS
        self.compute_ns = (SECOND_NS // 10, SECOND_NS)
        self.plan_ns = SECOND_NS // 2
        self.transfer_ns = 2 * SECOND_NS
        self.rejoins = False
        self.liars: frozenset[str] = frozenset()
        """Peers that others may find out to be lying."""
        self.familiar: dict[str, tuple[str, ...]] = {}
        """The peers that a peer knows from before, where those are not all."""
        self.invariants = Invariants(workload.microbatch_count)
        self.redone: dict[ViewId, PartialReplay] = {}
        """How the step of the view before went on, by view."""
        self.last_commit_ns = 0
        self.event_count = 0
        self._template = template
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # building ---------------------------------------------------------------------------------

    def add_peer(self, name: str) -> SimulatedPeer:
        record = msgspec.structs.replace(self._template, peer_id=name, intent=Intent.TRAIN)
        peer = self.peers[name] = self.peer_type(name, record, self)
        peer.start()
        return peer

    def found(self, name: str) -> None:
        peer = self.peers[name]
        peer.do(peer.agreement.found(peer.now_ns))

    def ask_to_join(self, name: str, member: str) -> None:
        """Ask to join, again each second until let in."""
        peer = self.peers[name]
        if peer.view is None and not peer.agreement.attempting and peer.alive:
            self.send(name, member, peer.agreement.wants_view())
        if peer.view is None:
            self.after(SECOND_NS, lambda: self.ask_to_join(name, member))

    def leave(self, name: str) -> None:
        self.peers[name].leave()

    # time -------------------------------------------------------------------------------------

    def after(self, delay_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, next(self._order), event))

    def run_until(self, condition: Callable[[], bool], limit_s: int = 120) -> None:
        """Run events until `condition` holds. A world that does not get there is a failure."""
        end_ns = self.now_ns + limit_s * SECOND_NS
        while not condition():
            if not self._events or self._events[0][0] > end_ns:
                raise Violation(f"not there after {limit_s} s: {self._where_all_are()}")
            self.step()

    def run_to(self, time_ns: int) -> None:
        while self._events and self._events[0][0] <= time_ns:
            self.step()
        self.now_ns = max(self.now_ns, time_ns)

    def step(self) -> None:
        self.now_ns, _, event = heapq.heappop(self._events)
        self.event_count += 1
        if self.event_count > max(EVENT_LIMIT, EVENTS_EACH_LIMIT * len(self.peers)):
            raise Violation(f"messages without end: {self._where_all_are()}")
        event()

    def tell(self, name: str, text: str) -> None:
        self.story.append(f"{self.now_ns / SECOND_NS:8.3f} {name}: {text}")

    def committed(self, name: str, step: int) -> None:
        self.last_commit_ns = self.now_ns

    def _where_all_are(self) -> str:
        places = []
        for name, peer in sorted(self.peers.items()):
            agreement = peer.agreement
            view = agreement.view.id if agreement.view else None
            flags = [
                word
                for word, on in (
                    ("crashed", not peer.alive),
                    ("stopped", peer.stopped),
                    ("left", peer.left),
                    ("frozen", agreement.frozen),
                    ("attempting", agreement.attempting),
                )
                if on
            ]
            places.append(f"{name} in {view} at step {agreement.step} {' '.join(flags)}".strip())
        return "; ".join(places)

    # messages and faults ------------------------------------------------------------------------

    def send(
        self, sender: str, receiver: str, message: AgreementMessage | SignedPrepared | Tensor
    ) -> None:
        peer = self.peers.get(receiver)
        if peer is None or not peer.alive or peer.gone:
            return
        process = peer.process
        for delay_ns in self.network.deliveries_ns(self.chance, sender, receiver):
            self.after(delay_ns, lambda: peer.run(process, lambda: peer.receive(sender, message)))

    def crash(self, name: str, lose_disk: bool) -> None:
        """End the process at once. Peers with a stream to it notice, unless cut off."""
        peer = self.peers[name]
        peer.alive = False
        if lose_disk:
            peer.disk, peer.view_history, peer.bars, peer.signatures = [], (), (), ()
        self.tell(name, "CRASHES" + (" and loses its disk" if lose_disk else ""))
        for other in self.peers.values():
            if other is not peer and other.alive and not self.network.is_cut(name, other.name):
                self._notice(other, name)

    def _notice(self, peer: SimulatedPeer, name: str) -> None:
        delay_ns = self.network.delay_ns[1]  # what was under way comes first
        peer.later(delay_ns, lambda: peer.liveness.stream_reset(name, peer.now_ns))

    def restart(self, name: str) -> None:
        if not self.peers[name].alive:
            self.peers[name].restart()
            self.tell(name, f"RESTARTS at step {self.peers[name].agreement.step}")

    def stop(self, name: str) -> None:
        self.peers[name].stopped = True
        self.tell(name, "STOPS")

    def go_on(self, name: str) -> None:
        if self.peers[name].alive and self.peers[name].stopped:
            self.tell(name, "GOES ON")
            self.peers[name].go_on()

    def cut(self, links: Iterable[DirectedLink], what: str) -> Callable[[], None]:
        """Cut these directed links. The returned function heals them."""
        cut = frozenset(links)
        self.network.cuts.append(cut)
        self.tell("network", f"CUT {what}")

        def heal() -> None:
            if cut in self.network.cuts:
                self.network.cuts.remove(cut)
                self.tell("network", f"HEALED {what}")

        return heal
