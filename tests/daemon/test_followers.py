"""What comes for a follower in the very moment in which it is stopped changes nothing any more."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon.followers import Followers
from p2p_dtfm.daemon.trainer_state import TrainerState
from p2p_dtfm.daemon.wire import FollowLayers, LayerOffered
from p2p_dtfm.train.layer_state import LayerState
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC, trainer_tools, view_of


class Outlet:
    def __init__(self) -> None:
        self.synced_views: list[Any] = []

    def states_changed(self) -> None:
        pass

    def synced(self, view: Any) -> None:
        self.synced_views.append(view)


class Line:
    """A courier that can reach everyone."""

    def __init__(self) -> None:
        self.requests: list[FollowLayers] = []

    async def ask(self, peer_id: str, message: FollowLayers) -> None:
        self.requests.append(message)

    def tell(self, peer_id: str, message: Any) -> None:
        pass


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stops", [False, True])
def test_what_arrives_while_it_is_stopped(tmp_path: Path, stops: bool) -> None:
    """A holder says that this peer has the layer already that it asked for."""
    outlet: Any = Outlet()
    line = Line()
    tools = trainer_tools(tmp_path, name_of(1), line)
    state = TrainerState()
    state.states[0] = LayerState.genesis(SPEC, 0)
    found = view_of(1, 2)
    assert isinstance(found.plan, Plan)
    view = View(msgspec.structs.replace(found.snapshot, present=found.plan), found.plan)

    async def run() -> None:
        followers = Followers(tools, outlet, state)
        followers.follow(view, {0})
        await turns()
        number = line.requests[0].number
        followers.receive(name_of(0), LayerOffered(view.id, number, 0, 0, "", 0))
        if stops:
            followers.stop_following()
        await turns()
        await state.wait(0.01)  # raises what has ended the follower
        followers.stop_following()
        await turns()

    asyncio.run(run())
    tools.compute.close()
    assert outlet.synced_views == ([] if stops else [view.id])
