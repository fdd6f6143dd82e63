"""Who joins late learns from the others' transcripts, which prove it, who computed the steps before
it came."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.commit.shares import Tallies
from p2p_dtfm.daemon.proof import of_others
from p2p_dtfm.daemon.telemetry.contribution import FILE, Kept
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play

STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of minutes is over before others are asked in their own time."""
    monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.5)
    monkeypatch.setattr(of_others, "PIECE_EVERY_S", 0.01)


def kept(peer: Peer) -> Kept:
    (path,) = peer.home.glob(f"runs/*/{FILE}")
    return msgspec.json.decode(path.read_bytes(), type=Kept)


def tallies(peer: Peer) -> Tallies:
    return kept(peer).tallies


async def both_end(swarm: Swarm, run: Path, **founders: object) -> tuple[Peer, Peer]:
    """A founder alone for ten steps, and then one that joins it."""
    first = swarm.peer("first", run=str(run), **founders)
    late = swarm.peer("late", initial_peers=(swarm.address(first),))
    swarm.start(first)
    await swarm.until(lambda: first.step() >= 10, "ten steps of one", 120)
    swarm.start(late)
    await swarm.until(lambda: not (first.is_running or late.is_running), "the end", 300)
    for peer in (first, late):
        assert peer.ended is not None and peer.ended.result() == 0, peer.standing()
    assert min(late.losses()) >= 10, "it has seen none of these steps"
    return first, late


def test_a_joiners_board_is_the_founders(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        first, late = await both_end(swarm, run)
        assert tallies(first).step_count == tallies(late).step_count == STEPS
        assert tallies(first).board() == tallies(late).board()
        assert set(tallies(late).board()) == {first.peer_id, late.peer_id}

    play(1, tmp_path / "world", scene)


def test_who_keeps_no_transcript_gives_none(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        first, late = await both_end(swarm, run, transcript_mib=0)
        assert tallies(first).step_count == STEPS
        assert tallies(late).step_count == len(late.losses()) < STEPS

    play(1, tmp_path / "world", scene)
