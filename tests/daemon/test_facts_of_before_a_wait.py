"""What was so before a daemon waited may be otherwise since: nothing goes by it any more."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.messages.work import Kind
from p2p_dtfm.core.protocol.lineage import Epochs, marked
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.node.participation import end_of_run
from p2p_dtfm.daemon.node.participation.end_of_run import EndOfRun
from p2p_dtfm.daemon.state_transfer import initial_states
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.planning import Link, Peer, name_of, snapshot
from tests.daemon.test_endings import in_quick_time
from tests.daemon.trainer_parts import (
    NO_BLOBS,
    SPEC,
    QuietOutlet,
    settle,
    trainer_tools,
    view_of,
)

LAYERS = layer_count(SPEC)
HOLDER, SPARE = name_of(0), name_of(1)


def test_whose_claim_has_come_is_no_longer_among_those_that_are_waited_for(
    tmp_path: Path,
) -> None:
    """While an auditor computed the works of others, its status named the one that had claimed
    last."""
    tools, state, view, late = trainer_tools(tmp_path), TrainerState(), view_of(1, 2), ["b"]
    state.view = view

    async def offer_states() -> None:
        """Nobody waits for states."""

    async def scene() -> None:
        audits = Audits(tools, QuietOutlet(), state, offer_states)
        waiting = asyncio.create_task(audits._until(view, Kind.CLAIM, lambda: tuple(late)))
        await settle()
        assert tools.status.facts["waits_for"] == ["b"]
        late.clear()
        state.wake.set()
        await asyncio.wait_for(waiting, 5)
        assert tools.status.facts["waits_for"] == []

    asyncio.run(scene())
    tools.compute.close()


def guarded_view() -> View:
    """One peer trains, and a spare that keeps up guards its layers."""
    link = Link(round_trip_ns=80_000_000, bytes_per_s=1_000_000_000)
    found = snapshot([Peer()] * 2, workload_of(SPEC), link=link)
    pipeline = Pipeline((Stage(HOLDER, 0, LAYERS, 1),), 0, SPEC.microbatches_per_step)
    return View(found, Plan((pipeline,), (SPARE,), 3600 * 1_000_000_000))


def test_a_spare_that_waits_for_what_it_guards_is_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status said for the rest of the view that it waits for given weights, which had come a
    second later."""
    monkeypatch.setattr(initial_states, "RETRY_S", 0.001)
    tools, view, state = trainer_tools(tmp_path, SPARE), guarded_view(), TrainerState(SPARE)
    state.view, initial, tried = view, tools.stores.initial, list[int]()
    model = SPEC.model.model_copy(update={"initial": "ab" * 32})
    monkeypatch.setattr(initial, "_spec", SPEC.model_copy(update={"model": model}))

    async def fetched(layer: int) -> Path:
        tried.append(layer)
        if len(tried) == 1:
            raise BlobUnavailable("ab" * 32, {})
        return tmp_path

    monkeypatch.setattr(initial, "_fetched", fetched)
    made = lambda spec, layer, path: LayerState.genesis(SPEC, layer)  # noqa: E731
    monkeypatch.setattr(initial_states, "initial_layer_state", made)

    async def scene() -> None:
        followers = Followers(tools, QuietOutlet(), state)
        tools.status.say(State.SPARE, "the plan is faster without this peer")
        mine = followers.guard(view)
        assert mine and view.cut_pace is None
        while not mine <= state.states.keys():
            await asyncio.sleep(0.001)
        assert tools.status.state is State.SPARE and len(tried) > len(mine)
        followers.stop_guarding()

    asyncio.run(asyncio.wait_for(scene(), 20))
    tools.compute.close()


def test_a_run_whose_last_step_is_lost_while_a_text_is_written_is_not_told_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report was of a run without its last steps, and was not written again."""
    told = list[int]()
    monkeypatch.setattr(end_of_run, "write_report", lambda *of: True)
    monkeypatch.setattr(end_of_run, "last_words", lambda *of: told.append(1) or ())
    spec = SimpleNamespace(total_steps=40, layers=("listed",))
    home = SimpleNamespace(run_directory=lambda digest: Path("run"))
    shown = SimpleNamespace(samples=SimpleNamespace(prompt=""))
    observer = SimpleNamespace(state=lambda: shown, ends_with=lambda commands: None)
    checkpoints: Any = SimpleNamespace(
        whole_step=40,
        withheld=frozenset(),
        refused=lambda step: False,
        has_no_room=lambda step: False,
    )

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        done = asyncio.Event()
        done.set()

        async def write_last(step: int) -> None:
            if not told_of:
                done.clear()
            told_of.append(step)

        told_of = list[int]()
        samples: Any = SimpleNamespace(write_last=write_last)
        run: Any = SimpleNamespace(spec=spec, digest="ab")
        local: Any = SimpleNamespace(home=home, observer=observer)
        ending = EndOfRun(local, run, done, checkpoints, samples)
        telling = asyncio.create_task(ending.when_done())
        await passes(5.0)
        assert told_of and not told and not telling.done()
        done.set()
        await asyncio.wait_for(telling, 20.0)

    in_quick_time(scene)
    assert told == [1]


def test_a_first_step_of_a_new_epoch_that_is_saved_whole_is_told_of(tmp_path: Path) -> None:
    """This peer was away as the others took steps back. Its disk was looked through as it saved,
    and afterwards it held that step to be lost."""
    compute, root = Compute(), tmp_path / "checkpoints"
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(LAYERS)}
    lineage = marked("7" * 64, Epochs(1, (4,)))

    async def scene() -> None:
        checkpoints.whole_step = 8  # of steps that were taken back
        for state in states.values():
            state.version = 6
        checkpoints.committed(5, {}, lineage)
        await asyncio.sleep(0)  # the update of the states takes a moment, too
        await checkpoints.save(6, states, lineage)
        assert checkpoints.whole_step == 6
        await checkpoints.close()

    asyncio.run(asyncio.wait_for(scene(), 20))
    compute.close()
