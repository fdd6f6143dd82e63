"""Real daemons in virtual time: a guest shows its invitation to the member that it asks, and to
nobody else. When its line was taken back that member alone knew by what it had come. It was one
word against another: the honest member was out, and the guest stayed."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.invited.chains import ChainLink, run_mark, sign_link
from p2p_dtfm.core.protocol.invited.line import InvitationLine
from p2p_dtfm.daemon.peers.guests.guest_watch import GuestWatch
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.surroundings.invited import (
    EXPIRES_S,
    by_invitation,
    directory_key,
)
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, are_in_views_of, participant_of

STEPS = 1000
SEED = 1
HEARD_S = 1.0
"""How long all may take to hear by what a guest has come."""


def line_for(swarm: Swarm, founder: Peer, name: str, known: Peer) -> InvitationLine:
    """The founder's line for one guest."""
    assert founder.daemon is not None
    run_digest, identity = founder.daemon.run_digest, swarm.identity_of(founder.name)
    seed = bytes.fromhex(digest_bytes(b"line for " + name.encode()))
    link = ChainLink(run_mark(run_digest), identity_of_seed(seed).peer_id, True, False, EXPIRES_S)
    signed = sign_link(link, identity.peer_id, identity.sign)
    run, key = bytes.fromhex(run_digest), directory_key(identity)
    return InvitationLine(run, key, seed, (signed,), (swarm.address(known),))


def guest_of(swarm: Swarm, founder: Peer, name: str, known: Peer) -> Peer:
    line = line_for(swarm, founder, name, known)
    return swarm.peer(
        name, invite=line.text(), run_digest=line.run_digest, initial_peers=line.addresses
    )


def show_to_one_alone(monkeypatch: pytest.MonkeyPatch, who: str, whom: str) -> None:
    honest = Messenger._introduce

    async def introduce(self: Messenger, peer_id: str) -> str:
        return await honest(self, peer_id) if self.me != who or peer_id == whom else ""

    monkeypatch.setattr(Messenger, "_introduce", introduce)
    look = GuestWatch.look

    def looks(self: GuestWatch) -> None:
        if self._messenger.me != who:  # it does not go by itself
            look(self)

    monkeypatch.setattr(GuestWatch, "look", looks)


def test_a_guest_whose_line_is_taken_back_is_out_though_one_member_alone_has_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        swarm.are_equal = swarm.network.links.are_near = True
        path = by_invitation(run, swarm.identity_of("a"), tmp_path)
        founder = swarm.peer("a", run=str(path), expect_peers=4)
        swarm.start(founder)
        await swarm.until(lambda: founder.has_run, "the run is founded", 60)
        *others, guest = sorted("bcde", key=lambda it: swarm.identity_of(it).peer_id)[::-1]
        members = [founder, *(guest_of(swarm, founder, name, founder) for name in others)]
        for peer in members[1:]:
            swarm.start(peer)
        await swarm.until(lambda: all(peer.step() >= 1 for peer in members), "all are in", 60)
        asked = members[1]
        line = line_for(swarm, founder, guest, asked)
        newcomer = guest_of(swarm, founder, guest, asked)
        show_to_one_alone(monkeypatch, newcomer.peer_id, asked.peer_id)
        swarm.start(newcomer)
        await swarm.until(are_in_views_of(members, 5), "it is let in", 120)
        let_in_s = swarm.now_s
        await swarm.until(lambda: swarm.now_s >= let_in_s + HEARD_S, "all hear of it", 60)
        book = participant_of(founder).network.guest_book
        assert book is not None
        book.revoke(line.holder, line)
        await swarm.until(are_in_views_of(members, 4), "it is out", 10)
        for peer in members:
            view = agreement_of(peer).view
            assert view is not None and newcomer.peer_id not in view.member_ids

    play(SEED, tmp_path / "world", scene)
