"""Cuts of a simulated peer: what `daemon.trainer.cut_transfers` does, with states that are
hashes."""

from __future__ import annotations

from p2p_dtfm.core.cost_model.cuts import HELD_CUTS, CutClock, cuts_that_stay
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import CutCopy, HashState, LayersReceipt
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_process import SimulatedProcess


class SimulatedCuts:
    """Copies for guardians that lag."""

    def __init__(self, peer: SimulatedProcess) -> None:
        """The copies are in main memory, which is lost with the process."""
        self.peer = peer
        self.copies: dict[tuple[int, str], dict[int, HashState]] = {}
        self.clock: CutClock | None = None
        self._cut_view: View | None = None
        self.safe_step = 0

    def enter(self, view: View, step: int) -> None:
        pace, guarded, before = view.cut_pace, view.guardians_of(self.peer.name), self._cut_view
        self._cut_view = view
        goes_on = before is not None and view.goes_on_with_cuts_of(before)
        if goes_on and self.clock is not None and pace is not None:
            self.clock.every_steps = pace.every_steps
            return
        has_stage = bool(view.layers_of(self.peer.name))
        self.clock = None if pace is None else CutClock(step, pace.every_steps, guarded, has_stage)
        self._first_step = step
        self.safe_step = min(self.safe_step, step)
        self._prune()

    def _prune(self) -> None:
        lineage = self.peer.agreement.recovery_evidence.lineage
        held = {
            (step, of) for step, of in self.copies if lineage.at(step) in (of, None)
            and step <= lineage.length
        }  # fmt: skip
        stay = cuts_that_stay((step for step, _ in held), self.safe_step)
        self.copies = {
            key: cut for key, cut in self.copies.items() if key in held and key[0] in stay
        }
        self.say()

    def say(self) -> None:
        peer = self.peer
        if len(self.copies) > HELD_CUTS + 1:
            raise Violation(f"{peer.name} keeps copies of {len(self.copies)} steps")
        peer.agreement.set_cuts(
            tuple(SavedState(*key, tuple(sorted(cut))) for key, cut in sorted(self.copies.items()))
        )

    def take(self, view: View, step: int) -> None:
        """Copy the states that are here when a step begins."""
        peer = self.peer
        clock = self.clock
        if clock is None or not clock.is_due(step):
            return
        lineage = peer.agreement.recovery_evidence.lineage.digest
        layers = view.layers_of(peer.name)
        self.copies.setdefault((step, lineage), {}).update({n: peer.states[n] for n in layers})
        self._prune()
        clock.taken()
        self.send(view)

    def send(self, view: View) -> None:
        """Send the copies to guardians that have not said that they have them. It takes a while."""
        peer = self.peer
        clock = self.clock
        if clock is None or not clock.missing:
            return
        lineage = peer.agreement.recovery_evidence.lineage.at(clock.newest)
        mine = self.copies.get((clock.newest, lineage or ""), {})
        for guardian in sorted({view.guards[layer] for layer in clock.missing}):
            states = {n: mine[n] for n in clock.missing & set(mine) if view.guards[n] == guardian}
            if states:
                copy = CutCopy(peer.agreement.me, view.id, clock.newest, lineage or "", states)
                delay_ns = peer.world.chance.randrange(2 * peer.world.transfer_ns)
                peer.later(delay_ns, lambda to=guardian, it=copy: peer.send(to, it))  # type: ignore[misc]

    def receive(self, message: CutCopy) -> None:
        peer = self.peer
        view, clock, step = peer.agreement.view, self.clock, message.step
        lineage = peer.agreement.recovery_evidence.lineage.at(step)
        lineage = message.lineage if lineage is None else lineage
        if view is None or clock is None or peer.agreement.frozen or message.view != view.id:
            return
        if peer.agreement.step < step or step < max(clock.safe, 0):
            return
        if any(view.guards.get(layer) != peer.name for layer in message.states):
            raise Violation(f"{peer.name} gets a copy of layers that it does not guard")
        self.copies.setdefault((step, lineage), {}).update(message.states)
        self._prune()
        layers = tuple(sorted(message.states))
        receipt = LayersReceipt(peer.agreement.me, view.id, step, layers)
        peer.send(message.sender.peer_id, receipt)

    def receipt(self, sender: str, message: LayersReceipt) -> None:
        view = self.peer.view
        if self.clock is not None and view is not None and message.view == view.id:
            self.clock.receipt(sender, message.step, message.layers)

    def committed(self, view: View, step: int, kept: int) -> None:
        """Note a commit, before the takeover that may follow."""
        clock = self.clock
        if clock is None:
            self.copies, self.safe_step = {}, 0
            self.say()
        elif clock.committed(step, kept):
            self.peer.world.invariants.note_whole(clock.safe)
            self.safe_step = clock.safe
            self._prune()

    def find(self, layer: int, step: int, lineage: str) -> HashState | None:
        return self.copies.get((step, lineage), {}).get(layer)

    def keep(self, layer: int, state: HashState) -> None:
        """Keep a state that is no longer wanted here, as part of the view's first cut."""
        clock = self.clock
        if clock is not None and clock.safe < 0 and state.version == self._first_step:
            lineage = self.peer.agreement.recovery_evidence.lineage.at(state.version)
            if lineage is not None:
                self.copies.setdefault((state.version, lineage), {})[layer] = state
                self._prune()
