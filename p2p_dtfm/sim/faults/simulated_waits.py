"""What a simulated peer says of its step, and which peers it suspects, by the real
`core.liveness.stalls`."""

from __future__ import annotations

from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.liveness.pace import Patience
from p2p_dtfm.core.liveness.stalls import Stalls
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.simulated_microbatches import SimulatedMicrobatches
from p2p_dtfm.sim.faults.simulated_process import Key, SimulatedProcess

PATIENCE = Patience(stuck_ns=10 * SECOND_NS, step_ns=60 * SECOND_NS, fetch_ns=60 * SECOND_NS)
"""For peers whose steps take seconds."""


class SimulatedWaits:
    """Finds what a peer lacks from what has come. Whatever is due is sent again until it has
    come."""

    def __init__(self, peer: SimulatedProcess, microbatches: SimulatedMicrobatches) -> None:
        self.peer = peer
        self.microbatches = microbatches
        self.stalls = Stalls(self.peer.name, self.peer.world.liveness_timing.sleep_ns)
        self.possible: tuple[View, PossibleWaits] | None = None

    def judge(self, watched: set[str]) -> None:
        peer = self.peer
        self.stalls.watch(watched)
        mine = self.work()
        if mine is None or peer.agreement.view is None:
            return
        view = peer.agreement.view
        if self.possible is None or self.possible[0] is not view:
            self.possible = view, PossibleWaits(view)
        found = self.stalls.tick(
            mine, self.possible[1], self._has_given, self._patience, peer.now_ns
        )
        self._tell(found)

    def take_sides(self) -> None:
        view, doubted = self.peer.agreement.view, self.peer.agreement.doubted
        named = view.id if view is not None else None
        self._tell(self.stalls.join(doubted, self._patience, named))

    def _tell(self, found: list[Suspect]) -> None:
        reasons = {suspicion.peer_id: suspicion.reason for suspicion in found}
        self.peer.do(self.peer.agreement.hold_up(reasons, self.peer.now_ns))

    def _patience(self, peer_id: str, step: int) -> Patience:
        return PATIENCE

    def work(self) -> Work | None:
        peer = self.peer
        view, plan = peer.in_training()
        if view is None or plan is None:
            return None
        key = (view.id, peer.agreement.step)
        layers = view.layers_of(peer.name)
        fetches = not all(peer.is_up_to_date(layer) for layer in layers)
        lacks = () if fetches or self.microbatches.works else tuple(self._lacks(view, plan, key))
        return Work(*key, self.microbatches.works, lacks, (), fetches)

    def _lacks(self, view: View, plan: Plan, key: Key) -> list[Lack]:
        peer, part = self.peer, self.microbatches.part
        if part is not None and part[0] == key and not self.microbatches.is_computed:
            return self._boundaries(plan, key)
        if key not in peer.said:
            if peer.name in peer.partials.get(peer.tensor_key(*key), {}):
                return self._sums(plan, key)
            if view.layers_of(peer.name):
                return []
        return self._words()

    def _sums(self, plan: Plan, key: Key) -> list[Lack]:
        """What a peer lacks whose own part is there: the parts, or the receipts, of others."""
        peer = self.peer
        parts = peer.partials.get(peer.tensor_key(*key), {})
        done = peer.gradients.get(key, {})
        missing = {
            holder
            for segment in plan.segments()
            if peer.name in segment.holders and not set(segment.layers) <= set(done)
            for holder in segment.holders
            if holder not in parts
        }
        if missing:
            return [Lack(holder, Kind.PART) for holder in sorted(missing)]
        owed = peer.receipts.owed(key[1]) if peer.receipts is not None else ()
        return [Lack(guardian, Kind.RECEIPT) for guardian in owed]

    def _words(self) -> list[Lack]:
        """What a peer lacks whose own work is done: who has not said Prepared, or that it has taken
        over."""
        me, ledger = self.peer.name, self.peer.agreement.ledger
        if ledger is None:
            return []
        if ledger.missing:
            return [Lack(name, Kind.PREPARED) for name in ledger.missing if name != me]
        return [Lack(name, Kind.ACTIVE) for name in self.peer.agreement.not_active if name != me]

    def _boundaries(self, plan: Plan, key: Key) -> list[Lack]:
        assert self.microbatches.part is not None
        work, mine = self.microbatches.work, self.microbatches.part[1]
        backward = work.backwards < len(work.forwarded)
        if backward:
            number = work.forwarded[work.backwards]
        elif len(work.forwarded) < len(mine.microbatches):
            number = mine.microbatches[len(work.forwarded)]
        else:
            return []
        pipeline, position = plan.places_of(self.peer.name)[mine.place(number)]
        stages = plan.pipelines[pipeline].stages
        beside = position + 1 if backward else position - 1
        if not 0 <= beside < len(stages):
            return []
        kind = Kind.GRADIENT if backward else Kind.ACTIVATION
        return [Lack(stages[beside].peer_id, kind, 0, number)]

    def _has_given(self, peer_id: str, lack: Lack) -> bool:
        peer = self.peer
        view, step = peer.agreement.view, peer.agreement.step
        key = (view.id if view else None, step)
        if lack.kind is Kind.ACTIVE:
            return True
        if lack.kind is Kind.PREPARED:
            return key in peer.said
        if lack.kind is Kind.ACTIVATION:
            return lack.index in self.microbatches.work.forwarded
        if lack.kind is Kind.GRADIENT:
            return (
                lack.index in self.microbatches.work.forwarded[: self.microbatches.work.backwards]
            )
        parts = peer.partials.get(peer.tensor_key(view.id, step), {}) if view else {}
        return lack.kind is Kind.PART and peer.name in parts
