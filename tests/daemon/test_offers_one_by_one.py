"""A donor with room for a few states only: the rest is asked for once those are here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.peers.wire import LayerOffered
from p2p_dtfm.daemon.state_transfer.following import follower, giving
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from tests.core.planning import name_of
from tests.daemon.test_followers import Blobs, Line, Outlet, state_at, unplanned
from tests.daemon.trainer_parts import settle, trainer_tools

LOOKS_EVERY_S = 0.02
RESTS_S = 0.2


@pytest.fixture(autouse=True)
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LOOKS_EVERY_S", LOOKS_EVERY_S)
    monkeypatch.setattr(follower, "RETRY_S", 0.0)
    monkeypatch.setattr(giving, "RESTS_S", RESTS_S)


def test_who_has_given_some_is_asked_anew_for_the_rest(tmp_path: Path) -> None:
    blobs: Any = Blobs()
    line = Line()
    tools = trainer_tools(tmp_path, name_of(1), line, blobs)
    state, view = TrainerState(), unplanned()
    payload = state_at(0, 7).to_bytes()

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(view, {0, 1})
        await asyncio.sleep(2 * RESTS_S)
        (first,) = line.requests
        assert first.layers == {0: -1, 1: -1}, "nothing is offered yet: its donor has not begun"
        offer = LayerOffered(view.id, first.number, 0, 7, "a" * 64, len(payload))
        followers.receive(name_of(0), offer)
        await asyncio.sleep(2 * RESTS_S)
        assert line.requests == [first], "the first is still on its way"
        blobs.given["a" * 64].set_result(payload)
        async with asyncio.timeout(10):
            while len(line.requests) < 2:
                await asyncio.sleep(LOOKS_EVERY_S)
        assert line.requests[1].layers == {0: 7, 1: -1}, "what is here need not be given again"
        await asyncio.sleep(2 * RESTS_S)
        assert len(line.requests) == 2, "again only once it has given something since"
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()
