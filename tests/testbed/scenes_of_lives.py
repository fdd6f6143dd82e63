"""Scenes for bugs of who comes, who goes and who is believed, which no seed that was tried has
found: green on the daemon as it is, and red with the bug. `test_virtual_scenes.py` plays them."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual import swarm as worlds
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.sim.test_fellows_that_accuse import WATCHED_NS, Fellows
from tests.testbed.begun import agreement_of, are_in_views_of, begun, participant_of
from tests.testbed.test_virtual_founders import SLOW

SEED = 1
LOOK_S = 7.5
"""After so long a founder that waits has looked for a view once in vain; it looks again when it has
founded."""
DAY_S = 86_400.0


def a_clock_is_put_right(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """One life begins by a clock that is a day ahead, and the next by a right one."""
    run = make_run(folder, 2000)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: c.step() >= 10, "steps", 60)
        for ahead_s in (DAY_S, 0.0):
            swarm.kill(c)
            swarm.set_clock(c, ahead_s)
            await swarm.until(are_in_views_of([a, b], 2), "they go on", 30)
            swarm.start(c)
            await swarm.until(are_in_views_of([a, b], 3), "it is let in", 30)

    play(SEED, folder / "world", scene)


def a_founder_is_left_by_the_newcomer_that_it_founds_with(
    folder: Path, patches: pytest.MonkeyPatch
) -> None:
    """It comes back to nobody, another one asks it to be let in, and is let in elsewhere before the
    founder has waited for all that it had trained with. When those have died it founds anew."""
    patches.setattr(worlds, "FLOPS_PER_S", SLOW)
    run = make_run(folder, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: a.step() >= 20, "steps", 120)
        swarm.kill(a)
        swarm.kill(b)
        swarm.cut(a, c)
        swarm.cut(b, c)
        await swarm.until(are_in_views_of([c], 1), "one goes on", 60)
        swarm.start(a, expect_peers=1)
        await swarm.until(lambda: "waits 15 s" in a.standing(), "it waits", 60)
        await asyncio.sleep(LOOK_S)
        swarm.mend(b, c)
        swarm.start(b)
        await swarm.until(lambda: b.peer_id in _joiners_of(a), "the other asks it", 10)
        await swarm.until(are_in_views_of([c], 2), "that one is let in elsewhere", 14)
        await asyncio.sleep(20)
        assert agreement_of(a).view is None, "its founding has come to nothing"
        assert participant_of(a).membership.founds
        swarm.kill(b)
        swarm.kill(c)
        swarm.mend(a, c)
        swarm.start(b)
        swarm.start(c)
        await swarm.until(are_in_views_of([a], 3), "it founds", 180)

    play(SEED, folder / "world", scene)


def _joiners_of(peer: Peer) -> set[str]:
    return {joiner.peer_id for joiner in agreement_of(peer).joiners}


def one_accuses_another_member_each_time(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """Once all are back. Of the agreement alone, which hears the same words from daemons."""
    fellows = Fellows("abcd", "a", 1, wait_for_all=True)
    fellows.world.run_to(2 * WATCHED_NS)
    assert len(fellows.out_ever) == 1, "no second honest member goes"
