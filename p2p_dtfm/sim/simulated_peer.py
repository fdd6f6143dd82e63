"""A peer in virtual time: what the daemon does around `core`, with states that are hashes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from p2p_dtfm.core.actions import (
    SECOND_NS,
    Actions,
    ComputePlan,
    Halt,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    ViewAgreed,
)
from p2p_dtfm.core.agreement import Agreement
from p2p_dtfm.core.agreement_messages import (
    Active,
    AgreementMessage,
    Heartbeat,
    SavedState,
)
from p2p_dtfm.core.canonical import digest_bytes
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.guardians import Receipts
from p2p_dtfm.core.ledger import Ledger
from p2p_dtfm.core.liveness import Liveness
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.records import Intent, PeerRecord, sign_record
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import Member, ViewId
from p2p_dtfm.core.step import Prepared
from p2p_dtfm.core.view import View
from p2p_dtfm.sim.invariants import Violation
from p2p_dtfm.sim.training import (
    GENESIS_VALUE,
    Gradient,
    Partial,
    Receipt,
    Reduced,
    State,
    StateReply,
    StateRequest,
    Tensor,
    applied,
    loss_sum,
    reduce,
)

if TYPE_CHECKING:
    from p2p_dtfm.sim.agreement_world import AgreementWorld

Key = tuple[ViewId, int]

RESEND_NS = SECOND_NS
LINGER_NS = 20 * SECOND_NS
"""A peer that has left gives state to those that took its place for so long."""
CHECKPOINT_STEPS = 3
PREPARED_KEPT = 2


def sign_for(peer_id: str) -> Callable[[bytes], bytes]:
    """A stand-in for Ed25519: fast, and a changed byte shows."""
    return lambda payload: digest_bytes(peer_id.encode() + payload).encode()


def verify(peer_id: str, payload: bytes, signature: bytes) -> bool:
    return signature == sign_for(peer_id)(payload)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    lineage: str
    states: dict[int, State]


@dataclass
class SimulatedPeer:
    """`start` begins a process of this peer; `alive` and `stopped` are up to the world."""

    name: str
    record: PeerRecord
    world: AgreementWorld
    alive: bool = True
    stopped: bool = False
    left: bool = False
    gone: bool = False
    slowness: float = 1.0
    process: int = 0
    disk: list[Checkpoint] = field(default_factory=list)
    views: list[View] = field(default_factory=list)

    # a process ----------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, with what is on the disk."""
        self.process += 1
        self.alive, self.stopped = True, False
        self.backlog: list[Callable[[], None]] = []
        self.states: dict[int, State] = {}
        self.gradients: dict[Key, dict[int, Gradient]] = {}
        self.partials: dict[Key, dict[str, Partial]] = {}
        self.prepared: dict[Key, dict[str, Prepared]] = {}
        self.said: set[Key] = set()
        self.last_said: deque[Prepared] = deque(maxlen=PREPARED_KEPT)
        self.computing: Key | None = None
        self.receipts: Receipts | None = None
        self.progress = 0
        self.resent_ns = self.asked_ns = 0
        self.liveness = Liveness(self.world.liveness_timing)
        self.agreement = Agreement(
            Member(self.name, self.record.life),
            self.record.run_digest,
            self.world.workload,
            sign_for(self.name),
            verify,
            self.world.timing,
        )
        self._set_record()
        if self.disk:
            newest = self.disk[-1]
            self.states = dict(newest.states)
            self.agreement.resume(newest.step, self._held(), newest.lineage)
            self._say_saved()
        else:
            genesis = State(0, GENESIS_VALUE)
            self.states = {layer: genesis for layer in range(self.world.workload.layer_count)}
            self.agreement.held = self._held()
        self.later(self.world.chance.randrange(self.world.tick_ns), self._tick)

    def _set_record(self, **changes: object) -> Signed:
        self.record = msgspec.structs.replace(self.record, **changes)
        signed = sign_record(self.record, sign_for(self.name))
        if self.record.life == self.agreement.me.life:
            self.agreement.set_record(self.record, signed)
        return signed

    def restart(self) -> None:
        """After a crash: a new process in a higher life."""
        self.record = msgspec.structs.replace(self.record, life=self.record.life + 1)
        self.start()
        self.agreement.wants_view()

    def leave(self) -> None:
        self._set_record(intent=Intent.LEAVING, sequence=self.record.sequence + 1)
        self.do(self.agreement.request_replan(f"{self.name} leaves", self.world.now_ns))

    def later(self, delay_ns: int, event: Callable[[], None]) -> None:
        process = self.process
        self.world.after(delay_ns, lambda: self.run(process, event))

    def run(self, process: int, event: Callable[[], None]) -> None:
        """An event of one process; a stopped one gets it when it goes on."""
        if process != self.process or not self.alive or self.gone:
            return
        if self.stopped:
            self.backlog.append(event)
        else:
            event()

    def go_on(self) -> None:
        """Timers fire before sockets are read."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        self._beat()
        for event in backlog:
            self.run(self.process, event)

    @property
    def view(self) -> View | None:
        return self.agreement.view

    def _held(self) -> dict[int, int]:
        return {layer: state.version for layer, state in self.states.items()}

    def say(self, text: str) -> None:
        self.world.tell(self.name, text)

    # time ---------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._beat()
        self.later(self.world.tick_ns, self._tick)

    def _beat(self) -> None:
        now_ns, agreement = self.world.now_ns, self.agreement
        self.liveness.watch(self._watched(), now_ns)
        for suspicion in self.liveness.tick(now_ns):
            self.do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        self.do(agreement.tick(now_ns))
        for peer_id in self.liveness.due_heartbeats(now_ns):
            self._send(peer_id, Heartbeat(agreement.me, self.progress, not self._computes()))
        if now_ns - self.resent_ns >= RESEND_NS:
            self.resent_ns = now_ns
            self._resend()
        if now_ns - self.asked_ns >= RESEND_NS // 2:
            self.asked_ns = now_ns
            self._check_commit()
            self._fetch_missing()
            self._ask_to_join()

    def _computes(self) -> bool:
        """Rather than waiting for others."""
        return self.computing is not None and self.name not in self.partials.get(self.computing, {})

    def _watched(self) -> set[str]:
        members: set[Member] = set()
        for view in (self.agreement.view, self.agreement.next_view):
            if view is not None and self.agreement.me in view.members:
                members |= set(view.members)
        return {member.peer_id for member in members} - {self.name}

    def _ask_to_join(self) -> None:
        agreement = self.agreement
        if not self.world.rejoins or agreement.view or agreement.attempting:
            return
        if not self.left:
            others = sorted(name for name in self.world.peers if name != self.name)
            if others:
                self._send(self.world.chance.choice(others), agreement.wants_view())

    def _resend(self) -> None:
        for prepared in self.last_said:
            self._broadcast(prepared)
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        mine = self.partials.get(key, {}).get(self.name)
        if mine is not None:
            self._send_partial(plan, mine)
            self._feed_guardians(key)

    # messages -----------------------------------------------------------------------------------

    def _send(self, receiver: str, message: AgreementMessage | Prepared | Tensor) -> None:
        self.liveness.said(receiver, self.world.now_ns)
        self.world.send(self.name, receiver, message)

    def receive(self, sender: str, message: AgreementMessage | Prepared | Tensor) -> None:
        now_ns = self.world.now_ns
        if isinstance(message, Heartbeat):
            self.liveness.heartbeat(sender, message.progress, message.waits, now_ns)
        else:
            self.liveness.heard(sender, now_ns)
        if isinstance(message, Prepared):
            self._receive_prepared(message)
        elif isinstance(message, Partial):
            self._receive_partial(message)
        elif isinstance(message, Reduced):
            self._receive_reduced(message)
        elif isinstance(message, Receipt):
            if self.receipts is not None:
                self.receipts.receipt(sender, message.view, message.step, message.layers)
                self._try_prepare()
        elif isinstance(message, StateRequest):
            self._give_states(message)
        elif isinstance(message, StateReply):
            self._take_states(message)
        else:
            try:
                actions = self.agreement.receive(sender, message, now_ns)
            except PeerFault as fault:
                raise Violation(f"{self.name} takes {sender} for faulty: {fault}") from fault
            self.do(actions)
            if isinstance(message, Active):
                self._check_commit()

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
            elif isinstance(action, Halt):
                raise Violation(action.reason)
            else:
                assert isinstance(action, StopStep)
                self.computing = None

    def _plan_later(self, action: ComputePlan) -> None:
        def planned() -> None:
            plan = self.world.planner(action.snapshot)
            self.do(self.agreement.plan_computed(action.snapshot, plan, self.world.now_ns))

        self.later(self.world.chance.randrange(SECOND_NS // 2), planned)

    # views --------------------------------------------------------------------------------------

    def _wanted(self, view: View) -> set[int]:
        guarded = {layer for layer, guardian in view.guards.items() if guardian == self.name}
        return set(view.layers_of(self.name)) | guarded

    def _agreed(self, action: ViewAgreed) -> None:
        if action.discard:
            self.states = {}
        if action.view.snapshot.planned:
            self.later(self.world.chance.randrange(SECOND_NS), self._check_synced)

    def _check_synced(self) -> None:
        view = self.agreement.next_view
        if view is not None and self._wanted(view) <= set(self.states):
            self.do(self.agreement.synced(view.id))

    def _take_over(self, action: TakeOver) -> None:
        view, restart = action.view, action.restart
        self.world.invariants.takes_over(self.name, self.record.life, view)
        self.views.append(view)
        if restart is not None:
            for layer in restart.discard:
                self.states.pop(layer, None)
            for layer in restart.load:
                self.states[layer] = self._load(layer, action.step)
            if restart.rolled_view is not None:
                kept = self.gradients.get((restart.rolled_view, action.step - 1), {})
                for layer in restart.roll_forward:
                    self._apply(layer, kept.get(layer))
        if action.step == 0:
            for layer in self._wanted(view):
                self.states.setdefault(layer, State(0, GENESIS_VALUE))
        own = {n: peer for n, peer in view.guards.items() if n in view.layers_of(self.name)}
        self.receipts = Receipts(view.id, own)
        for store in (self.partials, self.prepared):
            for key in [key for key in store if key[0].number < view.id.number]:
                del store[key]
        self.computing = None
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

    def _load(self, layer: int, step: int) -> State:
        if step == 0:
            return State(0, GENESIS_VALUE)
        saved = [item.states[layer] for item in self.disk if item.step == step]
        if not saved:
            raise Violation(f"{self.name} has no checkpoint of layer {layer} at step {step}")
        return saved[-1]

    def _rejoin(self, action: Rejoin) -> None:
        self.say(f"rejoins: {action.reason}")
        self.computing = self.receipts = None
        self.record = msgspec.structs.replace(self.record, life=self.record.life + 1)
        signed = sign_record(self.record, sign_for(self.name))
        self.agreement.begin_life(self.record, signed)
        self.last_said.clear()

    def _sync_held(self) -> None:
        self.world.invariants.holds(self.name, self.states)
        self.agreement.held = self._held()

    # the step -----------------------------------------------------------------------------------

    def _training(self) -> tuple[View | None, Plan | None]:
        view = self.agreement.view
        if view is None or self.agreement.frozen or self.left or not isinstance(view.plan, Plan):
            return None, None
        return view, view.plan

    def _key(self, view: ViewId, step: int) -> Key:
        """Every tensor belongs to the step of one view."""
        return view, step

    def _start_step(self) -> None:
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        layers = view.layers_of(self.name)
        ready = all(n in self.states and self.states[n].version == key[1] for n in layers)
        if layers and ready and self.computing != key and key not in self.said:
            self.computing = key
            low, high = self.world.compute_ns
            delay_ns = int(self.world.chance.randrange(low, high) * self.slowness)
            self.later(delay_ns, lambda: self._computed(key))
        self._check_commit()

    def _computed(self, key: Key) -> None:
        view, plan = self._training()
        if view is None or plan is None or self.computing != key:
            return
        assert key == (view.id, self.agreement.step)
        self.progress += 1
        place = plan.place_of(self.name)
        assert place is not None
        microbatches = tuple(plan.pipelines[place[0]].microbatches)
        layers = {
            n: Gradient(microbatches, self.states[n].value) for n in view.layers_of(self.name)
        }
        mine = Partial(self.agreement.me, *key, layers)
        self.partials.setdefault(self._key(*key), {})[self.name] = mine
        self._send_partial(plan, mine)
        self._try_reduce()

    def _send_partial(self, plan: Plan, mine: Partial) -> None:
        others = {holder for layer in mine.layers for holder in plan.holders(layer)}
        for holder in sorted(others - {self.name}):
            self._send(holder, mine)

    def _receive_partial(self, partial: Partial) -> None:
        view = self.agreement.view
        if view is not None and partial.view.number < view.id.number:
            return
        parts = self.partials.setdefault(self._key(partial.view, partial.step), {})
        parts[partial.sender.peer_id] = partial
        self._try_reduce()

    def _try_reduce(self) -> None:
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        parts = self.partials.get(self._key(*key), {})
        if self.name not in parts:
            return
        done = self.gradients.setdefault(key, {})
        for segment in plan.segments():
            holders, layers = segment.holders, set(segment.layers) - set(done)
            if self.name not in holders or any(peer not in parts for peer in holders):
                continue
            for layer in layers:
                found = [parts[peer].layers.get(layer) for peer in holders]
                if all(part is not None for part in found):
                    whole = reduce([part for part in found if part is not None])
                    if whole is None:
                        raise Violation(f"{self.name} reduces gradients of different states")
                    done[layer] = whole
        self.agreement.reduced(key[1], set(done))
        self._feed_guardians(key)
        self._try_prepare()

    def _feed_guardians(self, key: Key) -> None:
        """Reduced gradients of layers that nobody else holds go to their guardians."""
        view, plan = self._training()
        if view is None or plan is None:
            return
        guards = view.guards
        for guardian in sorted(set(guards.values()) - {self.name}):
            layers = {
                layer: gradient
                for layer, gradient in self.gradients.get(key, {}).items()
                if guards.get(layer) == guardian and plan.holders(layer) == (self.name,)
            }
            if layers:
                self._send(guardian, Reduced(self.agreement.me, *key, layers))

    def _receive_reduced(self, message: Reduced) -> None:
        view, _ = self._training()
        step = self.agreement.step
        if view is None or message.view != view.id or message.step < step:
            return
        held = self.gradients.setdefault((message.view, message.step), {})
        for layer, gradient in message.layers.items():
            held.setdefault(layer, gradient)
        self._acknowledge(message.sender.peer_id)

    def _acknowledge(self, holder: str) -> None:
        view, plan = self._training()
        if view is None or plan is None:
            return
        step = self.agreement.step
        received = self.gradients.get((view.id, step), {})
        layers = {
            layer
            for layer in received
            if plan.holders(layer) == (holder,)
            and layer in self.states
            and self.states[layer].version == step
        }
        if layers:
            self.agreement.reduced(step, layers)
            receipt = Receipt(self.agreement.me, view.id, step, tuple(sorted(layers)))
            self._send(holder, receipt)

    def _try_prepare(self) -> None:
        view, plan = self._training()
        if view is None or plan is None or self.receipts is None:
            return
        key = (view.id, self.agreement.step)
        done = self.gradients.get(key, {})
        layers = view.layers_of(self.name)
        waits = self.receipts.waits_for(key[1])
        if key in self.said or not layers or not set(layers) <= set(done) or waits:
            return
        self.said.add(key)
        self.computing = None
        self.progress += 1
        prepared = self._make_prepared(view, plan, key[1], done)
        self.last_said.append(prepared)
        self._keep_prepared(prepared)
        self._broadcast(prepared)
        self._check_commit()

    def _make_prepared(
        self, view: View, plan: Plan, step: int, done: dict[int, Gradient]
    ) -> Prepared:
        stage, place = plan.stage_of(self.name), plan.place_of(self.name)
        assert stage is not None and place is not None
        has_head = stage.end_layer == self.world.workload.layer_count
        count = plan.pipelines[place[0]].microbatch_count if has_head else 0
        norms = {
            number: float(sum(done[layer].base % 1009 for layer in segment.layers))
            for number, segment in enumerate(plan.segments())
            if self.name in segment.holders
        }
        return Prepared(
            view=view.id,
            step=step,
            peer_id=self.name,
            squared_norms=norms,
            loss_sum=loss_sum(step, count),
            token_count=count,
            held_out_loss_sum=0.0,
            held_out_token_count=0,
            ready_for=self.agreement.ready_for,
        )

    def _broadcast(self, prepared: Prepared) -> None:
        view, following = self.agreement.view, self.agreement.next_view
        receivers = set(view.member_ids) if view is not None else set()
        if view is not None and not view.takes_effect_at_once:
            receivers |= {member.peer_id for member in view.snapshot.contributors}
        if following is not None:
            receivers |= set(following.member_ids)
        for receiver in sorted(receivers - {self.name}):
            self._send(receiver, prepared)

    def _receive_prepared(self, prepared: Prepared) -> None:
        view = self.agreement.view
        if view is not None and prepared.view.number < view.id.number:
            return
        if self._keep_prepared(prepared):
            self._check_commit()

    def _keep_prepared(self, prepared: Prepared) -> bool:
        """True if it is news."""
        held = self.prepared.setdefault(self._key(prepared.view, prepared.step), {})
        if prepared.peer_id in held:
            return False
        held[prepared.peer_id] = prepared
        return True

    def _check_commit(self) -> None:
        while True:
            view, plan = self._training()
            ledger = self.agreement.ledger
            if view is None or plan is None or ledger is None:
                return
            self._skip(view, ledger)
            for prepared in self.prepared.get(self._key(view.id, ledger.step), {}).values():
                ledger.record(prepared)
            if not self._commit(view, ledger):
                return

    def _skip(self, view: View, ledger: Ledger) -> None:
        """A peer without a stage may miss so many messages that it cannot follow each step."""
        if view.layers_of(self.name):
            return
        ahead = [step for of, step in self.prepared if of == view.id]
        if max(ahead, default=0) >= ledger.step + 2:
            self.agreement.skip_to(max(ahead))

    def _commit(self, view: View, ledger: Ledger) -> bool:
        outcome = ledger.next_outcome()
        if outcome is None:
            return False
        now_ns, step = self.world.now_ns, outcome.step
        gradients = self.gradients.get((view.id, step), {})
        stage = set(view.layers_of(self.name))
        for layer, state in list(self.states.items()):
            if layer in stage or (layer in gradients and state.version == step):
                self._apply(layer, gradients.get(layer))
        actions = self.agreement.committed(outcome, now_ns)
        lineage = self.agreement.inventory.lineage.at(step + 1)
        assert lineage is not None
        self.world.invariants.commits_step(self.name, view.id, outcome, lineage)
        self.world.committed(self.name, step)
        self._forget(view, step)
        self._sync_held()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            self._checkpoint(step + 1, lineage)
        self.do(actions)
        if self.agreement.view is view:
            self._start_step()
        return True

    def _apply(self, layer: int, gradient: Gradient | None) -> None:
        state = self.states[layer]
        self.world.invariants.applies(self.name, layer, state, gradient)
        assert gradient is not None
        self.states[layer] = applied(state, gradient)

    def _forget(self, view: View, step: int) -> None:
        """A step has committed: what was kept for the case that it would not is not needed."""
        wanted = self._wanted(view)
        if self.agreement.next_view is not None:
            wanted |= self._wanted(self.agreement.next_view)
        if self.agreement.view is view:
            self.states = {n: state for n, state in self.states.items() if n in wanted}
        retained = (view.id, step)
        self.gradients = {
            key: held for key, held in self.gradients.items() if key == retained or key[1] > step
        }
        for store in (self.partials, self.prepared):
            for key in [key for key in store if key[1] < step]:
                del store[key]

    def _checkpoint(self, step: int, lineage: str) -> None:
        states = {n: state for n, state in self.states.items() if state.version == step}
        if states:
            self.disk = [*self.disk, Checkpoint(step, lineage, states)][-2:]
            self._say_saved()

    def can_reach(self, layer: int, step: int) -> bool:
        """Whether the state of a layer at `step`, or a newer one, is here or one gradient away."""
        state = self.states.get(layer)
        if state is None or state.version >= step:
            return state is not None
        return state.version == step - 1 and any(
            key[1] == step - 1 and layer in held for key, held in self.gradients.items()
        )

    def _say_saved(self) -> None:
        self.agreement.inventory.saved = tuple(
            SavedState(item.step, item.lineage, tuple(sorted(item.states))) for item in self.disk
        )

    # states -------------------------------------------------------------------------------------

    def _fetch_missing(self) -> None:
        agreement, asked = self.agreement, dict[tuple[str, ViewId], set[int]]()
        view, plan = self._training()
        if view is not None and plan is not None:
            for layer in sorted(self._wanted(view)):
                state = self.states.get(layer)
                if state is None or state.version < agreement.step:
                    self._choose_donor(view, layer, asked)
        following = agreement.next_view
        if following is not None and not agreement.frozen:
            for layer in sorted(self._wanted(following) - set(self.states)):
                self._choose_donor(following, layer, asked)
        for (donor, of), layers in asked.items():
            self._send(donor, StateRequest(agreement.me, of, tuple(sorted(layers))))

    def _choose_donor(
        self, view: View, layer: int, asked: dict[tuple[str, ViewId], set[int]]
    ) -> None:
        donors = {item.peer_id for item in view.snapshot.held if item.layer == layer}
        present = view.snapshot.present
        if present is not None:
            donors = set(present.holders(layer))
        if view is self.agreement.view and isinstance(view.plan, Plan):
            donors |= set(view.plan.holders(layer))
        donors.discard(self.name)
        if donors:
            donor = self.world.chance.choice(sorted(donors))
            asked.setdefault((donor, view.id), set()).add(layer)

    def _give_states(self, request: StateRequest) -> None:
        agreement = self.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if request.view not in views or agreement.frozen:
            return
        lineage = agreement.inventory.lineage
        found = {n: self.states[n] for n in request.layers if n in self.states}
        digests = {n: lineage.at(state.version) for n, state in found.items()}
        known = {n: digest for n, digest in digests.items() if digest is not None}
        if known:
            states = {n: found[n] for n in known}
            reply = StateReply(agreement.me, request.view, states, known)
            delay_ns = self.world.chance.randrange(self.world.transfer_ns)
            receiver = request.sender.peer_id
            self.later(delay_ns, lambda: self._send(receiver, reply))

    def _take_states(self, reply: StateReply) -> None:
        agreement = self.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if reply.view not in views or agreement.frozen:
            return
        for layer, state in reply.states.items():
            mine = agreement.inventory.lineage.at(state.version)
            held = self.states.get(layer)
            on_lineage = agreement.view is None or mine == reply.lineages[layer]
            if on_lineage and (held is None or held.version < state.version):
                self.states[layer] = state
        self._sync_held()
        self._check_synced()
        self._start_step()
