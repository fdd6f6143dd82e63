"""What is ended in the middle of something leaves neither a task nor a file, nor an error."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import Hello, LayerOffered
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.state_transfer.places import KnownPlaces
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon import test_donor
from tests.daemon.test_bounds_over_months import Reached
from tests.daemon.test_followers import COUNT, HOLDER, ME, Line, Outlet, guarded, state_at
from tests.daemon.test_join_loop import Newcomer
from tests.daemon.test_leaving_while_out import Outside
from tests.daemon.trainer_parts import SPEC, settle, trainer_tools


def test_a_layer_that_is_dropped_as_its_holder_confirms_it_ends_no_guardian(tmp_path: Path) -> None:
    """A guardian goes on for a moment in the next view, while a commit drops what nobody wants any
    more. The daemon ended with a KeyError."""
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line)
    view, _ = guarded(1, 7)
    state.states |= {layer: state_at(layer, 7) for layer in range(COUNT)}

    async def run() -> None:
        state.view, state.step = view, 7
        followers = Followers(tools, Outlet(), state)
        followers.guard(view)
        guardian = followers.guardian
        assert guardian is not None
        guardian.came_from[0] = {"somebody else"}
        await settle()
        number = line.requests[-1].number
        followers.receive(HOLDER, LayerOffered(view.id, number, 0, 7, "", 0))
        while 0 not in guardian._fetches:
            await asyncio.sleep(0)
        del state.states[0]
        await settle()
        await state.wait(0.01)  # raises what has ended the guardian
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_a_state_that_is_still_written_as_its_donor_ends_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write goes on in its thread. The file, as large as a layer, lay in the home until the run
    was taken up again."""
    monkeypatch.setattr(KnownPlaces, "needs", lambda *asked: True)
    goes_on, under_way, wrote = threading.Event(), threading.Event(), threading.Event()
    put = Offers.put

    def slow(offers: Offers, *of: Any) -> str:
        under_way.set()
        goes_on.wait(10)
        try:
            return put(offers, *of)
        finally:
            wrote.set()

    monkeypatch.setattr(Offers, "put", slow)
    line: Any = test_donor.Line

    async def scene() -> None:
        compute, offers = Compute(), Offers(tmp_path / "offers")
        it = line()
        donor = Donor(it, it, compute, offers)
        donor.subscribe("c", test_donor.request({0: -1}))
        offering = asyncio.create_task(donor.offer({0: LayerState.genesis(SPEC, 0)}, 0))
        assert await asyncio.to_thread(under_way.wait, 10)
        offering.cancel()
        await settle()
        donor.close()
        goes_on.set()
        assert await asyncio.to_thread(wrote.wait, 10)
        compute.close()

    asyncio.run(scene())
    assert list((tmp_path / "offers").iterdir()) == []


def test_who_comes_back_while_it_asks_to_be_let_in_asks_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer had given a view up that the others agreed on after all, and comes back in another
    life. Each time one more loop asked the members, until it was in a view."""

    async def scene() -> int:
        newcomer, peer = Newcomer(), Outside()
        newcomer.messenger.known = ("member",)
        newcomer.messenger.trains = {"member"}
        peer.effects._entry = newcomer
        loops = [asyncio.create_task(newcomer.join())]
        for _ in range(5):
            await asyncio.sleep(0.005)
            loops.append(asyncio.create_task(peer.effects._rejoin(Rejoin("given up"))))
        await asyncio.sleep(0.05)
        left = sum(not it.done() for it in loops)
        newcomer.agreement.view = "together"
        await asyncio.wait_for(asyncio.gather(*loops), 5)
        return left

    assert asyncio.run(scene()) == 1


class Slow(Reached):
    """The peer answers once. Then each call to it, through a relay, takes long to fail."""

    async def call(self, peer_id: str, body: bytes, deadline_s: float) -> bytes:
        self.asked.append(peer_id)
        if len(self.asked) > 1:
            await asyncio.sleep(20.0)
            raise Unreachable(peer_id, "gone")
        return b""


def test_a_message_that_takes_longer_than_its_peer_was_idle_ends_with_the_messenger(
    tmp_path: Path,
) -> None:
    """After a minute without another message the peer's worker was forgotten, and with it what was
    still under way."""

    async def scene(swarm: Swarm) -> list[str]:
        host: Any = Slow()
        messenger = Messenger(host, host, 1)
        messenger.learn("other", ("/ip4/5.9.0.1/tcp/4001",))
        for number in range(2):
            messenger.tell("other", Hello(number, ()))
            await asyncio.sleep(1.0)
        await asyncio.sleep(65.0)
        assert messenger._workers, "it is at the fourth try"
        await messenger.close()
        await settle()
        return [str(it.get_coro()) for it in asyncio.all_tasks() if "Messenger" in str(it)]

    assert play(0, tmp_path, scene) == []
