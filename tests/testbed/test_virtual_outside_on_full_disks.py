"""A peer in no view whose disk takes no new life holds up nobody, and speaks of no failure."""

from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, are_in_views_of, begun

SEED = 1


def test_who_comes_back_alone_does_not_wait_for_a_peer_that_is_in_no_view(tmp_path: Path) -> None:
    """The others had gone on without that peer, and its disk took no number of its next life. It
    went on saying that it lets others in, and heard no wish of theirs. Nobody trained until its
    owner made room."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: a.step() >= 20, "steps", 120)
        swarm.cut(a, c)
        swarm.cut(b, c)
        await swarm.until(are_in_views_of([a, b], 2), "two go on", 60)
        c.disk.is_full = True
        swarm.mend(a, c)
        swarm.mend(b, c)
        await swarm.until(lambda: agreement_of(c).is_outside, "one is outside", 60)
        await swarm.until(lambda: "cannot be noted" in c.standing(), "its disk is full", 30)
        swarm.kill(a)
        swarm.kill(b)
        swarm.start(a)
        await swarm.until(lambda: a.is_in_a_view, "it goes on alone", 150)
        assert agreement_of(c).is_outside
        c.disk.is_full = False
        await swarm.until(are_in_views_of([a, c], 2), "the other is let in", 60)

    play(SEED, tmp_path / "world", scene)
