"""The steps of a simulated peer: compute, reduce, prepare, commit; and states for its place."""

from __future__ import annotations

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES, SUM_DIGEST_BYTES
from p2p_dtfm.core.commit.ledger import STEPS_AHEAD_LIMIT, Ledger
from p2p_dtfm.core.messages.prepared import Prepared, Statement, open_prepared, sign_prepared
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
from p2p_dtfm.sim.faults.simulated_process import CHECKPOINT_STEPS, TERMS, Key, sign_for, verify


class SimulatedTraining(SimulatedMicrobatches, SimulatedCuts):
    """What the trainer does in the daemon."""

    def _start_step(self) -> None:
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        layers = view.layers_of(self.name)
        ready = all(n in self.states and self.states[n].version == key[1] for n in layers)
        if layers and ready and self.computing != key and key not in self.said:
            self.computing = key
            self._take_cut(view, key[1])
            self._begin_work(view, plan, key)
        self._check_commit()

    def _all_computed(self, key: Key) -> None:
        view, plan = self._training()
        if view is None or plan is None or self.computing != key:
            return
        assert key == (view.id, self.agreement.step)
        microbatches = tuple(self.work.buffers)
        layers = {
            n: Gradient(microbatches, self.states[n].value) for n in view.layers_of(self.name)
        }
        mine = Partial(self.agreement.me, *key, layers)
        self.partials.setdefault(self._tensor_key(*key), {})[self.name] = mine
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
        parts = self.partials.setdefault(self._tensor_key(partial.view, partial.step), {})
        parts[partial.sender.peer_id] = partial
        self._try_reduce()

    def _try_reduce(self) -> None:
        view, plan = self._training()
        if view is None or plan is None:
            return
        key = (view.id, self.agreement.step)
        parts = self.partials.get(self._tensor_key(*key), {})
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
        if view is None or plan is None or view.cut_pace is not None:
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
        signed = sign_prepared(prepared, sign_for(self.name))
        self.last_said.append(signed)
        self._keep_prepared(Statement(prepared, signed))
        self._broadcast(signed)
        self._check_commit()

    def _make_prepared(
        self, view: View, plan: Plan, step: int, done: dict[int, Gradient]
    ) -> Prepared:
        has_head = plan.layers_of(self.name).stop == self.world.workload.layer_count
        count = len(self.work.forwarded) if has_head else 0
        norms = {
            number: float(sum(done[layer].base % 1009 for layer in segment.layers))
            for number, segment in enumerate(plan.segments())
            if self.name in segment.holders
        }
        sums = {
            number: tuple(
                _digest(norms[number], holder)[:SUM_DIGEST_BYTES] for holder in segment.holders
            )
            for number, segment in enumerate(plan.segments())
            if self.name in segment.holders and len(segment.holders) > 1
        }
        held = self.states if TERMS.tells_states(step) else {}
        states = {n: _digest(held[n].value) for n in view.layers_of(self.name) if n in held}
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
            kept=self.clock.kept if self.clock is not None else -1,
            base=self.agreement.recovery_evidence.lineage.digest,
            sums=sums,
            states=states,
        )

    def _receive_prepared(self, signed: Signed) -> None:
        prepared = open_prepared(signed, verify)
        view = self.agreement.view
        if view is not None and prepared.view.number < view.id.number:
            return
        if self._keep_prepared(Statement(prepared, signed)):
            self._check_commit()

    def _keep_prepared(self, statement: Statement) -> bool:
        """True if it is news."""
        prepared = statement.prepared
        held = self.prepared.setdefault((prepared.view, prepared.step), {})
        if prepared.peer_id in held:
            return False
        held[prepared.peer_id] = statement
        return True

    def _check_commit(self) -> None:
        while True:
            view, plan = self._training()
            ledger = self.agreement.ledger
            if view is None or plan is None or ledger is None:
                return
            self._skip(view, ledger)
            for statement in self.prepared.get((view.id, ledger.step), {}).values():
                try:
                    ledger.record(statement)
                except PeerFault as fault:
                    self._contradicted(fault.cause, {statement.prepared.peer_id})
                    return
            if not self._commit(view, ledger):
                conflict = ledger.conflict
                if conflict.reason:
                    pairs = {peer for pair in conflict.doubts for peer in pair}
                    self._contradicted(conflict.reason, pairs | set(conflict.liars))
                return

    def _contradicted(self, reason: str, accused: set[str]) -> None:
        """Not all that is said of the step can be true, so somebody lies."""
        liars = self.world.liars
        if not liars or (accused and not accused & liars):
            raise Violation(f"{self.name} finds fault with {sorted(accused)}: {reason}")
        self.do(self.agreement.repeat_step(reason, self.now_ns))

    def _skip(self, view: View, ledger: Ledger) -> None:
        """A peer without a stage may miss so many messages that it cannot follow each step."""
        if view.layers_of(self.name):
            return
        for of, step in sorted(self.prepared):
            for statement in self.prepared[of, step].values():
                if of == view.id and step >= ledger.step + STEPS_AHEAD_LIMIT:
                    found = ledger.says_ahead(statement)
                    if found is not None:
                        self.agreement.skip_to(*found)

    def _commit(self, view: View, ledger: Ledger) -> bool:
        outcome = ledger.next_outcome()
        if outcome is None:
            return False
        now_ns, step = self.now_ns, outcome.step
        gradients = self.gradients.get((view.id, step), {})
        stage = set(view.layers_of(self.name))
        for layer, state in list(self.states.items()):
            if layer in stage or (layer in gradients and state.version == step):
                self._apply(layer, gradients.get(layer))
        self._cut_committed(view, step, outcome.kept)
        actions = self.agreement.committed(outcome, now_ns)
        lineage = self.agreement.recovery_evidence.lineage.at(step + 1)
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

    def _forget(self, view: View, step: int) -> None:
        """A step has committed: what was kept for the case that it would not is not needed."""
        wanted = self._wanted(view)
        if self.agreement.next_view is not None:
            wanted |= self._wanted(self.agreement.next_view)
        if self.agreement.view is view:
            for layer in set(self.states) - wanted:
                self._outlives(layer, self.states.pop(layer))
        retained = (view.id, step)
        self.gradients = {
            key: held for key, held in self.gradients.items() if key == retained or key[1] > step
        }
        for store in (self.partials, self.prepared, self.arrived):
            for key in [key for key in store if key[1] < step]:
                del store[key]

    def _check_synced(self) -> None:
        view = self.agreement.next_view
        if view is not None and self._wanted(view) <= set(self.states):
            self.do(self.agreement.synced(view.id))

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
        if view.snapshot.planned and present is not None:
            donors = set(present.holders(layer))
        if view is self.agreement.view and isinstance(view.plan, Plan):
            donors |= set(view.plan.holders(layer))
        if not view.takes_effect_at_once and self.world.chance.random() < 0.2:
            donors = {m.peer_id for m in view.snapshot.contributors}  # a guardian may have it
        donors.discard(self.name)
        if donors:
            donor = self.world.chance.choice(sorted(donors))
            asked.setdefault((donor, view.id), set()).add(layer)

    def _give_states(self, request: StateRequest) -> None:
        agreement = self.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if request.view not in views or agreement.frozen:
            return
        lineage = agreement.recovery_evidence.lineage
        found = {n: self.states[n] for n in request.layers if n in self.states}
        digests = {n: lineage.at(state.version) for n, state in found.items()}
        known = {n: digest for n, digest in digests.items() if digest is not None}
        if known:
            states = {n: found[n] for n in known}
            reply = StateReply(agreement.me, request.view, states, known)
            delay_ns = self.world.chance.randrange(self.world.transfer_ns)
            receiver = request.sender.peer_id
            self.given[receiver] += len(states)
            self.later(delay_ns, lambda: self._send(receiver, reply))

    def _take_states(self, reply: StateReply) -> None:
        agreement = self.agreement
        views = {view.id for view in (agreement.view, agreement.next_view) if view is not None}
        if reply.view not in views or agreement.frozen:
            return
        for layer, state in reply.states.items():
            mine = agreement.recovery_evidence.lineage.at(state.version)
            held = self.states.get(layer)
            on_lineage = agreement.view is None or mine == reply.lineages[layer]
            if on_lineage and (held is None or held.version < state.version):
                self.states[layer] = state
                self._follow_on(layer)
        self._sync_held()
        self._check_synced()
        self._start_step()

    def _follow_on(self, layer: int) -> None:
        """A state that comes after its step has committed; the step's gradient may be here."""
        lineage = self.agreement.recovery_evidence.lineage
        for view, step in sorted(self.gradients):
            state, gradient = self.states[layer], self.gradients[view, step].get(layer)
            after = lineage.at(step + 1)
            if gradient is None or after is None or state.version != step:
                continue
            if self.world.invariants.lineage_after(view, step) == after:
                self._apply(layer, gradient)


def _digest(*value: object) -> bytes:
    return bytes.fromhex(digest_bytes(repr(value).encode()))[:DIGEST_BYTES]
