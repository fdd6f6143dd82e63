"""Which peers a daemon's screens speak of: those that it hears itself, and those of its view."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.names import generated_name
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.dashboard.view_facts import view_state
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot, workload

SPEC = run_spec()
SHOT = snapshot([Peer() for _ in range(3)], workload())
VIEW = View(SHOT, NoPlan("for the test"))
ME, NEAR, FAR = (name_of(number) for number in range(3))


@pytest.fixture
def observed() -> Iterator[tuple[Status, Observer]]:
    """An observer in a view of three. It heard one member a second ago, and the other minutes
    ago."""
    status = Status()
    observer = Observer(status)
    heard_s = {NEAR: now.monotonic_s() - 1, FAR: now.monotonic_s() - 300}
    messenger: Any = SimpleNamespace(me=ME, heard_s=heard_s)
    observer.meets(messenger)
    observer._view_state = msgspec.structs.replace(view_state(VIEW, SPEC, ME, 0), no_plan="")
    observer._committed_s = now.monotonic_s() - 60
    status.say(State.TRAINING, "step 3 of 9")
    yield status, observer
    observer.close()


def agrees(observer: Observer, *watched: str, view: View | None = VIEW) -> None:
    facts = {"next_view": None, "attempting": False, "frozen": False, "suspected": (), "step": 3}
    agreement: Any = SimpleNamespace(view=view, watched=frozenset(watched), **facts)
    observer.trains(SPEC, "run", workload(), agreement)


def test_who_speaks_with_others_only_is_neither_silent_nor_blamed(
    observed: tuple[Status, Observer],
) -> None:
    """In a swarm of many each member hears its neighbours. It knows a spare elsewhere only by their
    word."""
    _, observer = observed
    agrees(observer, NEAR)
    mine, near, far = observer.live().heard_s_ago
    assert (mine, far) == (None, None) and near is not None
    assert not any(generated_name(FAR) in it.what for it in observer.problems())
    agrees(observer, NEAR, FAR)
    assert observer.live().heard_s_ago[2] == pytest.approx(300, abs=5)
    assert any(generated_name(FAR) in it.what for it in observer.problems())


def test_who_lost_its_place_has_no_part_no_speed_and_no_time_left(
    observed: tuple[Status, Observer],
) -> None:
    """A peer that is barred, or stood still for too long, waits for a place for hundreds of
    steps."""
    status, observer = observed
    history = RunHistory(SPEC, status)
    agrees(observer, NEAR, FAR)
    history.goes_on_from(0)
    history.record(StepOutcome(0, 1.0, 5.0, 1, None, None))
    live = observer.live()
    assert live.tokens_per_s and live.eta_s is not None and observer.state().view.me is not None
    status.say(State.JOINING, "this peer is barred until step 400")
    history.left_views()
    observer.left_views()
    agrees(observer, view=None)
    live, view = observer.live(), observer.state().view
    assert (live.tokens_per_s, live.eta_s, live.step_ns) == (None, None, None)
    assert (view.number, view.me, view.peers, live.heard_s_ago) == (None, None, (), ())
    assert live.loss == 5.0, "what was reached stays"


def test_a_view_that_was_being_drawn_is_not_shown_once_it_is_left(
    observed: tuple[Status, Observer],
) -> None:
    _, observer = observed

    async def live() -> None:
        observer.view_took_over(SPEC, VIEW, 5)
        observer.left_views()
        await asyncio.sleep(0.5)
        assert observer.state().view.number is None
        observer.view_took_over(SPEC, VIEW, 9)
        async with asyncio.timeout(10):
            while observer.state().view.from_step != 9:
                await asyncio.sleep(0.01)

    asyncio.run(live())
