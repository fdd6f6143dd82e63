"""A run goes back to a cut, and names it anew: the copies here are still those of that cut."""

from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.lineage import Epochs, marked
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from tests.daemon.test_cuts import (
    GUARDIAN,
    HOLDER,
    STEP,
    VIEW,
    Outlet,
    lagging_view,
    lineage_of,
    states_at,
)
from tests.daemon.trainer_parts import trainer_tools


class OutletOfAnEpoch(Outlet):
    """Names the lineage as the members do."""

    epochs = Epochs()

    def lineage_at(self, step: int) -> str:
        return marked(lineage_of(step), self.epochs)


def test_a_cut_to_which_a_run_goes_back_is_still_here(tmp_path: Path) -> None:
    """The copies were dropped as those of another lineage, so the state was lost to all."""
    outlet, state = OutletOfAnEpoch(), TrainerState()
    state.view, state.step = VIEW, STEP
    any_outlet: Any = outlet
    cuts = Cuts(trainer_tools(tmp_path, HOLDER), any_outlet, state)
    cuts.take_over(VIEW, STEP)
    cuts.outlives(states_at(STEP)[0])
    assert outlet.cuts and cuts.find(0, STEP) is not None
    outlet.epochs = Epochs().next_one(STEP)
    cuts.take_over(lagging_view(GUARDIAN, HOLDER), STEP)
    assert cuts.find(0, STEP) is not None and outlet.cuts
    state.step = STEP - 1
    cuts.take_over(VIEW, STEP - 1)
    assert not outlet.cuts, "what was taken back goes"
