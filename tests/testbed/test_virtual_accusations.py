"""Real daemons in virtual time: two fellows of eight say of one honest member that they do not hear
it, and then of the next one. It has a link in doubt to both, and they have one each: it went, and
within six seconds all six honest ones were out, and the two had the run for themselves."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.faults import LIES, Schedule
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play

STEPS = 40
MEMBERS = "abcdefgh"
EVERY_S = 1.0


def says_that_it_hears_nothing(liar: Peer, of: Peer) -> None:
    daemon, process = liar.daemon, liar.process
    assert daemon is not None and process is not None
    membership = daemon._departure._membership

    def say() -> None:
        now_ns = now.monotonic_ns()
        membership.actions.do(membership.agreement.suspect(of.peer_id, "nothing heard", now_ns))

    process._context.copy().run(say)


@pytest.mark.parametrize("liars", ["gh", pytest.param("ab", marks=pytest.mark.nightly)])
def test_two_that_accuse_one_after_the_other_are_out_themselves(tmp_path: Path, liars: str) -> None:
    run = with_audits(make_run(tmp_path, STEPS), 0.02, 5)
    left: dict[str, set[str]] = {}

    async def lie(swarm: Swarm) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            for liar in (peer for peer in swarm.peers if peer.name in liars and peer.is_running):
                view = liar.daemon._departure._membership.agreement.view  # type: ignore[union-attr]
                members = view.member_ids if view is not None else ()
                honest = [it for it in swarm.peers if it.name not in liars]
                victims = [it for it in honest if it.peer_id in members]
                if victims:
                    says_that_it_hears_nothing(liar, victims[0])

    async def scene(swarm: Swarm) -> None:
        one = Play(swarm, run, Schedule(tuple(MEMBERS), (), (), is_audited=True))
        lying = asyncio.create_task(lie(swarm))
        try:
            await one.play()
        finally:
            lying.cancel()
        names = {peer.peer_id: peer.name for peer in swarm.peers}
        for peer in swarm.peers:
            views = [event for event in peer.events() if event["event"] == "view"]
            left[peer.name] = {names[it] for it in views[-1]["members"]}

    play(LIES, tmp_path / "world", scene)
    honest = set(MEMBERS) - set(liars)
    last = [left[name] for name in sorted(honest) if name in left[name]]
    together = max(last, key=len)
    assert len(together & honest) >= len(honest) - 1, "one honest one, and no second one"
    assert not together & set(liars)
