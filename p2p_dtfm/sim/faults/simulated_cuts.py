"""Cuts of a simulated peer: what `daemon.trainer.cut_transfers` does, with states that are
hashes."""

from __future__ import annotations

from p2p_dtfm.core.cost_model.cuts import HELD_CUTS, CutClock, cuts_that_stay
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import CutCopy, CutReceipt, State
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_process import SimulatedProcess


class SimulatedCuts(SimulatedProcess):
    """Copies for guardians that lag."""

    def start(self) -> None:
        """Main memory is lost with the process."""
        self.cuts: dict[tuple[int, str], dict[int, State]] = {}
        self.clock: CutClock | None = None
        self._cut_view: View | None = None
        self.safe_step = 0
        super().start()

    def _enter_cuts(self, view: View, step: int) -> None:
        pace, guarded, before = view.cut_pace, view.guardians_of(self.name), self._cut_view
        self._cut_view = view
        goes_on = before is not None and view.goes_on_with_cuts_of(before)
        if goes_on and self.clock is not None and pace is not None:
            self.clock.every_steps = pace.every_steps
            return
        self.clock = None if pace is None else CutClock(step, pace.every_steps, guarded)
        self._first_step = step
        self.safe_step = min(self.safe_step, step)
        self._prune_cuts()

    def _prune_cuts(self) -> None:
        lineage = self.agreement.recovery_evidence.lineage
        held = {
            (step, of) for step, of in self.cuts if lineage.at(step) in (of, None)
            and step <= lineage.length
        }  # fmt: skip
        stay = cuts_that_stay((step for step, _ in held), self.safe_step)
        self.cuts = {key: cut for key, cut in self.cuts.items() if key in held and key[0] in stay}
        self._say_cuts()

    def _say_cuts(self) -> None:
        if len(self.cuts) > HELD_CUTS + 1:
            raise Violation(f"{self.name} keeps copies of {len(self.cuts)} steps")
        self.agreement.has_cuts(
            tuple(SavedState(*key, tuple(sorted(cut))) for key, cut in sorted(self.cuts.items()))
        )

    def _take_cut(self, view: View, step: int) -> None:
        """A step begins, with the states here."""
        clock = self.clock
        if clock is None or not clock.is_due(step):
            return
        lineage = self.agreement.recovery_evidence.lineage.digest
        layers = view.layers_of(self.name)
        self.cuts.setdefault((step, lineage), {}).update({n: self.states[n] for n in layers})
        self._prune_cuts()
        clock.taken()
        self._send_cut(view)

    def _send_cut(self, view: View) -> None:
        """To guardians that have not said that they have it; it takes a while."""
        clock = self.clock
        if clock is None or not clock.missing:
            return
        lineage = self.agreement.recovery_evidence.lineage.at(clock.newest)
        mine = self.cuts.get((clock.newest, lineage or ""), {})
        for guardian in sorted({view.guards[layer] for layer in clock.missing}):
            states = {n: mine[n] for n in clock.missing & set(mine) if view.guards[n] == guardian}
            if states:
                copy = CutCopy(self.agreement.me, view.id, clock.newest, lineage or "", states)
                delay_ns = self.world.chance.randrange(2 * self.world.transfer_ns)
                self.later(delay_ns, lambda to=guardian, it=copy: self._send(to, it))  # type: ignore[misc]

    def _receive_cut(self, message: CutCopy) -> None:
        view, clock, step = self.agreement.view, self.clock, message.step
        lineage = self.agreement.recovery_evidence.lineage.at(step)
        lineage = message.lineage if lineage is None else lineage
        if view is None or clock is None or self.agreement.frozen or message.view != view.id:
            return
        if self.agreement.step < step or step < max(clock.safe, 0):
            return
        if any(view.guards.get(layer) != self.name for layer in message.states):
            raise Violation(f"{self.name} gets a copy of layers that it does not guard")
        self.cuts.setdefault((step, lineage), {}).update(message.states)
        self._prune_cuts()
        layers = tuple(sorted(message.states))
        receipt = CutReceipt(self.agreement.me, view.id, step, layers)
        self._send(message.sender.peer_id, receipt)

    def _cut_committed(self, view: View, step: int, kept: int) -> None:
        """Before the takeover that may follow."""
        clock = self.clock
        if clock is None:
            self.cuts, self.safe_step = {}, 0
            self._say_cuts()
        elif clock.committed(step, kept):
            self.world.invariants.is_whole(clock.safe)
            self.safe_step = clock.safe
            self._prune_cuts()

    def _of_cut(self, layer: int, step: int, lineage: str) -> State | None:
        return self.cuts.get((step, lineage), {}).get(layer)

    def _outlives(self, layer: int, state: State) -> None:
        """A state that is not wanted here any more may be part of the view's first cut."""
        clock = self.clock
        if clock is not None and clock.safe < 0 and state.version == self._first_step:
            lineage = self.agreement.recovery_evidence.lineage.at(state.version)
            if lineage is not None:
                self.cuts.setdefault((state.version, lineage), {})[layer] = state
                self._prune_cuts()
