"""What a simulated peer says of its step, and whom it suspects: `core.liveness.stalls` as in
life."""

from __future__ import annotations

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.liveness.pace import Patience
from p2p_dtfm.core.liveness.stalls import Stalls
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.simulated_process import Key
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining

PATIENCE = Patience(stuck_ns=10 * SECOND_NS, step_ns=60 * SECOND_NS, fetch_ns=60 * SECOND_NS)
"""Of peers whose steps take seconds."""


class SimulatedWaits(SimulatedTraining):
    """Lacks follow from what has come; whatever is due is sent again until it has."""

    def start(self) -> None:
        self.stalls = Stalls(self.name, self.world.liveness_timing.sleep_ns)
        self.possible: tuple[View, PossibleWaits] | None = None
        super().start()

    def judge_stalls(self, watched: set[str]) -> None:
        self.stalls.watch(watched)
        mine = self._work()
        if mine is None or self.agreement.view is None:
            return
        view = self.agreement.view
        if self.possible is None or self.possible[0] is not view:
            self.possible = view, PossibleWaits(view)
        found = self.stalls.tick(
            mine, self.possible[1], self._has_given, self._patience, self.now_ns
        )
        for suspicion in found:
            self.do(self.agreement.holds_up(suspicion.peer_id, suspicion.reason, self.now_ns))

    def take_sides(self) -> None:
        for suspicion in self.stalls.join(self.agreement.doubted, self._patience):
            self.do(self.agreement.holds_up(suspicion.peer_id, suspicion.reason, self.now_ns))

    def _patience(self, peer_id: str, step: int) -> Patience:
        return PATIENCE

    def _work(self) -> Work | None:
        view, plan = self._training()
        if view is None or plan is None:
            return None
        key = (view.id, self.agreement.step)
        layers = view.layers_of(self.name)
        fetches = not all(self.is_up_to_date(layer) for layer in layers)
        lacks = () if fetches or self.works else tuple(self._lacks(view, plan, key))
        return Work(*key, self.works, lacks, (), fetches)

    def _lacks(self, view: View, plan: Plan, key: Key) -> list[Lack]:
        ledger = self.agreement.ledger
        if self.part is not None and self.part[0] == key and not self.is_computed:
            return self._boundaries(plan, key)
        parts = self.partials.get(self._tensor_key(*key), {})
        if self.name in parts and key not in self.said:
            done = self.gradients.get(key, {})
            missing = {
                holder
                for segment in plan.segments()
                if self.name in segment.holders and not set(segment.layers) <= set(done)
                for holder in segment.holders
                if holder not in parts
            }
            if missing:
                return [Lack(holder, Kind.PART) for holder in sorted(missing)]
            owed = self.receipts.owed(key[1]) if self.receipts is not None else ()
            return [Lack(guardian, Kind.RECEIPT) for guardian in owed]
        if ledger is None or (view.layers_of(self.name) and key not in self.said):
            return []
        if ledger.missing:
            return [Lack(peer, Kind.PREPARED) for peer in ledger.missing if peer != self.name]
        others = (peer for peer in self.agreement.not_active if peer != self.name)
        return [Lack(peer, Kind.ACTIVE) for peer in others]

    def _boundaries(self, plan: Plan, key: Key) -> list[Lack]:
        assert self.part is not None
        work, mine = self.work, self.part[1]
        backward = work.backwards < len(work.forwarded)
        if backward:
            number = work.forwarded[work.backwards]
        elif len(work.forwarded) < len(mine.microbatches):
            number = mine.microbatches[len(work.forwarded)]
        else:
            return []
        pipeline, position = plan.places_of(self.name)[mine.place(number)]
        stages = plan.pipelines[pipeline].stages
        beside = position + 1 if backward else position - 1
        if not 0 <= beside < len(stages):
            return []
        kind = Kind.GRADIENT if backward else Kind.ACTIVATION
        return [Lack(stages[beside].peer_id, kind, 0, number)]

    def _has_given(self, peer_id: str, lack: Lack) -> bool:
        view, step = self.agreement.view, self.agreement.step
        key = (view.id if view else None, step)
        if lack.kind is Kind.ACTIVE:
            return True
        if lack.kind is Kind.PREPARED:
            return key in self.said
        if lack.kind is Kind.ACTIVATION:
            return lack.index in self.work.forwarded
        if lack.kind is Kind.GRADIENT:
            return lack.index in self.work.forwarded[: self.work.backwards]
        parts = self.partials.get(self._tensor_key(view.id, step), {}) if view else {}
        return lack.kind is Kind.PART and self.name in parts
