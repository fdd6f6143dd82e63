"""A peer in virtual time: what the daemon does around `core`, with states that are hashes."""

from __future__ import annotations

import msgspec

from p2p_dtfm.core.consensus.actions import (
    SECOND_NS,
    Actions,
    ComputePlan,
    Disagreed,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    ViewAgreed,
)
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Heartbeat,
    JoinRequest,
)
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent, PeerRecord, sign_record
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import (
    GENESIS_VALUE,
    Boundary,
    CutCopy,
    CutReceipt,
    Partial,
    Receipt,
    Reduced,
    State,
    StateReply,
    StateRequest,
    Tensor,
)
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_process import LINGER_NS, RESEND_NS, sign_for
from p2p_dtfm.sim.faults.simulated_waits import SimulatedWaits


class SimulatedPeer(SimulatedWaits):
    """`start` begins a process of this peer; `alive` and `stopped` are up to the world."""

    def leave(self) -> None:
        self._set_record(intent=Intent.LEAVING, sequence=self.record.sequence + 1)
        self.do(self.agreement.tick(self.now_ns))

    def go_on(self) -> None:
        """Timers fire before sockets are read."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        self._beat()
        for event in backlog:
            self.run(self.process, event)

    def _tick(self) -> None:
        self._beat()
        self.later(self.world.tick_ns, self._tick)

    def _beat(self) -> None:
        now_ns, agreement = self.now_ns, self.agreement
        watched = self._watched()
        self.liveness.watch(watched, now_ns)
        self.judge_stalls(watched)
        for suspicion in self.liveness.tick(now_ns):
            self.do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        self.do(agreement.tick(now_ns))
        agreement.gives(gives := {it: self.given[it] for it in agreement.needy}, now_ns)
        for peer_id in self.liveness.due_heartbeats(now_ns):
            self._send(peer_id, Heartbeat(agreement.me, self.progress, self._work(), gives))
        if now_ns - self.resent_ns >= RESEND_NS:
            self.resent_ns = now_ns
            self._resend()
        if now_ns - self.asked_ns >= RESEND_NS // 2:
            self.asked_ns = now_ns
            self._check_commit()
            self._fetch_missing()
            self._ask_to_join()

    def _watched(self) -> set[str]:
        members: set[Member] = set()
        for view in (self.agreement.view, self.agreement.next_view):
            if view is not None and self.agreement.me in view.members:
                members |= set(view.members)
        return {member.peer_id for member in members} - {self.name}

    def _ask_to_join(self) -> None:
        agreement = self.agreement
        familiar = self.world.familiar.get(self.name, self.world.peers)
        agreement.familiar.meet(familiar)  # as homes remember one another
        if not self.world.rejoins or agreement.view or agreement.attempting:
            return
        if not self.left:
            others = sorted(name for name in self.world.peers if name != self.name)
            if others:
                self._send(self.world.chance.choice(others), agreement.wants_view())

    def _resend(self) -> None:
        for signed in self.last_said:
            self._broadcast(signed)
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        mine = self.partials.get(key, {}).get(self.name)
        if self.part is not None and self.part[0] == key:
            self._resend_boundaries()
        if mine is not None:
            self._send_partial(plan, mine)
            self._feed_guardians(key)
        self._send_cut(view)

    def receive(self, sender: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        now_ns = self.now_ns
        self.liveness.heard(sender, now_ns)
        if isinstance(message, Heartbeat):
            self.stalls.heard(sender, message.progress, message.work)
        if isinstance(message, SignedPrepared):
            self._receive_prepared(message.signed)
        elif isinstance(message, Boundary):
            self._receive_boundary(message)
        elif isinstance(message, Partial):
            self._receive_partial(message)
        elif isinstance(message, Reduced):
            self._receive_reduced(message)
        elif isinstance(message, Receipt):
            if self.receipts is not None:
                self.receipts.receipt(sender, message.view, message.step, message.layers)
                self._try_prepare()
        elif isinstance(message, CutCopy):
            self._receive_cut(message)
        elif isinstance(message, CutReceipt):
            if self.clock is not None and self.view is not None and message.view == self.view.id:
                self.clock.receipt(sender, message.step, message.layers)
        elif isinstance(message, StateRequest):
            self._give_states(message)
        elif isinstance(message, StateReply):
            self._take_states(message)
        else:
            if isinstance(message, JoinRequest):
                self._hear_record(message)
            try:
                actions = self.agreement.receive(sender, message, now_ns)
            except PeerFault as fault:
                raise Violation(f"{self.name} takes {sender} for faulty: {fault}") from fault
            self.do(actions)
            if isinstance(message, Active):
                self._check_commit()

    def _hear_record(self, message: JoinRequest) -> None:
        record = decode(message.record.payload, PeerRecord)
        held = self.heard_records.get(record.peer_id, record.version)
        self.heard_records[record.peer_id] = max(held, record.version)

    def do(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                for receiver in action.to:
                    self._send(receiver, action.message)
            elif isinstance(action, ComputePlan):
                self._plan_later(action)
            elif isinstance(action, ViewAgreed):
                self._agreed(action)
            elif isinstance(action, TakeOver):
                self._take_over(action)
            elif isinstance(action, Left):
                self.say("has left")
                self.left = True
                self.later(LINGER_NS, lambda: setattr(self, "gone", True))
            elif isinstance(action, Rejoin):
                self._rejoin(action)
            elif isinstance(action, Report):
                self.say(action.text)
            elif isinstance(action, Disagreed):
                raise Violation(action.reason)
            else:
                assert isinstance(action, StopStep)
                self.computing = self.part = None
                self.take_sides()

    def _plan_later(self, action: ComputePlan) -> None:
        def planned() -> None:
            plan = self.world.planner(action.snapshot)
            self.do(self.agreement.plan_computed(action.snapshot, plan, self.now_ns))

        self.later(self.world.chance.randrange(self.world.plan_ns), planned)

    def _agreed(self, action: ViewAgreed) -> None:
        if action.discard:
            self.states, self.cuts = {}, {}
            self._say_cuts()
        if action.view.snapshot.planned:
            self.later(self.world.chance.randrange(SECOND_NS), self._check_synced)

    def _take_over(self, action: TakeOver) -> None:
        view, restart = action.view, action.restart
        self.world.invariants.takes_over(self.name, self.record.life, view)
        self.views.append(view)
        self.taken_over_ns.append(self.world.now_ns)
        if restart is not None:
            for layer in restart.discard:
                self.states.pop(layer, None)
            for layer in restart.load:
                self.states[layer] = self._load(layer, action.step)
            if restart.rolled_view is not None:
                kept = self.gradients.get((restart.rolled_view, action.step - 1), {})
                for layer in restart.roll_forward:
                    self._apply(layer, kept.get(layer))
                lineage = self.agreement.recovery_evidence.lineage.digest
                self.world.invariants.leads_to(
                    self.name, restart.rolled_view, action.step - 1, lineage
                )
        if action.step == 0:
            for layer in self._wanted(view):
                self.states.setdefault(layer, State(0, GENESIS_VALUE))
        own = {} if view.cut_pace is not None else view.guardians_of(self.name)
        self.receipts = Receipts(view.id, own, view.guarded_at_once)
        self._enter_cuts(view, action.step)
        for store in (self.partials, self.prepared, self.arrived):
            for key in [key for key in store if key[0].number < view.id.number]:
                del store[key]
        self.computing = self.part = None
        self.replay = action.replay
        replay = action.replay
        if replay is not None and self.world.redone.setdefault(view.id, replay) != replay:
            raise Violation(f"{self.name} keeps something else than others in view {view.id}")
        self._sync_held()
        plan = "no plan" if action.ledger is None else self._describe(view)
        self.say(
            f"is in view {view.id} of {','.join(view.member_ids)} from step {action.step}: {plan}"
        )
        self._start_step()

    def _describe(self, view: View) -> str:
        assert isinstance(view.plan, Plan)
        pipelines = [
            " ".join(f"{s.peer_id}[{s.first_layer}:{s.end_layer}]" for s in pipeline.stages)
            for pipeline in view.plan.pipelines
        ]
        return " | ".join(pipelines)

    def _rejoin(self, action: Rejoin) -> None:
        self.say(f"rejoins: {action.reason}")
        self.computing = self.part = self.receipts = self.clock = None
        self.record = msgspec.structs.replace(self.record, life=self.record.life + 1)
        signed = sign_record(self.record, sign_for(self.name))
        self.agreement.begin_life(self.record, signed)
        self.last_said.clear()
