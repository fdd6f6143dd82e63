"""The last steps of a place's layers: how long they may take before others are asked for the
states, and what of those that come is kept meanwhile."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.liveness.pace import FLOOR_NS, WARM_UP_NS, Pace
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.daemon.trainer import place as place_module
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import LAST_STEPS_S, Followers
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.daemon.trainer.trainer_state import Stopped, TrainerState
from tests.daemon.test_followers import COUNT, Outlet, state_at
from tests.daemon.test_unconfirmed_states import HOLDERS, ME, NEXT, NOW, Line, replicas
from tests.daemon.trainer_parts import SPEC, settle, trainer_tools, view_of

LAYERS = set(range(COUNT))
SNAPSHOT = msgspec.structs.replace(view_of(1, 4).snapshot, step=NOW, present=replicas(HOLDERS))
VIEW = View(SNAPSHOT, replicas((*HOLDERS, ME)))
LIAR, HONEST = HOLDERS[:2]


def came(followers: Followers, state: TrainerState, versions: Mapping[int, int]) -> None:
    """All states of the place have come, each from the next holder, and the view takes over."""
    follower = followers.follower
    assert follower is not None
    for layer, version in versions.items():
        state.states[layer] = state_at(layer, version)
        follower.came_from[layer] = {HOLDERS[layer % len(HOLDERS)]}
        follower.missing.discard(layer)
    state.view, state.step = VIEW, NEXT
    follower.taken_over = True


def test_what_several_give_over_one_line_has_the_time_that_the_others_wait(tmp_path: Path) -> None:
    """Each donor's layers had the time of that donor's line, as if what all give came over lines of
    its own. A newcomer with a thin line threw good states away, and fetched thrice the bytes."""
    tools, state = trainer_tools(tmp_path, ME, Line()), TrainerState()

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(VIEW, LAYERS)
        await settle()
        came(followers, state, dict.fromkeys(LAYERS, NOW))
        pace = Pace(VIEW, SPEC, 0)
        pace.begin(NEXT)
        lines_s = (pace.patience(ME, NEXT).fetch_ns - FLOOR_NS - WARM_UP_NS) / SECOND_NS
        assert lines_s > 0
        assert followers.last_steps_s(VIEW) == pytest.approx(LAST_STEPS_S + lines_s)
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_a_state_of_a_step_to_come_costs_no_state_that_still_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such layer of a liar had all others' last gradients dropped on their way. Their states
    came anew, thrice as many bytes, while all waited for this peer."""
    tools, state = trainer_tools(tmp_path, ME, Line()), TrainerState()
    monkeypatch.setattr(place_module, "GUARDIAN_GRACE_S", 0.0)

    async def run() -> None:
        outlet = Outlet()
        followers = Followers(tools, outlet, state)
        place = PlaceInView(tools, outlet, state, followers, Cuts(tools, outlet, state))
        followers.follow(VIEW, LAYERS)
        await settle()
        came(followers, state, dict.fromkeys(LAYERS, NOW) | {0: NEXT + 1000})
        before = followers.follower
        waiting = asyncio.create_task(place._brought(VIEW, sorted(LAYERS)))
        await settle()
        assert followers.follower is before, "the gradients of the others are still on their way"
        for layer in LAYERS - {0}:
            state.states[layer].version = NEXT
        state.wake.set()
        await settle()
        asked = followers.follower
        assert asked is not None and asked is not before and asked.layers == {0}
        assert asked._donor_of[0] != LIAR and 0 not in state.states
        state.stopped = True
        state.wake.set()
        with pytest.raises(Stopped):
            await waiting
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()
