"""Real daemons in virtual time: one of them is updated before the others, to another protocol."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.daemon.node import network
from p2p_dtfm.daemon.peers import run_source
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.testbed.virtual import swarm as swarms
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import are_in_views_of, begun

AT = PROTOCOL_VERSION + 1
PATIENCE_S = 60.0
"""After some seconds the updated daemon went on alone."""
SLOW = (10_000_000, 20_000_000)
"""With this the others take few steps while it waits, as steps cost processor time."""


def whole_checkpoint_of(peer: Peer) -> bool:
    return any(peer.home.glob("runs/*/checkpoints/step-*"))


async def has_left(swarm: Swarm, peer: Peer, with_checkpoint: bool = True) -> None:
    await swarm.until(lambda: peer.step() >= 20, "they train together", 120)
    if with_checkpoint:
        await swarm.until(lambda: whole_checkpoint_of(peer), "a checkpoint", 60)
    swarm.leave(peer)
    await swarm.until(lambda: not peer.is_running, "it has left", 60)


@pytest.mark.parametrize("by_addresses", [False, True])
def test_who_is_updated_first_waits_for_the_others_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_addresses: bool
) -> None:
    """The daemon found "nobody", and went on alone from its own disk beside the swarm that it had
    left."""
    monkeypatch.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(tmp_path, 4000, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        founder, member, other = await begun(swarm, run, "abc")
        await has_left(swarm, member)
        monkeypatch.setattr(run_source, "PROTOCOL_VERSION", AT)  # of whoever asks from now on
        given = (swarm.address(founder),) if by_addresses else ()
        seen = len(member.events())
        swarm.start(member, initial_peers=given)
        speaks_otherwise = f"speaks protocol {PROTOCOL_VERSION}, this program {AT}"
        await swarm.until(lambda: speaks_otherwise in member.standing(), "it says so", 60)
        until_s = swarm.now_s + PATIENCE_S
        await swarm.until(lambda: swarm.now_s > until_s, "time goes by", 2 * PATIENCE_S)
        await swarm.until(lambda: speaks_otherwise in member.standing(), "it still does", 30)
        assert not [it for it in member.events()[seen:] if it["event"] == "view"]
        assert member.daemon is not None
        assert "update the other daemon" in str(member.daemon.observer.problems())
        monkeypatch.setattr(run_source, "PROTOCOL_VERSION", PROTOCOL_VERSION)
        await swarm.until(lambda: member.takes_part, "it finds them", 60)
        await swarm.until(are_in_views_of([founder, member, other], 3), "it is let in", 60)

    play(1, tmp_path / "world", scene)


def test_a_founder_that_is_updated_first_founds_nothing_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder uses the line that it always types."""
    monkeypatch.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(tmp_path, 4000, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        founder, member = await begun(swarm, run, "ab")
        await has_left(swarm, founder, with_checkpoint=False)
        monkeypatch.setattr(run_source, "PROTOCOL_VERSION", AT)
        swarm.start(founder)
        await swarm.until(lambda: not founder.is_running, "it ends", 60)
        assert founder.ended is not None
        error = founder.ended.exception()
        assert isinstance(error, UserError) and "none can be joined" in error.cause
        assert "update the other daemon" in error.fixes[0] and error.exit_code == 6
        assert member.is_running

    play(1, tmp_path / "world", scene)


def test_those_that_are_updated_go_on_without_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One service that nobody looked after, or a key that claims to be one, kept every updated home
    out of its run for good."""
    monkeypatch.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(tmp_path, 4000, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        forgotten, *updated = await begun(swarm, run, "abc")
        for peer in updated:
            await has_left(swarm, peer)

        def protocol_of(reply: bytes) -> int:
            is_old = decode(reply, Welcome).peers[0].peer_id == forgotten.peer_id
            return PROTOCOL_VERSION if is_old else AT

        monkeypatch.setattr(run_source, "protocol_of", protocol_of)
        monkeypatch.setattr(run_source, "PROTOCOL_VERSION", AT)
        monkeypatch.setattr(network, "PROTOCOL_VERSION", AT)
        swarm.start(updated[1], initial_peers=())  # who left last comes back first
        until_s = swarm.now_s + PATIENCE_S
        await swarm.until(lambda: swarm.now_s > until_s, "time goes by", 2 * PATIENCE_S)
        assert not updated[1].takes_part, "of two that stayed the other one may train on"
        assert "--apart" in str(updated[1].daemon and updated[1].daemon.observer.problems())
        swarm.start(updated[0], initial_peers=())  # half of those of its last view are old
        await swarm.until(lambda: all(it.takes_part for it in updated), "they go on", 120)
        assert min(peer.step() for peer in updated) >= 5, "from what they had"

    play(1, tmp_path / "world", scene)


def test_who_left_last_may_go_on_apart_from_those_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(tmp_path, 4000, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        founder, member = await begun(swarm, run, "ab")
        await has_left(swarm, member)
        monkeypatch.setattr(run_source, "PROTOCOL_VERSION", AT)
        swarm.start(member, initial_peers=(), apart=True)
        await swarm.until(lambda: member.takes_part, "it goes on", 60)
        assert member.step() >= 5 and founder.is_running

    play(1, tmp_path / "world", scene)
