"""Real daemons in virtual time: what a run by invitation tells a bootstrap node that is no guest,
and a guest that slept while its invitation was taken back."""

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.wire import TraceRequest, TranscriptRequest, pack, unpack
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.routers import meeting_point
from p2p_dtfm.testbed.virtual.routers.meeting_point import MeetingPoint
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.surroundings.invited import by_invitation, line_of
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from tests.testbed.begun import are_in_views_of, participant_of

SEED = 1
STEPS = 1000
ASKS_EVERY_S = 0.5
ANSWERS_WITHIN_S = 3.0


class Listener:
    """A bootstrap node that notes what it is told, and asks members for what only they may have."""

    def __init__(self) -> None:
        self.told = Counter[str]()
        self.answers = Counter[str]()

    async def live(self, host: VirtualHost) -> None:
        GateKeeper.of(host)
        control = await ControlPlane(host, self._refuse).ready()
        while True:
            await asyncio.sleep(ASKS_EVERY_S)
            for peer_id in await host.connected_peers():
                for asked in (TranscriptRequest(0), TraceRequest(None, 1)):
                    with contextlib.suppress(Refused, Unreachable):
                        await control.call(peer_id, pack(1, asked), ANSWERS_WITHIN_S)
                        self.answers[type(asked).__name__] += 1

    async def _refuse(self, sender: str, body: bytes) -> bytes:
        _, message, _ = unpack(body, lambda kind, size_bytes: None)
        self.told[type(message).__name__] += 1
        raise PeerFault(REFUSAL, sender)


async def founded(
    swarm: Swarm, tmp_path: Path, points: tuple[str, ...], **settings: object
) -> Peer:
    swarm.are_equal = swarm.network.links.are_near = True
    path = by_invitation(make_run(tmp_path, STEPS), swarm.identity_of("a"), tmp_path)
    founder = swarm.peer("a", run=str(path), initial_peers=points, **settings)
    swarm.start(founder)
    await swarm.until(lambda: founder.has_run, "the run is founded", 60)
    return founder


def guest_of(swarm: Swarm, founder: Peer, name: str, points: tuple[str, ...] = ()) -> Peer:
    line = line_of(founder, swarm.identity_of("a"), swarm.address(founder))
    return swarm.peer(name, initial_peers=(swarm.address(founder), *points), **line)


def test_a_bootstrap_node_that_is_no_guest_is_told_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got the transcript of peers in no view. Newcomers asked it to let them in, and told it
    their device and links. Members told it again and again who they are and how far."""
    listener = Listener()
    monkeypatch.setattr(meeting_point, "_live", listener.live)

    async def scene(swarm: Swarm) -> None:
        point = MeetingPoint(swarm.network, swarm.loop, swarm.identity_of("point"))
        point.start()
        founder = await founded(swarm, tmp_path, (point.address,), expect_peers=3)
        for name in "bc":
            swarm.start(guest_of(swarm, founder, name, (point.address,)))
            await asyncio.sleep(2.0)  # they ask whom they know, again and again
        await swarm.until(lambda: all(it.step() >= 1 for it in swarm.peers), "all are in", 60)
        later = guest_of(swarm, founder, "d", (point.address,))
        swarm.start(later)
        await swarm.until(lambda: later.step() >= 1, "one comes later", 60)
        began_s = swarm.now_s
        await swarm.until(lambda: swarm.now_s >= began_s + 30, "members look for others", 60)

    play(SEED, tmp_path / "world", scene)
    assert listener.told.keys() <= {"Hello", "Introduction"}, listener.told
    assert not listener.answers


def test_a_guest_that_slept_while_it_was_sent_away_hears_why(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        founder = await founded(swarm, tmp_path, (), expect_peers=3)
        one, sleeper = (guest_of(swarm, founder, name) for name in "bc")
        for peer in (one, sleeper):
            swarm.start(peer)
        members = [founder, one]
        await swarm.until(lambda: all(it.step() >= 1 for it in swarm.peers), "all are in", 60)
        for peer in members:
            swarm.cut(peer, sleeper)
        swarm.fall_asleep(sleeper)
        await swarm.until(are_in_views_of(members, 2), "it is out", 120)
        book = participant_of(founder).network.guest_book
        assert book is not None
        book.revoke(sleeper.peer_id)
        swarm.wake(sleeper)
        for peer in members:
            swarm.mend(peer, sleeper)
        ended = sleeper.ended
        assert ended is not None
        await swarm.until(ended.done, "it hears why it is out", 120)
        error = ended.exception()
        assert isinstance(error, UserError) and "revoked by the founder" in error.cause

    play(SEED, tmp_path / "world", scene)
