"""The steps of a simulated peer: compute, reduce, prepare, commit; and states for its place."""

from __future__ import annotations

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES, SUM_DIGEST_BYTES
from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.prepared import (
    STEPS_AHEAD_LIMIT,
    Prepared,
    Statement,
    open_prepared,
    sign_prepared,
)
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import (
    Gradient,
    Partial,
    Receipt,
    Reduced,
    StateReply,
    StateRequest,
    loss_sum,
    reduce,
)
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_cuts import SimulatedCuts
from p2p_dtfm.sim.faults.simulated_microbatches import SimulatedMicrobatches
from p2p_dtfm.sim.faults.simulated_process import (
    CHECKPOINT_STEPS,
    TERMS,
    Key,
    SimulatedProcess,
    sign_for,
    verify,
)


class SimulatedTraining:
    """Does what the trainer does in the daemon."""

    def __init__(
        self, peer: SimulatedProcess, microbatches: SimulatedMicrobatches, cuts: SimulatedCuts
    ) -> None:
        self.peer = peer
        self.microbatches = microbatches
        self.cuts = cuts

    def start_step(self) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None:
            return
        key = (view.id, peer.agreement.step)
        layers = view.layers_of(peer.name)
        ready = all(n in peer.states and peer.states[n].version == key[1] for n in layers)
        if layers and ready and peer.computing != key and key not in peer.said:
            peer.computing = key
            self.cuts.take(view, key[1])
            self.microbatches.begin(view, plan, key)
        self.check_commit()

    def all_computed(self, key: Key) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None or peer.computing != key:
            return
        assert key == (view.id, peer.agreement.step)
        microbatches = tuple(self.microbatches.work.buffers)
        layers = {
            n: Gradient(microbatches, peer.states[n].value) for n in view.layers_of(peer.name)
        }
        mine = Partial(peer.agreement.me, *key, layers)
        peer.partials.setdefault(peer.tensor_key(*key), {})[peer.name] = mine
        self.send_partial(plan, mine)
        self._try_reduce()

    def send_partial(self, plan: Plan, mine: Partial) -> None:
        peer = self.peer
        others = {holder for layer in mine.layers for holder in plan.holders(layer)}
        for holder in sorted(others - {peer.name}):
            peer.send(holder, mine)

    def receive_partial(self, partial: Partial) -> None:
        peer = self.peer
        view = peer.agreement.view
        if view is not None and partial.view.number < view.id.number:
            return
        parts = peer.partials.setdefault(peer.tensor_key(partial.view, partial.step), {})
        parts[partial.sender.peer_id] = partial
        self._try_reduce()

    def _try_reduce(self) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None:
            return
        key = (view.id, peer.agreement.step)
        parts = peer.partials.get(peer.tensor_key(*key), {})
        if peer.name not in parts:
            return
        done = peer.gradients.setdefault(key, {})
        for segment in plan.segments():
            holders, layers = segment.holders, set(segment.layers) - set(done)
            if peer.name not in holders or any(name not in parts for name in holders):
                continue
            for layer in layers:
                found = [parts[name].layers.get(layer) for name in holders]
                if all(part is not None for part in found):
                    whole = reduce([part for part in found if part is not None])
                    if whole is None:
                        raise Violation(f"{peer.name} reduces gradients of different states")
                    done[layer] = whole
        peer.agreement.reduced(key[1], set(done))
        self.feed_guardians(key)
        self.try_prepare()

    def feed_guardians(self, key: Key) -> None:
        """Send reduced gradients of layers that nobody else holds to their guardians."""
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None or view.cut_pace is not None:
            return
        guards = view.guards
        for guardian in sorted(set(guards.values()) - {peer.name}):
            layers = {
                layer: gradient
                for layer, gradient in peer.gradients.get(key, {}).items()
                if guards.get(layer) == guardian and plan.holders(layer) == (peer.name,)
            }
            if layers:
                peer.send(guardian, Reduced(peer.agreement.me, *key, layers))

    def receive_reduced(self, message: Reduced) -> None:
        peer = self.peer
        view, _ = peer.in_training()
        step = peer.agreement.step
        if view is None or message.view != view.id or message.step < step:
            return
        held = peer.gradients.setdefault((message.view, message.step), {})
        for layer, gradient in message.layers.items():
            held.setdefault(layer, gradient)
        self._acknowledge(message.sender.peer_id)

    def _acknowledge(self, holder: str) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None:
            return
        step = peer.agreement.step
        received = peer.gradients.get((view.id, step), {})
        layers = {
            layer
            for layer in received
            if plan.holders(layer) == (holder,)
            and layer in peer.states
            and peer.states[layer].version == step
        }
        if layers:
            peer.agreement.reduced(step, layers)
            receipt = Receipt(peer.agreement.me, view.id, step, tuple(sorted(layers)))
            peer.send(holder, receipt)

    def try_prepare(self) -> None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None or peer.receipts is None:
            return
        key = (view.id, peer.agreement.step)
        done = peer.gradients.get(key, {})
        layers = view.layers_of(peer.name)
        waits = peer.receipts.waits_for(key[1])
        if key in peer.said or not layers or not set(layers) <= set(done) or waits:
            return
        peer.said.add(key)
        peer.computing = None
        peer.progress += 1
        prepared = self.make_prepared(view, plan, key[1], done)
        signed = sign_prepared(prepared, sign_for(peer.name))
        peer.last_said.append(signed)
        self._keep_prepared(Statement(prepared, signed))
        peer.broadcast(signed)
        self.check_commit()

    def make_prepared(
        self, view: View, plan: Plan, step: int, done: dict[int, Gradient]
    ) -> Prepared:
        peer = self.peer
        has_head = plan.layers_of(peer.name).stop == peer.world.workload.layer_count
        count = len(self.microbatches.work.forwarded) if has_head else 0
        norms = {
            number: float(sum(done[layer].base % 1009 for layer in segment.layers))
            for number, segment in enumerate(plan.segments())
            if peer.name in segment.holders
        }
        sums = {
            number: tuple(
                _digest(norms[number], holder)[:SUM_DIGEST_BYTES] for holder in segment.holders
            )
            for number, segment in enumerate(plan.segments())
            if peer.name in segment.holders and len(segment.holders) > 1
        }
        held = peer.states if TERMS.tells_states(step) else {}
        states = {n: _digest(held[n].value) for n in view.layers_of(peer.name) if n in held}
        return Prepared(
            view=view.id,
            step=step,
            peer_id=peer.name,
            squared_norms=norms,
            loss_sum=loss_sum(step, count),
            token_count=count,
            held_out_loss_sum=0.0,
            held_out_token_count=0,
            ready_for=peer.agreement.vouch(),
            kept=self.cuts.clock.kept if self.cuts.clock is not None else -1,
            base=peer.agreement.recovery_evidence.lineage.digest,
            sums=sums,
            states=states,
        )

    def receive_prepared(self, signed: Signed) -> None:
        prepared = open_prepared(signed, verify)
        view = self.peer.agreement.view
        if view is not None and prepared.view.number < view.id.number:
            return
        if self._keep_prepared(Statement(prepared, signed)):
            self.check_commit()

    def _keep_prepared(self, statement: Statement) -> bool:
        """Keep a Prepared, and say whether it is news."""
        prepared = statement.prepared
        held = self.peer.prepared.setdefault((prepared.view, prepared.step), {})
        if prepared.peer_id in held:
            return False
        held[prepared.peer_id] = statement
        return True

    def check_commit(self) -> None:
        peer = self.peer
        while True:
            view, plan = peer.in_training()
            ledger = peer.agreement.ledger
            if view is None or plan is None or ledger is None:
                return
            self._skip(view, ledger)
            for statement in peer.prepared.get((view.id, ledger.step), {}).values():
                try:
                    ledger.record(statement)
                except PeerFault as fault:
                    self._contradicted(fault.cause, {statement.prepared.peer_id})
                    return
            if not self._commit(view, ledger):
                conflict = ledger.conflict
                if conflict.reason:
                    pairs = {name for pair in conflict.doubts for name in pair}
                    self._contradicted(conflict.reason, pairs | conflict.left_out)
                return

    def _contradicted(self, reason: str, accused: set[str]) -> None:
        """Note that not all that is said of the step can be true, so that somebody lies."""
        peer = self.peer
        liars = peer.world.liars
        if not liars or (accused and not accused & liars):
            raise Violation(f"{peer.name} finds fault with {sorted(accused)}: {reason}")
        peer.do(peer.agreement.repeat_step(reason, peer.now_ns))

    def _skip(self, view: View, ledger: Ledger) -> None:
        """Follow the steps without a stage. Such a peer may miss so many messages that it cannot
        follow each."""
        peer = self.peer
        if view.layers_of(peer.name):
            return
        for of, step in sorted(peer.prepared):
            for statement in peer.prepared[of, step].values():
                if of == view.id and step >= ledger.step + STEPS_AHEAD_LIMIT:
                    found = ledger.says_ahead(statement)
                    if found is not None:
                        peer.agreement.skip_to(*found)

    def _commit(self, view: View, ledger: Ledger) -> bool:
        peer = self.peer
        outcome = ledger.next_outcome()
        if outcome is None:
            return False
        now_ns, step = peer.now_ns, outcome.step
        gradients = peer.gradients.get((view.id, step), {})
        stage = set(view.layers_of(peer.name))
        for layer, state in list(peer.states.items()):
            if layer in stage or (layer in gradients and state.version == step):
                peer.apply(layer, gradients.get(layer))
        self.cuts.committed(view, step, outcome.kept)
        actions = peer.agreement.committed(outcome, now_ns)
        lineage = peer.agreement.recovery_evidence.lineage.at(step + 1)
        assert lineage is not None
        peer.world.invariants.commits_step(peer.name, view.id, outcome, lineage)
        peer.world.committed(peer.name, step)
        self._forget(view, step)
        peer.sync_held()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            peer.checkpoint(step + 1, lineage)
        peer.do(actions)
        if peer.agreement.view is view:
            self.start_step()
        return True

    def _forget(self, view: View, step: int) -> None:
        """Forget what was kept in case a step would not commit, now that it has."""
        peer = self.peer
        wanted = peer.wanted(view)
        if peer.agreement.next_view is not None:
            wanted |= peer.wanted(peer.agreement.next_view)
        if peer.agreement.view is view:
            for layer in set(peer.states) - wanted:
                self.cuts.keep(layer, peer.states.pop(layer))
        retained = (view.id, step)
        peer.gradients = {
            key: held for key, held in peer.gradients.items() if key == retained or key[1] > step
        }
        for store in (peer.partials, peer.prepared, self.microbatches.arrived):
            for key in [key for key in store if key[1] < step]:
                del store[key]

    def check_synced(self) -> None:
        peer = self.peer
        view = peer.agreement.next_view
        if view is not None and peer.wanted(view) <= set(peer.states):
            peer.do(peer.agreement.synced(view.id))

    def fetch_missing(self) -> None:
        peer = self.peer
        agreement, asked = peer.agreement, dict[tuple[str, ViewId], set[int]]()
        view, plan = peer.in_training()
        if view is not None and plan is not None:
            for layer in sorted(peer.wanted(view)):
                state = peer.states.get(layer)
                if state is None or state.version < agreement.step:
                    self._choose_donor(view, layer, asked)
        next_view = agreement.next_view
        if next_view is not None and not agreement.frozen:
            for layer in sorted(peer.wanted(next_view) - set(peer.states)):
                self._choose_donor(next_view, layer, asked)
        for (donor, of), layers in asked.items():
            peer.send(donor, StateRequest(agreement.me, of, tuple(sorted(layers))))

    def _choose_donor(
        self, view: View, layer: int, asked: dict[tuple[str, ViewId], set[int]]
    ) -> None:
        peer = self.peer
        donors = {item.peer_id for item in view.snapshot.held if item.layer == layer}
        present = view.snapshot.present
        if view.snapshot.planned and present is not None:
            donors = set(present.holders(layer))
        if view is peer.agreement.view and isinstance(view.plan, Plan):
            donors |= set(view.plan.holders(layer))
        if view.snapshot.planned and peer.world.chance.random() < 0.2:
            donors = {m.peer_id for m in view.snapshot.contributors}  # a guardian may have it
        donors.discard(peer.name)
        if donors:
            donor = peer.world.chance.choice(sorted(donors))
            asked.setdefault((donor, view.id), set()).add(layer)

    def give_states(self, request: StateRequest) -> None:
        peer = self.peer
        agreement = peer.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if request.view not in views or agreement.frozen:
            return
        lineage = agreement.recovery_evidence.lineage
        found = {n: peer.states[n] for n in request.layers if n in peer.states}
        digests = {n: lineage.at(state.version) for n, state in found.items()}
        known = {n: digest for n, digest in digests.items() if digest is not None}
        if known:
            states = {n: found[n] for n in known}
            reply = StateReply(agreement.me, request.view, states, known)
            delay_ns = peer.world.chance.randrange(peer.world.transfer_ns)
            receiver = request.sender.peer_id
            workload = peer.world.workload
            peer.given[receiver] += sum(workload.cost(layer).state_bytes for layer in states)
            peer.later(delay_ns, lambda: peer.send(receiver, reply))

    def take_states(self, reply: StateReply) -> None:
        peer = self.peer
        agreement = peer.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if reply.view not in views or agreement.frozen:
            return
        for layer, state in reply.states.items():
            mine = agreement.recovery_evidence.lineage.at(state.version)
            held = peer.states.get(layer)
            on_lineage = agreement.view is None or mine == reply.lineages[layer]
            if on_lineage and (held is None or held.version < state.version):
                peer.states[layer] = state
                self._follow_on(layer)
        peer.sync_held()
        self.check_synced()
        self.start_step()

    def _follow_on(self, layer: int) -> None:
        """Apply a step's gradient to a state that comes after the commit, if the gradient is
        here."""
        peer = self.peer
        lineage = peer.agreement.recovery_evidence.lineage
        for view, step in sorted(peer.gradients):
            state, gradient = peer.states[layer], peer.gradients[view, step].get(layer)
            after = lineage.at(step + 1)
            if gradient is None or after is None or state.version != step:
                continue
            if peer.world.invariants.lineage_after(view, step) == after:
                peer.apply(layer, gradient)


def _digest(*value: object) -> bytes:
    return bytes.fromhex(digest_bytes(repr(value).encode()))[:DIGEST_BYTES]
