"""Daemons in virtual time: a member fails when some have committed its last step and one has
not."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.transcript.checking import Checker
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import Message
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, TranscriptLines
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS, Process
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun

STEPS, AT = 20, 6


def gaps_of(peer: Peer) -> list[tuple[int, int]]:
    checker = Checker(verify)
    for entry in TranscriptLines(next(peer.home.glob(f"runs/*/{FILE_NAME}"))).entries():
        checker.take(entry)
    assert checker.steps
    return checker.gaps


def test_who_had_not_committed_its_last_step_has_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agreement gave the peer the outcome, and nothing that shows it. Its transcript had a gap
    there, which nobody could tell from a step that was left out on purpose."""
    tell, deaf = Messenger.tell, set[str]()

    def tell_all_but_one(self: Messenger, peer_id: str, message: Message, *others: Any) -> None:
        if not (isinstance(message, SignedPrepared) and peer_id in deaf and PROCESS.get() in dying):
            tell(self, peer_id, message, *others)

    monkeypatch.setattr(Messenger, "tell", tell_all_but_one)
    dying: list[Process | None] = []

    async def scene(swarm: Swarm) -> list[Peer]:
        a, b, c, d = await begun(swarm, make_run(tmp_path, STEPS), "abcd")
        await swarm.until(lambda: b.step() >= AT, "they train", 60)
        deaf.add(b.peer_id)
        dying.append(c.process)
        await swarm.until(lambda: a.step() > b.step(), "b lacks what c has prepared", 10)
        behind = b.step()
        swarm.kill(c)
        here = [a, b, d]
        await swarm.until(lambda: not any(it.is_running for it in here), "they end", 120)
        steps = [it["step"] for it in b.events() if it["event"] == "view"]
        assert steps[-1] == behind + 2, "it went on after the step that it had not committed"
        return here

    for peer in play(1, tmp_path / "world", scene):
        assert gaps_of(peer) == [], peer.name
