"""A peer in no view that may not come back yet holds up nobody, and speaks of no failure. Its disk
takes no new life, or others have contradicted it."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.consensus.parts.gather.gathering import DISAGREEMENT_LIMIT_NS
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.testbed.virtual.wires.directory import VirtualDirectory
from tests.testbed.begun import agreement_of, are_in_views_of, begun

SEED = 1


async def _two_go_on(swarm: Swarm, run: Path) -> list[Peer]:
    """Three train, and two of them lose the third."""
    a, b, c = await begun(swarm, run, "abc")
    await swarm.until(lambda: a.step() >= 20, "steps", 120)
    swarm.cut(a, c)
    swarm.cut(b, c)
    await swarm.until(are_in_views_of([a, b], 2), "two go on", 60)
    return [a, b, c]


async def _is_outside_again(swarm: Swarm, a: Peer, b: Peer, c: Peer) -> None:
    swarm.mend(a, c)
    swarm.mend(b, c)
    await swarm.until(lambda: agreement_of(c).is_outside, "one is outside", 60)


async def _comes_back_alone(swarm: Swarm, a: Peer, b: Peer) -> None:
    swarm.kill(a)
    swarm.kill(b)
    swarm.start(a)
    await swarm.until(lambda: a.is_in_a_view, "it goes on alone", 150)


def test_who_comes_back_alone_does_not_wait_for_a_peer_that_is_in_no_view(tmp_path: Path) -> None:
    """The others had gone on without that peer, and its disk took no number of its next life. It
    went on saying that it lets others in, and heard no wish of theirs. Nobody trained until its
    owner made room."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await _two_go_on(swarm, run)
        c.disk.is_full = True
        await _is_outside_again(swarm, a, b, c)
        await swarm.until(lambda: "cannot be noted" in c.standing(), "its disk is full", 30)
        await _comes_back_alone(swarm, a, b)
        assert agreement_of(c).is_outside
        c.disk.is_full = False
        await swarm.until(are_in_views_of([a, c], 2), "the other is let in", 60)

    play(SEED, tmp_path / "world", scene)


def test_nor_for_one_that_waits_because_the_others_have_contradicted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one hears no wish either, for ten minutes and more, and said that it lets others in."""
    rejoin = Outsiders.rejoin

    def after_a_pause(self: Outsiders, reason: str, *rest: Any, **others: Any) -> Any:
        process = PROCESS.get()
        if process is not None and process.peer_name == "c":
            others["pause_ns"] = DISAGREEMENT_LIMIT_NS
        return rejoin(self, reason, *rest, **others)

    monkeypatch.setattr(Outsiders, "rejoin", after_a_pause)
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await _two_go_on(swarm, run)
        await _is_outside_again(swarm, a, b, c)
        await _comes_back_alone(swarm, a, b)
        assert agreement_of(c).is_outside

    play(SEED, tmp_path / "world", scene)


@pytest.mark.nightly
def test_who_is_in_no_view_publishes_no_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Onlookers were shown the plan that most peers said they are in. A peer that waited for room
    on its disk went on saying that it is in the one that the others had left."""
    published: dict[str, Any] = {}

    async def publish(self: VirtualDirectory, run_digest: str, record: Any, place: Any) -> bool:
        published[record.peer_id] = place
        return True

    monkeypatch.setattr(VirtualDirectory, "publish_facts", publish)
    run = make_run(tmp_path, 2000)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: published.get(c.peer_id) is not None, "it has a place", 120)
        swarm.cut(a, c)
        swarm.cut(b, c)
        await swarm.until(are_in_views_of([a, b], 2), "two go on", 60)
        c.disk.is_full = True
        swarm.mend(a, c)
        swarm.mend(b, c)
        await swarm.until(lambda: "cannot be noted" in c.standing(), "it is outside", 90)
        await swarm.until(lambda: published[c.peer_id] is None, "it says that it has no place", 60)

    play(SEED, tmp_path / "world", scene)
