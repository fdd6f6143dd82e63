"""Peers of `core.agreement` in virtual time, over a network that delays, loses and repeats.

Everything follows from the seed. Steps commit by the real `StepTransaction`, so that takeover is
decided as the daemon decides it; computing is an event that takes some virtual time.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from p2p_dtfm.core.agreement import (
    SECOND_NS,
    Actions,
    Agreement,
    ComputePlan,
    Halt,
    Left,
    SendMessage,
    TakeOver,
    Timing,
    ViewAgreed,
)
from p2p_dtfm.core.agreement_messages import AgreementMessage
from p2p_dtfm.core.canonical import digest_bytes
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.records import Intent, PeerRecord, sign_record
from p2p_dtfm.core.snapshot import Member, Snapshot, ViewId
from p2p_dtfm.core.step import Prepared, StepTransaction
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import Workload

TICK_NS = SECOND_NS // 4


def sign_for(peer_id: str) -> Callable[[bytes], bytes]:
    """A stand-in for Ed25519: fast, and a changed byte shows."""
    return lambda payload: digest_bytes(peer_id.encode() + payload).encode()


def verify(peer_id: str, payload: bytes, signature: bytes) -> bool:
    return signature == sign_for(peer_id)(payload)


@dataclass
class Network:
    """How badly messages travel."""

    delay_ns: tuple[int, int] = (1_000_000, 100_000_000)
    loss: float = 0.0
    repeat: float = 0.0


@dataclass
class SimulatedPeer:
    agreement: Agreement
    record: PeerRecord
    alive: bool = True
    left: bool = False
    views: list[View] = field(default_factory=list)
    transaction: StepTransaction | None = None
    prepared: dict[tuple[ViewId, int], list[Prepared]] = field(default_factory=dict)
    said: set[tuple[ViewId, int]] = field(default_factory=set)
    last_said: deque[Prepared] = field(default_factory=lambda: deque(maxlen=2))

    @property
    def view(self) -> View | None:
        return self.agreement.view


class AgreementWorld:
    """`planner` is a pure function of a snapshot; `template` is the record that all start from."""

    def __init__(
        self,
        seed: int,
        workload: Workload,
        template: PeerRecord,
        planner: Callable[[Snapshot], Plan | NoPlan],
        network: Network | None = None,
    ) -> None:
        self.now_ns = 0
        self.peers: dict[str, SimulatedPeer] = {}
        self.commits: dict[int, tuple[ViewId, float]] = {}
        self.story: list[str] = []
        self._random = random.Random(seed)
        self._network = network or Network()
        self._workload = workload
        self._template = template
        self._planner = planner
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # building ---------------------------------------------------------------------------------

    def add_peer(self, name: str, intent: Intent = Intent.TRAIN) -> SimulatedPeer:
        record = msgspec.structs.replace(self._template, peer_id=name, intent=intent)
        agreement = Agreement(
            Member(name, record.life),
            record.run_digest,
            self._workload,
            sign_for(name),
            verify,
            Timing(),
        )
        agreement.set_record(record, sign_record(record, sign_for(name)))
        agreement.held = {layer: 0 for layer in range(self._workload.layer_count)}
        peer = self.peers[name] = SimulatedPeer(agreement, record)
        self.after(self._random.randrange(TICK_NS), lambda: self._tick(name))
        return peer

    def found(self, name: str) -> None:
        self._do(name, self.peers[name].agreement.found(self.now_ns))

    def ask_to_join(self, name: str, member: str) -> None:
        """Ask again each second until let in."""
        peer = self.peers[name]
        if peer.view is None and not peer.agreement.attempting and peer.alive:
            self._send(name, member, peer.agreement.wants_view())
        if peer.view is None:
            self.after(SECOND_NS, lambda: self.ask_to_join(name, member))

    def leave(self, name: str) -> None:
        peer = self.peers[name]
        record = msgspec.structs.replace(
            peer.record, intent=Intent.LEAVING, sequence=peer.record.sequence + 1
        )
        peer.record = record
        peer.agreement.set_record(record, sign_record(record, sign_for(name)))
        self._do(name, peer.agreement.request_replan(f"{name} leaves", self.now_ns))

    # time -------------------------------------------------------------------------------------

    def after(self, delay_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, next(self._order), event))

    def run_until(self, condition: Callable[[], bool], limit_s: int = 120) -> None:
        """Run events until `condition` holds; a world that does not get there is a failure."""
        end_ns = self.now_ns + limit_s * SECOND_NS
        while not condition():
            assert self._events and self._events[0][0] <= end_ns, "\n".join(self.story[-40:])
            self.now_ns, _, event = heapq.heappop(self._events)
            event()

    def _tick(self, name: str) -> None:
        peer = self.peers[name]
        if peer.left or not peer.alive:
            return
        self._do(name, peer.agreement.tick(self.now_ns))
        for prepared in peer.last_said:
            self._broadcast_prepared(name, prepared)
        self.after(TICK_NS, lambda: self._tick(name))

    # messages ---------------------------------------------------------------------------------

    def _send(self, sender: str, receiver: str, message: AgreementMessage | Prepared) -> None:
        copies = 1 + (self._random.random() < self._network.repeat)
        for _ in range(copies):
            if self._random.random() >= self._network.loss:
                delay_ns = self._random.randrange(*self._network.delay_ns)
                self.after(delay_ns, lambda: self._deliver(sender, receiver, message))

    def _deliver(self, sender: str, receiver: str, message: AgreementMessage | Prepared) -> None:
        peer = self.peers.get(receiver)
        if peer is None or peer.left or not peer.alive:
            return
        if isinstance(message, Prepared):
            held = peer.prepared.setdefault((message.view, message.step), [])
            if message not in held:
                held.append(message)
            self._check_commit(receiver)
            return
        try:
            actions = peer.agreement.receive(sender, message, self.now_ns)
        except PeerFault as fault:
            raise AssertionError(f"{receiver} takes {sender} for faulty: {fault}") from fault
        self._do(receiver, actions)

    def _do(self, name: str, actions: Actions) -> None:
        peer = self.peers[name]
        for action in actions:
            if isinstance(action, SendMessage):
                for receiver in action.to:
                    self._send(name, receiver, action.message)
                continue
            self.story.append(f"{self.now_ns / SECOND_NS:8.3f} {name}: {type(action).__name__}")
            if isinstance(action, ComputePlan):
                self._plan_later(name, action.snapshot)
            elif isinstance(action, ViewAgreed):
                self._sync_later(name, action.view)
            elif isinstance(action, TakeOver):
                peer.views.append(action.view)
                self._start_step(name)
            elif isinstance(action, Left):
                peer.left = True
            elif isinstance(action, Halt):
                raise AssertionError(action.reason)
            else:
                self.story.append(f"{'':8} {action.text}")

    def _plan_later(self, name: str, snapshot: Snapshot) -> None:
        def planned() -> None:
            agreement = self.peers[name].agreement
            plan = self._planner(snapshot)
            self._do(name, agreement.plan_computed(snapshot, plan, self.now_ns))

        self.after(self._random.randrange(SECOND_NS), planned)

    def _sync_later(self, name: str, view: View) -> None:
        agreement = self.peers[name].agreement
        delay_ns = self._random.randrange(4 * SECOND_NS)
        self.after(delay_ns, lambda: self._do(name, agreement.synced(view.id)))

    # steps ------------------------------------------------------------------------------------

    def _at(self, peer: SimulatedPeer) -> tuple[ViewId, int]:
        return (peer.view.id if peer.view else ViewId(0, ""), peer.agreement.step)

    def _start_step(self, name: str) -> None:
        peer = self.peers[name]
        view = peer.view
        if view is None or peer.left or not isinstance(view.plan, Plan):
            return
        peer.transaction = StepTransaction(view.id, peer.agreement.step, view.plan)
        if view.plan.stage_of(name) is not None:
            delay_ns = self._random.randrange(SECOND_NS // 10, SECOND_NS)
            at = self._at(peer)
            self.after(delay_ns, lambda: self._computed(name, at))
        self._check_commit(name)

    def _computed(self, name: str, at: tuple[ViewId, int]) -> None:
        peer = self.peers[name]
        view = peer.view
        if view is None or at != self._at(peer) or at in peer.said or not peer.alive:
            return
        assert isinstance(view.plan, Plan)
        peer.said.add(at)
        segments = enumerate(view.plan.segments())
        prepared = Prepared(
            view=view.id,
            step=peer.agreement.step,
            peer_id=name,
            squared_norms={n: 1.0 for n, segment in segments if name in segment.holders},
            loss_sum=1.0,
            token_count=1,
            held_out_loss_sum=0.0,
            held_out_token_count=0,
            ready_for=peer.agreement.ready_for,
        )
        peer.prepared.setdefault(at, []).append(prepared)
        peer.last_said.append(prepared)
        self._broadcast_prepared(name, prepared)
        self._check_commit(name)

    def _broadcast_prepared(self, name: str, prepared: Prepared) -> None:
        agreement = self.peers[name].agreement
        assert agreement.view is not None
        receivers = set(agreement.view.member_ids)
        if agreement.next_view is not None:
            receivers |= set(agreement.next_view.member_ids)
        for receiver in sorted(receivers - {name}):
            self._send(name, receiver, prepared)

    def _check_commit(self, name: str) -> None:
        peer = self.peers[name]
        if peer.transaction is None:
            return
        key = (peer.transaction.view, peer.transaction.step)
        for prepared in peer.prepared.get(key, []):
            peer.transaction.record(prepared)
        outcome = peer.transaction.outcome()
        if outcome is None:
            return
        peer.transaction = None
        first = self.commits.setdefault(outcome.step, (key[0], outcome.loss))
        assert first == (key[0], outcome.loss), f"step {outcome.step} committed in two ways"
        before = len(peer.views)
        self._do(name, peer.agreement.committed(outcome))
        if len(peer.views) == before:
            self._start_step(name)
