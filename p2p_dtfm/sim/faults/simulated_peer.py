"""A peer in virtual time: what the daemon does around `core`, with states that are hashes."""

from __future__ import annotations

import msgspec

from p2p_dtfm.core.consensus.actions import (
    Actions,
    ComputePlan,
    Disagreed,
    Left,
    PassOnSoon,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    TakeSides,
    ViewAgreed,
)
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Heartbeat,
    JoinRequest,
    Tidings,
)
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import (
    Intent,
    PackedRecord,
    sign_record,
    unpacked,
)
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.hash_training import (
    GENESIS_VALUE,
    BoundaryTensors,
    CutCopy,
    HashState,
    LayersReceipt,
    Partial,
    Receipt,
    Reduced,
    StateRequest,
    Tensor,
)
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_cuts import SimulatedCuts
from p2p_dtfm.sim.faults.simulated_microbatches import SimulatedMicrobatches
from p2p_dtfm.sim.faults.simulated_process import (
    LINGER_NS,
    RESEND_NS,
    Key,
    SimulatedProcess,
    sign_for,
)
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from p2p_dtfm.sim.faults.simulated_waits import SimulatedWaits


class SimulatedPeer(SimulatedProcess):
    """`start` begins a process of this peer. The world sets `alive` and `stopped`.

    Its parts can be replaced by ones that do something else, or nothing.
    """

    cuts_type = SimulatedCuts
    microbatches_type = SimulatedMicrobatches
    training_type = SimulatedTraining
    waits_type = SimulatedWaits

    def start(self) -> None:
        """Begin a new process, with what is on the disk."""
        self.cuts = self.cuts_type(self)
        self.microbatches = self.microbatches_type(self, self._all_computed)
        self.training = self.training_type(self, self.microbatches, self.cuts)
        self.waits = self.waits_type(self, self.microbatches)
        super().start()

    def _all_computed(self, key: Key) -> None:
        self.training.all_computed(key)

    def leave(self) -> None:
        self.set_record(intent=Intent.LEAVING, sequence=self.record.sequence + 1)
        self.do(self.agreement.tick(self.now_ns))

    def go_on(self) -> None:
        """Go on after a stop. Timers fire before sockets are read."""
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
        watched = set(agreement.watched)
        self.liveness.watch(watched, now_ns)
        self.waits.judge(watched)
        for suspicion in self.liveness.tick(now_ns):
            self.do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        self.do(agreement.tick(now_ns))
        self.keep_signatures()
        agreement.gives(gives := {it: self.given[it] for it in agreement.needy}, now_ns)
        missed, silent_ms = self.liveness.missed(), self.liveness.silent_ms(now_ns)
        if due := self.liveness.due_heartbeats(now_ns):
            work = self.waits.work()
            beat = Heartbeat(agreement.me, self.progress, work, gives, missed, silent_ms)
            for peer_id in due:
                self.send(peer_id, beat)
        if now_ns - self.resent_ns >= RESEND_NS:
            self.resent_ns = now_ns
            self._resend()
        if now_ns - self.asked_ns >= RESEND_NS // 2:
            self.asked_ns = now_ns
            self.training.check_commit()
            self.training.fetch_missing()
            self._ask_to_join()

    def _ask_to_join(self) -> None:
        agreement = self.agreement
        familiar = self.world.familiar.get(self.name, self.world.peers)
        agreement.familiar.meet(familiar)  # as homes remember one another
        if not self.world.rejoins or agreement.view or agreement.attempting:
            return
        if not self.left:
            others = sorted(name for name in self.world.peers if name != self.name)
            if others:
                self.send(self.world.chance.choice(others), agreement.wants_view())

    def _resend(self) -> None:
        for signed in self.last_said:
            self.broadcast(signed)
        view, plan = self.in_training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        mine = self.partials.get(key, {}).get(self.name)
        if self.microbatches.part is not None and self.microbatches.part[0] == key:
            self.microbatches.resend()
        if mine is not None:
            self.training.send_partial(plan, mine)
            self.training.feed_guardians(key)
        self.cuts.send(view)

    def receive(self, sender: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        self.liveness.heard(sender, self.now_ns)
        if isinstance(message, SignedPrepared):
            self.training.receive_prepared(message.signed)
        elif isinstance(message, Tensor):
            self._receive_tensor(sender, message)
        else:
            self._receive_said(sender, message)

    def _receive_tensor(self, sender: str, message: Tensor) -> None:
        if isinstance(message, BoundaryTensors):
            self.microbatches.receive(message)
        elif isinstance(message, Partial):
            self.training.receive_partial(message)
        elif isinstance(message, Reduced):
            self.training.receive_reduced(message)
        elif isinstance(message, Receipt):
            if self.receipts is not None:
                self.receipts.receipt(sender, message.view, message.step, message.layers)
                self.training.try_prepare()
        elif isinstance(message, CutCopy):
            self.cuts.receive(message)
        elif isinstance(message, LayersReceipt):
            self.cuts.receipt(sender, message)
        elif isinstance(message, StateRequest):
            self.training.give_states(message)
        else:
            self.training.take_states(message)

    def _receive_said(self, sender: str, message: AgreementMessage) -> None:
        if isinstance(message, Heartbeat):
            self.waits.stalls.heard(sender, message.progress, message.work)
            self.liveness.fellow_says(sender, message.missed, message.silent_ms, self.now_ns)
        if isinstance(message, JoinRequest):
            self._hear_record(message)
        try:
            actions = self.agreement.receive(sender, message, self.now_ns)
        except PeerFault as fault:
            raise Violation(f"{self.name} takes {sender} for faulty: {fault}") from fault
        self.do(actions)
        if isinstance(message, Active | Tidings):
            self.training.check_commit()

    def _hear_record(self, message: JoinRequest) -> None:
        record = unpacked(message.record.peer_id, decode(message.record.payload, PackedRecord))
        held = self.heard_records.get(record.peer_id, record.version)
        self.heard_records[record.peer_id] = max(held, record.version)

    def do(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                for receiver in action.to:
                    self.send(receiver, action.message)
            elif isinstance(action, PassOnSoon):
                self.later(action.after_ns, lambda: self.do(self.agreement.pass_on(self.now_ns)))
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
            elif isinstance(action, TakeSides):
                self.waits.take_sides()
            else:
                assert isinstance(action, StopStep)
                self.computing = self.microbatches.part = None

    def _plan_later(self, action: ComputePlan) -> None:
        def planned() -> None:
            plan = self.world.planner(action.snapshot)
            self.do(self.agreement.plan_computed(action.snapshot, plan, self.now_ns))

        self.later(self.world.chance.randrange(self.world.plan_ns), planned)

    def _agreed(self, action: ViewAgreed) -> None:
        if action.discard:
            self.states, self.cuts.copies = {}, {}
            self.cuts.say()
        if action.view.snapshot.planned:
            self.later(self.world.chance.randrange(SECOND_NS), self.training.check_synced)

    def _take_over(self, action: TakeOver) -> None:
        view, restart = action.view, action.restart
        self.world.invariants.takes_over(self.name, self.record.life, view)
        self.keep_history()
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
                    self.apply(layer, kept.get(layer))
                lineage = self.agreement.recovery_evidence.lineage.digest
                self.world.invariants.leads_to(
                    self.name, restart.rolled_view, action.step - 1, lineage
                )
        if action.step == 0:
            for layer in self.wanted(view):
                self.states.setdefault(layer, HashState(0, GENESIS_VALUE))
        own = {} if view.cut_pace is not None else view.guardians_of(self.name)
        self.receipts = Receipts(view.id, own, view.guarded_at_once)
        self.cuts.enter(view, action.step)
        for store in (self.partials, self.prepared, self.microbatches.arrived):
            for key in [key for key in store if key[0].number < view.id.number]:
                del store[key]
        self.computing = self.microbatches.part = None
        self.microbatches.replay = action.replay
        replay = action.replay
        if replay is not None and self.world.redone.setdefault(view.id, replay) != replay:
            raise Violation(f"{self.name} keeps something else than others in view {view.id}")
        self.sync_held()
        plan = "no plan" if action.ledger is None else self._describe(view)
        self.say(
            f"is in view {view.id} of {','.join(view.member_ids)} from step {action.step}: {plan}"
        )
        self.training.start_step()

    def _load(self, layer: int, step: int) -> HashState:
        if step == 0:
            return HashState(0, GENESIS_VALUE)
        lineage = self.agreement.recovery_evidence.lineage.at(step)
        cut = self.cuts.find(layer, step, lineage or "")
        if cut is not None:
            return cut
        saved = [c.states[layer] for c in self.disk if (c.step, c.lineage) == (step, lineage)]
        if not saved:
            raise Violation(f"{self.name} has no checkpoint of layer {layer} at step {step}")
        return saved[-1]

    def _describe(self, view: View) -> str:
        assert isinstance(view.plan, Plan)
        pipelines = [
            " ".join(f"{s.peer_id}[{s.first_layer}:{s.end_layer}]" for s in pipeline.stages)
            for pipeline in view.plan.pipelines
        ]
        return " | ".join(pipelines)

    def _rejoin(self, action: Rejoin) -> None:
        self.say(f"rejoins: {action.reason}")
        self.keep_history()
        self.computing = self.microbatches.part = self.receipts = self.cuts.clock = None
        self.record = msgspec.structs.replace(self.record, life=self.record.life + 1)
        signed = sign_record(self.record, sign_for(self.name))
        self.agreement.begin_life(self.record, signed)
        self.last_said.clear()
