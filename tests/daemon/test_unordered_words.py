"""Each call goes its own way. What was told first may come last, or twice, or so late that the
hearer is further than it says."""

import asyncio
from pathlib import Path
from typing import Any

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.daemon.peers.wire import LayerOffered, LayersCommitted
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.test_followers import (
    COUNT,
    HOLDER,
    ME,
    Blobs,
    Line,
    Outlet,
    chunks,
    guarded,
    state_at,
)
from tests.daemon.trainer_parts import settle, trainer_tools


def versions(states: dict[int, LayerState]) -> set[int]:
    return {state.version for state in states.values()}


def test_who_takes_over_before_its_last_step_commits_here_moves_on_what_it_guards(
    tmp_path: Path,
) -> None:
    """Without a stage, the others' word alone may show that a view has taken over. What was held
    back until the step commits here waited for something else to come. After three seconds all
    layers were asked for anew, while steps waited for their guardian."""
    line = Line()
    tools = trainer_tools(tmp_path, ME, line)
    view, plan = guarded(1, 7)
    following, next_plan = guarded(2, 8)

    async def run() -> None:
        trainer = Trainer(tools, Outlet())
        trainer.states.update({layer: state_at(layer, 7) for layer in range(COUNT)})
        trainer.take_over(view, 7, Ledger(view.id, plan, 7), None)
        running = asyncio.create_task(trainer.run())
        try:
            await settle()
            number = line.requests[-1].number
            for layer in range(COUNT):
                trainer.following(HOLDER, LayerOffered(view.id, number, layer, 7, "", 0))
                for header, payload in chunks(view, layer, 7):
                    await trainer.frame(HOLDER, header, payload)
            trainer.following(HOLDER, LayersCommitted(view.id, number, 7, 1.0))
            await asyncio.sleep(0.2)
            assert versions(trainer.states) == {7}
            trainer.take_over(following, 8, Ledger(following.id, next_plan, 8), None)
            async with asyncio.timeout(1.5):
                while versions(trainer.states) != {8}:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.wait({running})
            await trainer.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_an_offer_that_is_told_twice_takes_nothing_back(tmp_path: Path) -> None:
    """The offer's answer was lost, so it was told again some seconds later. What steps had moved on
    since was the old state again, though its holder had receipts for all of them."""
    blobs: Any = Blobs()
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line, blobs)
    view, _ = guarded(1, 7)

    async def run() -> None:
        state.view, state.step = view, 9
        followers = Followers(tools, Outlet(), state)
        followers.guard(view)
        await settle()
        number, offers = line.requests[-1].number, []
        for layer in range(COUNT):
            payload, name = state_at(layer, 7).to_bytes(), f"{layer:064x}"
            offers.append(LayerOffered(view.id, number, layer, 7, name, len(payload)))
            followers.receive(HOLDER, offers[layer])
            for frame in chunks(view, layer, 7):
                followers.gradient(HOLDER, *frame)
            while name not in blobs.given:
                await asyncio.sleep(0.01)
            blobs.given[name].set_result(payload)
        followers.receive(HOLDER, LayersCommitted(view.id, number, 7, 1.0))
        while len(state.states) < COUNT or versions(state.states) != {8}:
            await state.wait(1.0)
        begun = len(blobs.begun)
        for offer in offers:
            followers.receive(HOLDER, offer)
        await settle()
        for name, given in blobs.given.items():
            if not given.done():
                given.set_result(state_at(int(name, 16), 7).to_bytes())
        await asyncio.sleep(0.2)
        assert versions(state.states) == {8}
        assert len(blobs.begun) == begun, "nothing is fetched again"
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_a_state_that_comes_slowly_takes_back_no_step_of_one_that_is_here(tmp_path: Path) -> None:
    """A stream broke, so all layers were asked for anew. Over a thin line they came when gradients
    had already moved on the states here. The old state took their place, and the steps since were
    gone."""
    blobs: Any = Blobs()
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line, blobs)
    view, _ = guarded(1, 7)
    state.states.update({layer: state_at(layer, 7) for layer in range(COUNT)})

    async def run() -> None:
        state.view, state.step = view, 7
        followers = Followers(tools, Outlet(), state)
        followers.guard(view)
        await settle()

        def step_comes(number: int, step: int) -> None:
            for layer in range(COUNT):
                for frame in chunks(view, layer, step):
                    followers.gradient(HOLDER, *frame)
            followers.receive(HOLDER, LayersCommitted(view.id, number, step, 1.0))

        async def commits(step: int) -> None:
            state.step = step + 1
            followers.committed()
            while versions(state.states) != {step + 1}:
                await state.wait(1.0)

        first = line.requests[-1].number
        for layer in range(COUNT):
            followers.receive(HOLDER, LayerOffered(view.id, first, layer, 7, "", 0))
        step_comes(first, 7)
        followers.stream_lost(HOLDER)
        async with asyncio.timeout(5):
            while (again := line.requests[-1].number) == first:
                await asyncio.sleep(0.01)
        await commits(7)
        payload = state_at(0, 8).to_bytes()
        followers.receive(HOLDER, LayerOffered(view.id, again, 0, 8, "8" * 64, len(payload)))
        step_comes(again, 8)
        await commits(8)
        blobs.given["8" * 64].set_result(payload)
        await asyncio.sleep(0.2)
        assert versions(state.states) == {9}
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()
