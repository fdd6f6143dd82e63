"""Real daemons in virtual time: they train through a kill, and all follows from the seed."""

import asyncio
import gc
import math
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.commit.shares import Tallies
from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.daemon.telemetry.contribution import FILE, KeptTallies
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Reference, require_safe_steps_stay
from p2p_dtfm.testbed.virtual.seeds.one_seed import play_seed
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.swarm import NeverHappened, Swarm, play
from p2p_dtfm.train.model.gpt import layer_count

STEPS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture(scope="module")
def reference(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of(run, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("lived_s", [0.0, 1.0], ids=["killed at once", "killed later"])
def test_nothing_of_a_world_is_left_once_it_has_ended(
    lived_s: float, run: Path, tmp_path: Path
) -> None:
    """A daemon killed before its first turn went on hearing warnings of later worlds, and kept its
    own. After 2,500 seeds a third of the time went into collections."""
    worlds: list[weakref.ref[Swarm]] = []

    async def scene(swarm: Swarm) -> None:
        peer = swarm.peer("first", run=str(run), expect_peers=1)
        swarm.start(peer)
        worlds.append(weakref.ref(swarm))
        if lived_s:
            await asyncio.sleep(lived_s)
        swarm.kill(peer)

    play(1, tmp_path, scene)
    gc.collect()
    assert [world() for world in worlds] == [None]


def test_two_go_on_without_the_third_and_it_comes_back(
    run: Path, reference: Reference, tmp_path: Path
) -> None:
    async def scene(swarm: Swarm) -> None:
        first = swarm.peer("first", run=str(run), expect_peers=3)
        others = [
            swarm.peer(name, initial_peers=(swarm.address(first),)) for name in ("second", "third")
        ]
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in others:
            swarm.start(peer)
        await swarm.until(lambda: first.step() >= 4, "five steps of three", 120)
        assert len(_views(first)[-1]) == 3
        swarm.kill(others[0])
        at_kill = first.step()
        await swarm.until(lambda: first.step() >= at_kill + 3, "two go on", 60)
        assert len(_views(first)[-1]) == 2
        swarm.start(others[0])
        await swarm.until(
            lambda: not any(peer.is_running for peer in swarm.peers), "they end with the run", 300
        )
        assert len(_views(first)[-1]) == 3, "it was let in again"
        require_safe_steps_stay(swarm.peers)
        for peer in swarm.peers:
            assert peer.ended is not None and peer.ended.result() == 0, peer.standing()
            assert not peer.failures()
            _require_each_step_in_its_view(peer)
            for step, loss in peer.losses().items():
                assert math.isclose(loss, reference.losses[step], rel_tol=1e-4)
        boards = [_tallies(peer) for peer in (first, others[1])]
        assert boards[0].step_count == STEPS and boards[0].board() == boards[1].board()
        spec = read_run_spec(str(run))
        assert sum(boards[0].board().values()) == STEPS * spec.tokens_per_step * layer_count(spec)
        assert len(first.losses()) == len(others[1].losses()) == STEPS
        assert at_kill <= len(others[0].losses()) < STEPS, "others took those while it was gone"
        for peer in (first, others[1]):
            course = _kept(peer).course
            assert course.losses == 1, "one kill is one loss, and leaving at the end is none"
            assert course.began_s is not None and course.ended_s is not None
            assert course.began_s < course.ended_s

    play(1, tmp_path / "world", scene)


def test_who_leaves_is_not_lost(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        first = swarm.peer("first", run=str(run), expect_peers=3)
        others = [swarm.peer(name, initial_peers=(swarm.address(first),)) for name in "bc"]
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in others:
            swarm.start(peer)
        await swarm.until(lambda: first.step() >= 4, "five steps of three", 120)
        swarm.leave(others[0])
        await swarm.until(lambda: len(_views(first)[-1]) == 2, "it has left", 60)
        await swarm.until(lambda: not any(it.is_running for it in swarm.peers), "the end", 300)
        assert [_kept(peer).course.losses for peer in (first, others[1])] == [0, 0]

    play(1, tmp_path / "world", scene)


def test_who_is_killed_as_it_comes_back_from_a_pause_leaves_its_home_to_the_next(
    run: Path, tmp_path: Path
) -> None:
    async def scene(swarm: Swarm) -> None:
        swarm.stays_resident = True
        peer = swarm.peer("a", run=str(run))
        swarm.start(peer)
        await swarm.until(lambda: peer.has_run, "the run is founded", 60)
        swarm.leave(peer)
        await swarm.until(lambda: peer.is_away, "it is away", 60)
        swarm.come_back(peer)
        while peer.is_away:
            await asyncio.sleep(0)
        swarm.kill(peer)
        swarm.start(peer)
        await swarm.until(lambda: not peer.is_running, "it trains to the end", 120)
        assert peer.ended is not None and peer.ended.result() == 0

    play(0, tmp_path, scene)


def test_who_is_killed_while_it_is_paused_drops_what_came_without_a_word(
    run: Path, tmp_path: Path
) -> None:
    """Each call that comes is a task of its own, which has had no turn yet."""

    async def scene(swarm: Swarm) -> None:
        peer = swarm.peer("one", run=str(run))
        swarm.start(peer)
        await swarm.until(lambda: peer.has_run, "the run is founded", 60)
        swarm.pause(peer)
        assert peer.process is not None
        peer.process.begin(asyncio.sleep(1.0))
        await asyncio.sleep(0.1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            swarm.kill(peer)
        assert not [str(it.message) for it in said]

    play(1, tmp_path, scene)


def test_who_was_done_trains_again_when_a_failure_costs_the_last_steps(
    run: Path, tmp_path: Path
) -> None:
    """Guardians lag here, so the layers that the killed peer alone had are lost with it."""

    async def scene(swarm: Swarm) -> None:
        stays = {"exit_when_done": False}
        first = swarm.peer("first", run=str(run), expect_peers=3, **stays)
        others = [swarm.peer(name, initial_peers=(swarm.address(first),), **stays) for name in "bc"]
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in others:
            swarm.start(peer)
        left = [first, others[0]]
        await swarm.until(lambda: others[1].step() == STEPS - 1, "the last step", 120)
        swarm.kill(others[1])
        await swarm.until(lambda: len(_views(first)[-1]) == 2, "a view of two", 60)
        assert first.told_step() < STEPS, "nothing was lost: this shows nothing"
        await swarm.until(
            lambda: all(peer.standing().startswith("done") for peer in left), "done again", 120
        )

    play(1, tmp_path / "world", scene)


def test_who_is_welcomed_and_then_comes_too_late_is_told_that_the_run_is_complete(
    run: Path, tmp_path: Path
) -> None:
    """No further step happens with which a view could let it in."""

    async def scene(swarm: Swarm) -> None:
        stays = {"exit_when_done": False}
        first = swarm.peer("first", run=str(run), **stays)
        late = swarm.peer("late", initial_peers=(swarm.address(first),), **stays)
        swarm.start(first)
        await swarm.until(lambda: first.step() >= STEPS // 2, "half of the run", 120)
        swarm.start(late)
        await swarm.until(lambda: late.has_run, "it is welcomed", 60)
        swarm.cut(first, late)
        await swarm.until(lambda: first.standing().startswith("done"), "done", 120)
        swarm.mend(first, late)
        await swarm.until(lambda: not late.is_running, "it ends", 60)
        assert late.ended is not None
        assert isinstance(late.ended.exception(), RunComplete)

    play(1, tmp_path / "world", scene)


def _require_each_step_in_its_view(peer: Peer) -> None:
    """The last step before a planned view is noted once that view has taken over."""
    views: list[dict[str, int]] = []
    for event in peer.events():
        if event["event"] == "view":
            views.append(event)
        elif event["event"] == "step":
            assert event["view"] == max(it["view"] for it in views if it["step"] <= event["step"])


def _tallies(peer: Peer) -> Tallies:
    """The tallies of work that this peer has on its disk."""
    return _kept(peer).tallies


def _kept(peer: Peer) -> KeptTallies:
    (path,) = peer.home.glob(f"runs/*/{FILE}")
    return msgspec.json.decode(path.read_bytes(), type=KeptTallies)


def _views(peer: Peer) -> list[list[str]]:
    return [event["members"] for event in peer.events() if event["event"] == "view"]


def test_the_same_seed_gives_the_same_trace_in_another_process(run: Path, tmp_path: Path) -> None:
    """In the other process neither addresses nor the order of sets are alike. One peer leaves, and
    closes all lanes."""
    leaves, cut = Fault(4.0, 3.0, "leave", ("c",), 0.0), Fault(5.0, 1.0, "cut", ("a", "b"), 0.0)
    schedule = Schedule(("a", "b", "c"), (), (leaves, cut))
    here = play_seed(1, schedule, run, tmp_path / "here", None)
    program = (
        "import sys; from pathlib import Path; "
        "from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule; "
        "from p2p_dtfm.testbed.virtual.seeds.one_seed import play_seed; "
        "run, home = map(Path, sys.argv[1:]); "
        f"played = play_seed(1, {schedule!r}, run, home, None); "
        "print(played.digest)"
    )
    hashes = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    arguments = [str(run), str(tmp_path / "there")]
    there = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONHASHSEED": hashes},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert there.returncode == 0, there.stderr
    assert here.faults == 2, here.done
    assert there.stdout.strip() == here.digest


def test_a_wait_that_never_ends_is_told_with_who_waits_for_what(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        swarm.start(swarm.peer("alone", run=str(run), expect_peers=2, expect_wait_s=1e6))
        await swarm.until(lambda: False, "somebody comes", 30)

    with pytest.raises(NeverHappened, match="alone: waiting: 1 of 2 expected peers are here"):
        play(1, tmp_path / "world", scene)
