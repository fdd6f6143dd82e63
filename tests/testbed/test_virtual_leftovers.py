"""What a process was writing when it was killed goes as its home is used again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import list_checkpoints

SEED = 1
NAMES = (".fetched-1.partial.x7k2", "fetched-1.partial", "layer-0001.safetensors.partial")
"""A layer on its way here, one that has come, and one that is written."""


def test_who_is_killed_in_the_middle_of_a_checkpoint_leaves_no_part_of_it_for_good(
    tmp_path: Path,
) -> None:
    """Each kill left up to a layer under a name of its own, beside the run's last model for ever.
    A daemon that was killed again and again filled its disk with them."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> list[str]:
        a = swarm.peer("a", run=str(run))
        swarm.start(a)
        await swarm.until(lambda: a.step() >= 10, "a checkpoint", 60)
        (root,) = a.home.glob("runs/*/checkpoints")
        swarm.kill(a)
        newest = list_checkpoints(root)[0].directory
        for name in NAMES:
            (newest / name).write_bytes(b"half")
        swarm.start(a)
        await swarm.until(lambda: a.has_run, "it is back", 60)
        return [path.name for path in newest.iterdir() if path.name in NAMES]

    assert play(SEED, tmp_path / "world", scene) == []


def test_what_does_not_go_keeps_nobody_from_its_run(tmp_path: Path) -> None:
    """In a home on another machine's disk a removed file that some program has open stays under a
    hidden name, which cannot be removed; and tools leave hidden folders. Neither is of a daemon.
    With one of them among its data a daemon ended at each start, with `Is a directory`."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> list[str]:
        a = swarm.peer("a", run=str(run))
        swarm.start(a)
        await swarm.until(lambda: a.step() >= 2, "it trains", 60)
        (blobs,) = a.home.glob("runs/*/blobs")
        swarm.kill(a)
        (blobs / ".Trash-1000").mkdir()
        (blobs / ".half").write_bytes(b"half")
        swarm.start(a)
        await swarm.until(lambda: a.has_run, "it is back", 60)
        return [path.name for path in blobs.glob(".*")]

    assert play(SEED, tmp_path / "world", scene) == [".Trash-1000"]


def test_a_home_that_is_moved_away_is_not_made_anew(tmp_path: Path) -> None:
    """Who moved a home while its daemon ran found another one at the old place: with checkpoints,
    and without an identity. There the next start was another peer; the moved one went back."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> tuple[bool, dict[str, Any]]:
        a = swarm.peer("a", run=str(run))
        b = swarm.peer("b", initial_peers=(swarm.address(a),))
        swarm.start(a)
        swarm.start(b)
        await swarm.until(lambda: a.step() >= 10 and b.step() >= 10, "a checkpoint", 60)
        b.home.rename(tmp_path / "moved")
        step = a.step()
        await swarm.until(lambda: a.step() >= step + 60, "the other one trains on", 60)
        assert b.daemon is not None
        told = b.daemon.status_json()
        exists = b.home.exists()
        (tmp_path / "moved").rename(b.home)
        step = a.step()
        await swarm.until(lambda: b.step() >= step + 20, "it trains again", 60)
        return exists, told

    exists, told = play(SEED, tmp_path / "world", scene)
    assert not exists and told["problems"]
    assert "No such file or directory" in told["reason"]


@pytest.mark.parametrize("founds", [False, True])
def test_nor_is_it_made_anew_by_who_pauses_meanwhile(tmp_path: Path, founds: bool) -> None:
    """It held a new home with an identity of its own there, and came back as another peer. The
    moved one no longer went back to its place."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> tuple[bool, BaseException | None]:
        swarm.stays_resident = True
        a = swarm.peer("a", run=str(run))
        b = swarm.peer("b", initial_peers=(swarm.address(a),))
        swarm.start(a)
        swarm.start(b)
        await swarm.until(lambda: a.step() >= 10 and b.step() >= 10, "a checkpoint", 60)
        one = a if founds else b
        one.home.rename(tmp_path / "moved")
        swarm.leave(one)
        await swarm.until(lambda: one.is_away or not one.is_running, "the pause", 120)
        exists = one.home.exists()
        assert one.ended is not None
        return exists, one.ended.exception() if one.ended.done() else None

    exists, error = play(SEED, tmp_path / "world", scene)
    assert not exists
    assert isinstance(error, UserError) and error.exit_code == UNREACHABLE, error


def test_nor_by_who_finds_its_members_only_after_it_was_moved(tmp_path: Path) -> None:
    """It waited for them in a home that it held, and made half a home once they were there. It goes
    on once the home is back."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> bool:
        a = swarm.peer("a", run=str(run))
        b = swarm.peer("b", initial_peers=(swarm.address(a),))
        swarm.start(a)
        swarm.start(b)
        await swarm.until(lambda: a.step() >= 10 and b.step() >= 10, "a checkpoint", 60)
        swarm.kill(a)
        swarm.kill(b)
        swarm.start(b)
        await asyncio.sleep(20)
        assert b.is_running and not b.has_run, "it waits for the other one"
        b.home.rename(tmp_path / "moved")
        swarm.start(a)
        await asyncio.sleep(60)
        exists = b.home.exists()
        if not exists:
            (tmp_path / "moved").rename(b.home)
            await swarm.until(lambda: b.is_in_a_view, "it is in again", 300)
        return exists

    assert not play(SEED, tmp_path / "world", scene)
