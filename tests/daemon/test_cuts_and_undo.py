"""Copies of a cut where the run goes back to that cut, to undo what a barred member has done."""

import asyncio
from pathlib import Path

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import PendingStep, SavedState
from p2p_dtfm.core.protocol.lineage import Epochs, epochs_of
from p2p_dtfm.core.recovery.going_back import restart_of
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.restart_point import Undo
from p2p_dtfm.daemon.trainer.trainer import Trainer
from tests.core.audit.test_bars import part
from tests.daemon.test_cuts import LAYERS, STEP, VIEW, lineage_of, states_at
from tests.daemon.trainer_parts import QuietOutlet, trainer_tools

NOW = STEP + 4
TERMS = StepTerms(5, 4, NOW, NOW, 100, 20.0, audits=True, follow_steps=5, undo_steps=4)


class Place(QuietOutlet):
    """A member's own lineage, and what it tells of its cuts."""

    def __init__(self) -> None:
        self.evidence = RecoveryEvidence()
        self.damaged: list[str] = []
        for step in range(NOW):
            self.evidence.lineage.committed(step, lineage_of(step + 1))

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        self.evidence.cuts = cuts

    def lineage_at(self, step: int) -> str:
        return self.evidence.lineage.at(step) or ""

    def contradiction(self, reason: str) -> None:
        self.damaged.append(reason)


def test_a_cut_to_which_an_undo_leads_is_still_here(tmp_path: Path) -> None:
    """The state to which the run goes back has another name from then on. Copies under the name of
    before were dropped as those of another lineage, and all went further back."""

    async def scenario() -> None:
        tools, outlet = trainer_tools(tmp_path), Place()
        trainer = Trainer(tools, outlet)
        state, cuts = trainer._state, trainer.cuts
        state.view, state.step, evidence = VIEW, NOW, outlet.evidence
        kept = states_at(STEP)
        digests = {layer: it.digest() for layer, it in kept.items()}
        cuts._store.put(lineage_of(STEP), [it.snapshot() for it in kept.values()])
        pending = PendingStep(NOW, evidence.lineage.digest, (), ())
        said = part("a", step=NOW, pending=pending, cuts=evidence.cuts)
        undo = Undo(("d",), STEP, 4)
        recovery = restart_of([said], LAYERS, TERMS, Epochs(), undo)
        assert recovery.target is not None and recovery.target.step == STEP
        restart = evidence.restart(said.member, recovery)
        assert restart.load == tuple(range(LAYERS)) and not recovery.lost_layers
        trainer.take_over(VIEW, STEP, None, restart)
        await trainer._restarting.do(*state.restarts[0])
        assert not outlet.damaged
        assert {layer: it.digest() for layer, it in state.states.items()} == digests
        (told,) = evidence.cuts
        assert (told.version, told.lineage) == (STEP, evidence.lineage.digest)
        assert epochs_of(told.lineage).number == 1
        tools.compute.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
