"""A run whose numbers are not finite says so and stands still. No daemon ends, and no such number
is sent or committed."""

import asyncio
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import is_finite
from tests.daemon.trainer_parts import SPEC, QuietOutlet, trainer_tools, view_of

DEADLINE_S = 30.0


class Outlet(QuietOutlet):
    """The daemon's side. Whenever the step cannot commit there is another view."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.told: list[str] = []
        self.prepared: list[ViewId] = []
        self._number = 0

    def begin_next_view(self) -> None:
        self._number += 1
        view = view_of(self._number, 1)
        assert self.trainer is not None and isinstance(view.plan, Plan)
        self.trainer.view_agreed(view, False)
        self.trainer.take_over(view, 0, Ledger(view.id, view.plan, 0), None)

    def contradiction(self, reason: str) -> None:
        assert self.trainer is not None
        self.told.append(reason)
        self.trainer.stop_step()
        self.begin_next_view()

    def say_prepared(self, signed: Signed, view: View) -> None:
        self.prepared.append(view.id)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_run_that_diverges_says_so(tmp_path: Path, value: float) -> None:
    torch.set_num_threads(1)
    tools = trainer_tools(tmp_path)

    async def run() -> None:
        outlet = Outlet()
        trainer = outlet.trainer = Trainer(tools, outlet)
        for layer in range(6):
            state = trainer._state.states[layer] = LayerState.genesis(SPEC, layer)
            state.parameters.fill_(value)
        outlet.begin_next_view()
        running = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while "diverged" not in tools.status.reason:
                    assert not running.done() and not trainer.waits.stands_still, running
                    await asyncio.sleep(0.01)
                assert trainer.waits.stands_still, "who leaves would wait for a commit"
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()
            tools.compute.close()
        assert len(outlet.told) == 1, "once somebody else may be the reason"
        assert not outlet.prepared
        assert tools.status.state is State.WAITING and "step 0" in tools.status.reason

    asyncio.run(run())


def test_what_is_finite() -> None:
    large = torch.full((8,), 3e38)
    assert is_finite(large), "though its sum is not"
    assert is_finite(torch.zeros(0))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([1.0, wrong, -wrong]))
