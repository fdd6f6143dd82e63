"""A run whose numbers are not finite says so and stands still. No daemon ends, and no such number
is sent or committed."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.stage_progress import StageProgress, from_runs
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import Kept, PartialReplay, PipelineReplay
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import NotFinite, is_finite
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.daemon.trainer_parts import SPEC, QuietOutlet, trainer_tools, view_of

DEADLINE_S = 30.0


class Outlet(QuietOutlet):
    """The daemon's side. Whenever the step cannot commit there is another view."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.told: list[str] = []
        self.prepared: list[ViewId] = []
        self._number = 0
        self._progress: StageProgress | None = None

    def begin_next_view(self) -> None:
        self._number += 1
        view = view_of(self._number, 1)
        assert self.trainer is not None and isinstance(view.plan, Plan)
        self.trainer.view_agreed(view, False)
        ledger, replay = Ledger(view.id, view.plan, 0), self._replay()
        self.trainer.take_over(view, 0, ledger, None, replay)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        self._progress = progress

    def _replay(self) -> PartialReplay | None:
        """The step goes on with what the trainer has told."""
        if self._progress is None:
            return None
        total, backwards = SPEC.microbatches_per_step, self._progress.backwards
        kept = Kept(len(from_runs(self._progress.forwarded, total)), backwards)
        whole = PipelineReplay(tuple(range(total)), (kept,))
        return PartialReplay(0, (whole,), kept.forwards, 0)

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


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_step_that_is_stopped_as_it_diverges_is_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """In a run that diverges others may stop the step just as this peer comes to a number that is
    not finite. Nobody hears of it, and what it had told of its work counts in the next view."""
    torch.set_num_threads(1)
    tools, outlet, is_stopped = trainer_tools(tmp_path), Outlet(), threading.Event()

    async def run() -> None:
        loop, trainer = asyncio.get_running_loop(), Trainer(tools, outlet)
        outlet.trainer = trainer

        def stop() -> None:
            trainer.stop_step()
            outlet.begin_next_view()
            is_stopped.set()

        def stop_from_thread() -> None:
            loop.call_soon_threadsafe(stop)
            assert is_stopped.wait(DEADLINE_S)

        diverge_once(monkeypatch, part, stop_from_thread)
        for layer in range(6):
            trainer._state.states[layer] = LayerState.genesis(SPEC, layer)
        outlet.begin_next_view()
        running = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not outlet.prepared:
                    assert not running.done(), running
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()
            tools.compute.close()
        assert is_stopped.is_set() and len(outlet.told) == 1

    asyncio.run(run())


def diverge_once(monkeypatch: pytest.MonkeyPatch, part: str, meanwhile: Callable[[], None]) -> None:
    """The second microbatch comes to what is not finite, the first time: its loss, or the gradient
    that it sends."""
    forward, backward_done = StageRunner.forward, Microbatches._backward_done
    diverged = list[int]()

    def diverges(number: int) -> bool:
        if number != 1 or diverged:
            return False
        diverged.append(number)
        meanwhile()
        return True

    def spoilt_forward(it: StageRunner, number: int, *entry: Any) -> Any:
        result = forward(it, number, *entry)
        return float("nan") if diverges(number) else result

    def spoilt_backward_done(it: Microbatches, number: int, gradient: Any) -> Any:
        if diverges(number):
            raise NotFinite("played")
        return backward_done(it, number, gradient)

    if part == "forward":
        monkeypatch.setattr(StageRunner, "forward", spoilt_forward)
    else:
        monkeypatch.setattr(Microbatches, "_backward_done", spoilt_backward_done)


def test_what_is_finite() -> None:
    large = torch.full((8,), 3e38)
    assert is_finite(large), "though its sum is not"
    assert is_finite(torch.zeros(0))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([1.0, wrong, -wrong]))
