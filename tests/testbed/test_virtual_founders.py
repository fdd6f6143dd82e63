"""Real daemons in virtual time: a founder comes back, at once, or while it cannot reach the members
that train on."""

import logging
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual import swarm as swarms
from p2p_dtfm.testbed.virtual.listening import listening
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import HOURS, Swarm, play
from tests.e2e.test_coming_back import assert_nothing_was_lost_or_counted_twice
from tests.testbed.begun import agreement_of, are_in_views_of, begun

SLOW = (10_000_000, 20_000_000)
"""With this the others take few steps while it waits, as steps cost processor time."""


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_a_killed_founder_finds_its_swarm(tmp_path: Path) -> None:
    """The founder uses the line with which it began the run, before the other member may have
    noticed. At night `tests/e2e/test_coming_back.py` has the same of processes."""
    run, said = make_run(tmp_path, 2000, saves_every_steps=10), _Said()

    async def scene(swarm: Swarm) -> None:
        founder, member = both = await begun(swarm, run, "ab")
        await swarm.until(lambda: min(it.step() for it in both) >= 20, "they train together", 60)
        swarm.kill(founder)
        seen = len(founder.events())

        def views() -> list[dict]:
            return [it for it in founder.events()[seen:] if it["event"] == "view"]

        with listening(said, logging.INFO):
            swarm.start(founder)
            await swarm.until(lambda: bool(views()), "a view", 60)
            await swarm.until(are_in_views_of(both, 2), "one swarm", 60)
            resumed = member.step()
            await swarm.until(lambda: min(it.step() for it in both) > resumed + 6, "steps", 60)
        assert len({agreement_of(it).view.id for it in both}) == 1
        assert all(len(event["members"]) == 2 for event in views()), "one swarm, and not two"
        assert said.texts and not [it for it in said.texts if "goes on from the checkpoint" in it]
        assert_nothing_was_lost_or_counted_twice(member, founder)

    play(1, tmp_path / "world", scene)


@pytest.mark.parametrize("waits_for", ["waits 15 s at most", "expected peers are here"])
def test_a_founder_that_finds_nobody_at_first_goes_on_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """The founder looked once, and waited a minute for its former fellows, though all were in reach
    again. Then it trained alone, from older states, until it met them by chance (seed 500505)."""
    monkeypatch.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        founder, *others = await begun(swarm, run, "abc")
        await swarm.until(lambda: founder.step() >= 20, "steps", 120)
        swarm.kill(founder)
        for other in others:
            swarm.cut(founder, other)
        await swarm.until(are_in_views_of(others, 2), "the others go on", 60)
        swarm.start(founder)
        await swarm.until(lambda: waits_for in founder.standing(), "it finds nobody", 60)
        for other in others:
            swarm.mend(founder, other)
        await swarm.until(are_in_views_of(others, 3), "it is let in", 30)
        views = [event for event in founder.events() if event["event"] == "view"]
        assert all(len(event["members"]) > 1 for event in views), "it has trained with them alone"

    play(1, tmp_path / "world", scene)


@pytest.mark.parametrize("is_told_of_peers", [False, True])
def test_a_founder_that_has_paused_goes_on_with_its_run_whatever_became_of_the_file(
    tmp_path: Path, is_told_of_peers: bool
) -> None:
    """The file was read again in the evening: a founder who had changed it founded another run at
    step 0. Nobody else is left, and the founder was told of a peer that is no member, such as a
    bootstrap node."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        swarm.stays_resident = swarm.are_equal = swarm.network.links.are_near = True
        node = swarm.peer("node", run=str(run))
        told_of = {"initial_peers": (swarm.address(node),)} if is_told_of_peers else {}
        if is_told_of_peers:
            swarm.start(node)
            await swarm.until(lambda: node.has_run, "somebody to be told of", 60)
        founder = swarm.peer("a", run=str(run), hours=HOURS, new=True, **told_of)
        swarm.start(founder)
        await swarm.until(lambda: founder.step() >= 12, "it trains", 120)
        assert founder.daemon is not None
        began = founder.daemon.run_digest
        swarm.set_hours(founder, are_over=True)
        await swarm.until(lambda: founder.is_away, "it is away", 60)
        run.unlink()
        left_at = founder.step()
        swarm.set_hours(founder, are_over=False)
        await swarm.until(lambda: founder.step() > left_at + 3, "it goes on", 120)
        assert founder.daemon.run_digest == began
        newcomer = swarm.peer("b", initial_peers=(swarm.address(founder),))
        swarm.start(newcomer)
        await swarm.until(lambda: newcomer.has_run, "others find it", 60)
        await swarm.until(are_in_views_of([founder, newcomer], 2), "others join it", 60)

    play(1, tmp_path / "world", scene)
