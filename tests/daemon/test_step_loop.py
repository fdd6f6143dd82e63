"""A view that ends between two steps leaves nobody waiting for what it still owed."""

import asyncio
from pathlib import Path

import msgspec
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.prepared import Prepared, StepOutcome
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.trainer.trainer import Trainer
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC, QuietOutlet, settle, trainer_tools, view_of
from tests.e2e.test_parity import even_plan

DEADLINE_S = 20.0


class Outlet(QuietOutlet):
    """The daemon's side. While the first shards are fetched, one view ends and the next begins."""

    def __init__(self, first: View, following: View) -> None:
        self.trainer: Trainer | None = None
        self.prepared: asyncio.Queue[Prepared] = asyncio.Queue()
        self._views = [following, first]

    def begin_next_view(self) -> None:
        view = self._views.pop()
        assert self.trainer is not None and isinstance(view.plan, Plan)
        self.trainer.view_agreed(view, False)
        self.trainer.take_over(view, 0, Ledger(view.id, view.plan, 0), None)

    async def fetch_shards(self, digests: set[str]) -> None:
        assert self.trainer is not None
        if self._views:
            self.trainer.stop_step()
            self.begin_next_view()

    def say_prepared(self, signed: Signed, view: View) -> None:
        self.prepared.put_nowait(decode(signed.payload, Prepared))


def test_a_step_is_not_begun_in_a_view_that_is_over(tmp_path: Path) -> None:
    """No computation is under way that could be stopped, and the old view's computation would never
    end."""
    torch.set_num_threads(1)
    tools = trainer_tools(tmp_path)

    async def run() -> None:
        with_the_dead, alone = view_of(1, 2), view_of(2, 1)
        outlet = Outlet(with_the_dead, alone)
        trainer = outlet.trainer = Trainer(tools, outlet)
        outlet.begin_next_view()
        running = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                prepared = await outlet.prepared.get()
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()
            tools.compute.close()
        assert (prepared.view, prepared.step) == (alone.id, 0)

    asyncio.run(run())


def test_who_has_left_brings_nothing_for_a_view_that_is_agreed_on_meanwhile(
    tmp_path: Path,
) -> None:
    """The peer was in an attempt as it left. Nothing ended the fetches that it began then."""
    tools = trainer_tools(tmp_path)

    async def run() -> None:
        trainer = Trainer(tools, QuietOutlet())
        await trainer.close()
        before = asyncio.all_tasks()
        found = view_of(2, 2)
        snapshot = msgspec.structs.replace(found.snapshot, planned=True)
        trainer.view_agreed(View(snapshot, found.plan), False)
        tools.compute.close()
        assert asyncio.all_tasks() == before

    asyncio.run(run())


class Alone(QuietOutlet):
    """The outlet of the only stage-holder. The others have not said yet that they are active."""

    def __init__(self) -> None:
        self.prepared = asyncio.Event()
        self.committed_steps: asyncio.Queue[int] = asyncio.Queue()

    def say_prepared(self, signed: Signed, view: View) -> None:
        self.prepared.set()

    def committed(self, outcome: StepOutcome) -> None:
        self.committed_steps.put_nowait(outcome.step)


def test_a_step_that_waited_for_active_alone_commits_when_it_comes(tmp_path: Path) -> None:
    """No other member says Prepared, so nothing else would make the loop look again. A view in
    which one peer had all layers stood still until the others threw it out."""
    torch.set_num_threads(1)
    tools = trainer_tools(tmp_path)

    async def run() -> None:
        found, outlet = view_of(1, 1), Alone()
        assert isinstance(found.plan, Plan)
        view = View(msgspec.structs.replace(found.snapshot, planned=False), found.plan)
        ledger = Ledger(view.id, found.plan, 0)
        ledger.may_commit = False
        trainer = Trainer(tools, outlet)
        trainer.view_agreed(view, False)
        trainer.take_over(view, 0, ledger, None)
        running = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await outlet.prepared.wait()
                await settle()
                assert outlet.committed_steps.empty()
                ledger.may_commit = True
                trainer.wake()
                assert await outlet.committed_steps.get() == 0
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()
            tools.compute.close()

    asyncio.run(run())


def with_two_copies(number: int) -> View:
    """A view with two copies of each layer."""
    view = view_of(number, 2)
    return View(view.snapshot, even_plan([name_of(0), name_of(1)], (1, 1), SPEC))


def test_who_has_no_stage_any_more_forgets_what_it_owed(tmp_path: Path) -> None:
    """The peer had kept what it owed, and used it months later, when it got a stage again."""
    tools = trainer_tools(tmp_path)

    async def run() -> None:
        trainer = Trainer(tools, QuietOutlet())
        found = view_of(2, 2)
        plan = even_plan([name_of(1)], (1,), SPEC)
        assert tools.me not in plan.stage_holders()
        view = View(found.snapshot, plan)
        trainer.view_agreed(view, False)
        memory = trainer._state.memory
        memory.owed.propose(0, {1: torch.ones(1)})
        memory.commit(0)
        trainer.take_over(view, 1, Ledger(view.id, plan, 1), None)
        assert memory.owed.of(1) is not None
        running = asyncio.create_task(trainer.run())
        await settle()
        running.cancel()
        await asyncio.wait({running})
        await trainer.close()
        tools.compute.close()
        assert memory.owed.of(1) is None

    asyncio.run(run())


class NotAllIn(QuietOutlet):
    def __init__(self) -> None:
        self.all_in = False

    def are_all_in(self) -> bool:
        return self.all_in


def test_what_a_newcomer_has_got_is_no_copy_before_it_says_that_it_is_in_the_view(
    tmp_path: Path,
) -> None:
    """If the others died then, the newcomer could not show what its states are, and began anew with
    them (seed 500683)."""

    async def run() -> None:
        outlet = NotAllIn()
        trainer = Trainer(trainer_tools(tmp_path), outlet)
        trainer._state.step = 9
        trainer._state.view = with_two_copies(1)
        assert trainer.tell_safe_step() is None
        outlet.all_in = True
        assert trainer.tell_safe_step() == 9
        trainer._state.step, trainer._state.view = 12, with_two_copies(2)
        outlet.all_in = False
        assert trainer.tell_safe_step() == 9, "as before"

    asyncio.run(run())


def test_who_stood_still_gets_on_in_another_view(tmp_path: Path) -> None:
    """Told to leave, it would have left in the middle of a step that works there."""

    async def run() -> None:
        trainer = Trainer(trainer_tools(tmp_path), QuietOutlet())
        trainer._state.step, trainer._state.stuck_at = 9, 9
        assert trainer._state.stands_still
        trainer.take_over(with_two_copies(3), 9, None, None)
        assert not trainer._state.stands_still

    asyncio.run(run())


def test_nobody_is_waited_for_in_a_view_that_has_failed(tmp_path: Path) -> None:
    """`status` named the awaited peer, though that peer was gone. It did so until the next commit,
    and for good where no plan followed."""

    async def run() -> None:
        tools = trainer_tools(tmp_path)
        trainer, facts = Trainer(tools, QuietOutlet()), tools.status.facts
        facts["waits_for"] = [name_of(1)]
        trainer.stop_step()
        assert not facts["waits_for"]
        facts["waits_for"] = [name_of(1)]
        trainer.take_over(with_two_copies(3), 9, None, None)
        assert not facts["waits_for"]

    asyncio.run(run())


class NotTaken(QuietOutlet):
    untaken = 8

    def shown_of(self, steps: int) -> int:
        return min(steps, self.untaken)


def test_a_step_is_safe_once_somebody_else_could_show_it(tmp_path: Path) -> None:
    """One peer had all Prepared of a step, and nobody else had its own; it died. The others made
    the step once more, which had been told to be safe (seed 900016)."""

    async def run() -> None:
        outlet = NotTaken()
        trainer = Trainer(trainer_tools(tmp_path), outlet)
        trainer._state.step, trainer._state.view = 9, with_two_copies(1)
        assert trainer.tell_safe_step() == 8
        outlet.untaken = 12
        assert trainer.tell_safe_step() == 9

    asyncio.run(run())


def test_what_was_safe_before_all_others_died_is_so_no_more_as_soon_as_another_comes(
    tmp_path: Path,
) -> None:
    """Nobody had asked while the peer was alone, so its first word was of the view before (seed
    500027)."""

    async def run() -> None:
        outlet = NotAllIn()
        trainer = Trainer(trainer_tools(tmp_path), outlet)
        trainer._state.step, trainer._state.view = 9, with_two_copies(1)
        outlet.all_in = True
        assert trainer.tell_safe_step() == 9
        alone = View(view_of(2, 1).snapshot, even_plan([name_of(0)], (1,), SPEC))
        trainer.take_over(alone, 9, None, None)
        outlet.all_in = False
        trainer.take_over(with_two_copies(3), 10, None, None)
        assert trainer.tell_safe_step() is None

    asyncio.run(run())
