"""Real daemons in virtual time: a member is told to leave while the others have gone on without
it."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.daemon.machine.view_history import FILE_NAME, LIMIT_BYTES, ViewsFile
from p2p_dtfm.daemon.node.background import data_copies
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, are_in_views_of, begun


def test_who_is_alone_lets_in_those_that_are_about_to_come_and_then_leaves(tmp_path: Path) -> None:
    """The peer left at once, as nobody was in its view, and waited a minute for the newcomers to
    get what they asked for. They waited for a view that could not begin any more (seed 500541)."""
    run = make_run(tmp_path, 2000)

    async def scene(swarm: Swarm) -> None:
        (first,) = await begun(swarm, run, "a")
        await swarm.until(lambda: first.step() >= 10, "steps", 120)
        newcomer = swarm.peer("b", initial_peers=(swarm.address(first),))
        for here, there in ((first, newcomer), (newcomer, first)):  # so that it takes its time
            swarm.network.links.of(here.peer_id, there.peer_id).is_slow = True
        swarm.start(newcomer)
        await swarm.until(lambda: agreement_of(first).next_view is not None, "it is let in", 60)
        step = first.step()
        swarm.end(first)
        await swarm.until(lambda: not first.is_running, "it leaves", 40)
        await swarm.until(lambda: newcomer.step() > step, "the other goes on", 20)

    play(1, tmp_path / "world", scene)


def test_who_lacks_data_that_nobody_gives_leaves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view without the leaver takes over with a commit, which never came."""
    monkeypatch.setattr(data_copies, "DATA_KEPT_LIMIT_BYTES", 1)  # large ones are not copied
    run = make_run(tmp_path, 400, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        founder, first, second = await begun(swarm, run, "abc")
        for peer in (first, second):
            await swarm.until(lambda peer=peer: peer.has_run, "it takes part", 60)  # type: ignore[misc]
            swarm.network.links.of(founder.peer_id, peer.peer_id).bytes_per_s = 5_000
        await swarm.until(lambda: any(it["event"] == "view" for it in first.events()), "a view", 60)
        swarm.kill(founder)
        await swarm.until(are_in_views_of([first, second], 2), "they go on", 60)
        await swarm.until(lambda: "data shard" in first.standing(), "it lacks data", 60)
        swarm.end(first)
        await swarm.until(lambda: not first.is_running, "it leaves", 90)

    play(1, tmp_path / "world", scene)


def test_who_leaves_remembers_with_whom_the_run_goes_on(tmp_path: Path) -> None:
    """Otherwise the peer counts, as it comes back, as a member of a view that it knows to be
    over."""
    run = make_run(tmp_path, 2000)

    async def scene(swarm: Swarm) -> None:
        first, second, last = await begun(swarm, run, "abc")
        await swarm.until(lambda: last.step() >= 10, "steps", 120)
        swarm.leave(last)
        await swarm.until(lambda: not last.is_running, "it leaves", 60)
        (path,) = last.home.rglob(FILE_NAME)
        newest = decode(path.read_bytes(), ViewsFile, LIMIT_BYTES).views[-1]
        assert newest.peer_ids == {first.peer_id, second.peer_id}

    play(1, tmp_path / "world", scene)


def test_who_cannot_come_back_to_the_others_leaves_all_the_same(tmp_path: Path) -> None:
    """The peer's full disk took no next life, so it asked nobody to be let in. An order to leave
    was in vain: its view was still the one that the others had left it in."""
    run = make_run(tmp_path, 2000)

    async def scene(swarm: Swarm) -> None:
        *others, sleeper = await begun(swarm, run, "abc")
        await swarm.until(lambda: sleeper.step() >= 20, "steps", 120)
        swarm.pause(sleeper)
        await swarm.until(are_in_views_of(others, 2), "the others go on", 60)
        sleeper.disk.is_full = True
        swarm.resume(sleeper)
        is_told = lambda: "cannot be noted in the home" in sleeper.standing()  # noqa: E731
        await swarm.until(is_told, "it hears of that", 60)
        assert sleeper.daemon is not None and sleeper.daemon.status_api is not None
        told = sleeper.daemon.status_api.status_json()
        assert not told["members"] and told["view"] is None, "as on its page (seed 503743)"
        swarm.end(sleeper)
        await swarm.until(lambda: not sleeper.is_running, "it leaves", 20)

    play(1, tmp_path / "world", scene)


def test_who_wants_to_leave_and_finds_nobody_that_would_take_over_leaves(tmp_path: Path) -> None:
    """The peer asks to be let in, as the others may want what it has. It looked for them for a
    minute, also where all had left (seed 500499)."""
    run = make_run(tmp_path, 200)

    async def scene(swarm: Swarm) -> None:
        *others, sleeper = await begun(swarm, run, "abc")
        await swarm.until(lambda: sleeper.step() >= 20, "steps", 120)
        swarm.pause(sleeper)
        await swarm.until(are_in_views_of(others, 2), "the others go on", 60)
        swarm.end(sleeper)
        swarm.resume(sleeper)
        hears = lambda: not sleeper.is_running or agreement_of(sleeper).view is None  # noqa: E731
        await swarm.until(hears, "it hears of that", 60)
        for peer in others:
            swarm.kill(peer)
        await swarm.until(lambda: not sleeper.is_running, "it leaves", 15)

    play(1, tmp_path / "world", scene)
