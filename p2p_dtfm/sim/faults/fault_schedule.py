"""A seeded schedule of faults for a world."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.lossy_network import DirectedLink
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer

CRASHES = ("crash", "crash and lose disk")
CUTS = ("partition", "isolate", "one way", "one link")
KINDS = (*CRASHES, *CRASHES, "stop", "stop", "slow", "join", "leave", *CUTS, "bad network")


@dataclass
class Faults:
    """The faults that a seed inflicts.

    A `careful` schedule cuts no links. It crashes and stops peers only where those that go on have
    a copy of every layer, a holder's or a guardian's. Then no committed step may ever be lost. With
    `for_good` some of those peers never come back.
    """

    world: AgreementWorld
    chance: random.Random
    careful: bool
    for_good: bool = False
    only_holders: int = 0
    """Crashes and stops of a layer's only holder, for which a guardian stands in."""
    inflicted: dict[str, int] = field(default_factory=dict)
    recoveries_ns: list[int] = field(default_factory=list)
    """Times from a crash to the next committed step."""
    watched_crashes: int = 0
    """Crashes after which that commit was waited for, for a minute and until the end at most."""
    _heals: list[Callable[[], None]] = field(default_factory=list)
    _next_name: int = 0
    _lost: set[str] = field(default_factory=set)

    def schedule(self, count: int, from_ns: int, to_ns: int) -> None:
        for _ in range(count):
            delay_ns = self.chance.randrange(from_ns, to_ns) - self.world.now_ns
            kind = self.chance.choice(KINDS)
            self.world.after(delay_ns, lambda kind=kind: self._inflict(kind))  # type: ignore[misc]

    def end(self) -> None:
        """End all faults: links heal, stopped peers go on, and crashed ones start again."""
        for heal in self._heals:
            heal()
        self.world.network.become_good()
        for name, peer in self.world.peers.items():
            peer.slowness = 1.0
            if name not in self._lost:
                if not peer.alive:
                    self.world.restart(name)
                self.world.go_on(name)

    @property
    def lost(self) -> frozenset[str]:
        """The peers that never come back."""
        return frozenset(self._lost)

    # one fault ----------------------------------------------------------------------------------

    def _inflict(self, kind: str) -> None:
        running = [p for p in self._present() if p.alive and not p.stopped]
        if not running:
            self.world.after(SECOND_NS, lambda: self._inflict(kind))
            return
        peer = self.chance.choice(running)
        kind = self._possible(kind, peer, len(running))
        self.inflicted[kind] = self.inflicted.get(kind, 0) + 1
        if kind in (*CRASHES, "stop") and self._is_only_holder(peer):
            self.only_holders += 1
        after_ns = self.chance.randrange(2 * SECOND_NS, 40 * SECOND_NS)
        self._do(kind, peer, after_ns)

    def _possible(self, kind: str, peer: SimulatedPeer, running: int) -> str:
        """This kind of fault, or another one where it cannot or must not be."""
        if kind in CUTS and self.careful:
            kind = "crash"
        if kind == "leave" and (peer.view is None or peer not in self._staying()):
            kind = "join"
        if kind == "leave" and (running <= 3 or not self._can_spare_one()):
            kind = "join"
        if kind == "join" and len(self._present()) >= 16:
            kind = "stop"
        if kind in (*CRASHES, "stop") and self.careful and not self._may_go(peer):
            kind = "slow"
        return kind

    def _do(self, kind: str, peer: SimulatedPeer, after_ns: int) -> None:
        world, name = self.world, peer.name
        for_good = self.for_good and self.chance.random() < 0.3
        if kind in (*CRASHES, "stop") and for_good and self._can_spare_one():
            self._lost.add(name)
            after_ns = 1000 * SECOND_NS
        if kind in CRASHES:
            world.crash(name, lose_disk=kind == CRASHES[1])
            self._watch_recovery()
            world.after(after_ns, lambda: world.restart(name))
        elif kind == "stop":
            world.stop(name)
            world.after(after_ns, lambda: world.go_on(name))
        elif kind == "slow":
            peer.slowness = self.chance.choice((3.0, 10.0))
            world.tell(name, "becomes slow")
            world.after(after_ns, lambda: setattr(peer, "slowness", 1.0))
        elif kind == "join":
            self._next_name += 1
            joiner = world.add_peer(f"n{self._next_name:02}")
            joiner.agreement.wants_view()
            world.tell(joiner.name, "STARTS")
        elif kind == "leave":
            world.tell(name, "WANTS TO LEAVE")
            world.leave(name)
        elif kind == "bad network":
            self._worsen(after_ns)
        else:
            heal = world.cut(self._links(kind, name), f"{kind} {name}")
            self._heals.append(heal)
            world.after(after_ns, heal)

    def _worsen(self, after_ns: int) -> None:
        network = self.world.network
        before = network.loss, network.late

        def better() -> None:
            network.loss, network.late = min(before[0], network.loss), min(before[1], network.late)

        network.loss, network.late = 0.15, 0.1
        self.world.tell("network", "becomes bad")
        self.world.after(after_ns, better)

    def _links(self, kind: str, name: str) -> set[DirectedLink]:
        others = [other for other in self.world.peers if other != name]
        if kind == "isolate":
            return {(name, other) for other in others} | {(other, name) for other in others}
        if kind == "one way":
            outward = self.chance.random() < 0.5
            return {(name, other) if outward else (other, name) for other in others}
        if kind == "one link" and others:
            other = self.chance.choice(others)
            return {(name, other), (other, name)} if self.chance.random() < 0.5 else {(name, other)}
        half = {other for other in self.world.peers if self.chance.random() < 0.5}
        peers = list(self.world.peers)
        return {(a, b) for a in peers for b in peers if (a in half) != (b in half)}

    def _watch_recovery(self) -> None:
        crashed_ns = self.world.now_ns
        commits = self.world.invariants.commit_count

        def look() -> None:
            if self.world.invariants.commit_count > commits:
                self.recoveries_ns.append(self.world.last_commit_ns - crashed_ns)
            elif self.world.now_ns - crashed_ns < 60 * SECOND_NS:
                self.world.after(SECOND_NS // 20, look)

        commits = self.world.invariants.commit_count
        self.watched_crashes += 1
        self.world.after(SECOND_NS // 20, look)

    def _present(self) -> list[SimulatedPeer]:
        return [peer for peer in self.world.peers.values() if not peer.left]

    def _staying(self) -> list[SimulatedPeer]:
        """The peers that will be there in the end."""
        present = [p for p in self._present() if p.name not in self._lost]
        return [p for p in present if p.record.intent is not Intent.LEAVING]

    def _can_spare_one(self) -> bool:
        return len(self._staying()) > max(3, self.world.workload.min_members)

    def _may_go(self, victim: SimulatedPeer) -> bool:
        """Whether no layer is lost with this peer, by what the protocol promises."""
        rest = [p for p in self._present() if p.alive and not p.stopped and p.view]
        rest = [p for p in rest if p is not victim]
        if len(rest) < self.world.workload.min_members:
            return False
        if all(peer.agreement.frozen for peer in rest):
            return self._has_copies(victim, rest)
        if self._has_stand_ins(victim):
            return True
        return self.world.invariants.may_go_back_to_cut and self._has_whole_cut(victim, rest)

    def _has_whole_cut(self, victim: SimulatedPeer, rest: list[SimulatedPeer]) -> bool:
        """Whether the other members can go back to a cut, while a view trains whose guardians lag.
        All of them must be well. Together they must have a copy of each layer as of one step, no
        older than the newest whole cut."""
        view = victim.view
        if view is None or view.cut_pace is None or not self._all_train(view):
            return False
        others = [self.world.peers[name] for name in view.member_ids if name != victim.name]
        if any(peer not in rest for peer in others):
            return False
        layers = set(range(self.world.workload.layer_count))
        keys = {key for peer in others for key in peer.cuts.copies}
        return any(
            step >= self.world.invariants.whole_cut
            and layers <= {n for peer in others for n in peer.cuts.copies.get((step, lineage), {})}
            for step, lineage in keys
        )

    def _all_train(self, view: View) -> bool:
        """Whether all members of a view are in it, and none makes the next."""
        members = [self.world.peers[name] for name in view.member_ids]
        return all(
            peer.view is not None and peer.view.id == view.id and not peer.agreement.frozen
            for peer in members
        )

    def _has_stand_ins(self, victim: SimulatedPeer) -> bool:
        """Whether each layer is safe without the victim, while a view trains whose members are all
        well. A layer is safe if another holder has got its state. If the victim alone holds it, a
        guardian must have it from the start or have acknowledged it. Where guardians lag, there
        must be a whole cut. Others may still commit the step for which the victim has said
        Prepared."""
        view, peers = victim.view, self.world.peers
        if view is None or not isinstance(view.plan, Plan) or victim.receipts is None:
            return False
        if not self._all_train(view):
            return False
        if not all(peers[name].alive and not peers[name].stopped for name in view.member_ids):
            return False
        for layer in range(self.world.workload.layer_count):
            others = [peers[name] for name in view.plan.holders(layer) if name != victim.name]
            if not others and not self._is_guarded(victim, view, layer):
                return False
            if others and not any(other.is_up_to_date(layer) for other in others):
                return False
        return True

    def _is_guarded(self, victim: SimulatedPeer, view: View, layer: int) -> bool:
        guardian, invariants = view.guards.get(layer), self.world.invariants
        if guardian is None or victim.receipts is None:
            return False
        if view.cut_pace is not None:
            # By the victim's word: only once it is gone do claimed copies prove to be there.
            clock = victim.cuts.clock
            return invariants.may_go_back_to_cut and clock is not None and clock.safe >= 0
        if victim.receipts.received_all_of(guardian):
            return True
        # With a guardian from the start no step of the view commits before it has the state.
        peer = self.world.peers[guardian]
        in_place = invariants.has_committed(view.id) or peer.is_up_to_date(layer)
        return layer in view.guarded_at_once and in_place

    def _has_copies(self, victim: SimulatedPeer, rest: list[SimulatedPeer]) -> bool:
        """Whether the others have each layer at one newest step, while a new view is made.

        That is the furthest step that anyone has committed, or the one before if no living peer
        counts on more. A view that starts from a state drops older ones.
        """
        furthest = self.world.invariants.furthest
        ahead = any(peer.agreement.step >= furthest for peer in (victim, *rest))
        steps = (furthest,) if ahead else (furthest, furthest - 1)
        return any(self._covers(rest, step) for step in steps)

    def _covers(self, peers: list[SimulatedPeer], step: int) -> bool:
        lineages = [peer.agreement.recovery_evidence.lineage for peer in peers]
        ends = {(own.at(step), own.at(step - 1)) for own in lineages if own.length >= step}
        ends = {end for end in ends if end[0] is not None}
        layers = range(self.world.workload.layer_count)
        is_known = any(peer.knows_outcome(step - 1) for peer in peers)

        def reaches(peer: SimulatedPeer, layer: int, end: tuple[str | None, str | None]) -> bool:
            """Count a gradient only where somebody knows that its step was committed."""
            return peer.reaches(layer, step, *end) and (is_known or peer.has(layer, step))

        return any(
            all(any(reaches(peer, layer, end) for peer in peers) for layer in layers)
            for end in ends
        )

    def _is_only_holder(self, peer: SimulatedPeer) -> bool:
        plan = peer.view.plan if peer.view is not None else None
        if not isinstance(plan, Plan):
            return False
        return any(segment.holders == (peer.name,) for segment in plan.segments())
