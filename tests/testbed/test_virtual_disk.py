"""Virtual disks: slow, full, cut off in the middle, and those that lie; clocks that are set."""

import asyncio
import errno
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.ports import disk, now
from p2p_dtfm.testbed.virtual.disk import LASTS_AFTER_NS, VirtualDisk
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process

BEFORE, AFTER = b"before", b"after, and longer"


def in_world(scene: Callable[[VirtualLoop, VirtualDisk], Awaitable[Any]]) -> Any:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_run(loop, scene))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _run(
    loop: VirtualLoop, scene: Callable[[VirtualLoop, VirtualDisk], Awaitable[Any]]
) -> Any:
    return await scene(loop, VirtualDisk(loop))


def process_of(loop: VirtualLoop, of: VirtualDisk) -> Process:
    return Process("one", loop, random.Random(1), of)


def test_a_full_disk_refuses_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"

    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        async def write() -> None:
            disk.write_whole(path, BEFORE)
            assert disk.free_bytes(tmp_path) > 0
            of.is_full = True
            assert disk.free_bytes(tmp_path) == 0
            with pytest.raises(OSError) as refused:
                disk.write_whole(path, AFTER)
            assert refused.value.errno == errno.ENOSPC
            with pytest.raises(OSError):
                disk.append(path, "more")

        await process_of(loop, of).begin(write())

    in_world(scene)
    assert path.read_bytes() == BEFORE


def test_a_slow_disk_holds_up_its_job_and_in_the_event_loop_all_the_daemon(tmp_path: Path) -> None:
    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        turns: list[float] = []

        async def tick() -> None:
            for _ in range(100):
                await asyncio.sleep(0.01)
                turns.append(now.monotonic_s())

        async def write() -> None:
            began_s = now.monotonic_s()
            await asyncio.to_thread(disk.write_whole, tmp_path / "beside", AFTER)
            assert 0.15 < now.monotonic_s() - began_s < 0.2
            disk.write_whole(tmp_path / "in the loop", AFTER)
            await asyncio.sleep(0)

        of.is_slow = True
        process = process_of(loop, of)
        await asyncio.gather(process.begin(tick()), process.begin(write()))
        gaps = sorted(later - sooner for sooner, later in itertools.pairwise(turns))
        assert gaps[-1] > 0.14, "its event loop stood still"
        assert gaps[-2] < 0.02, "and only once: a thread holds nobody up"

    in_world(scene)


def test_a_kill_undoes_what_was_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "file"

    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        async def write() -> None:
            await asyncio.to_thread(disk.write_whole, path, BEFORE)
            of.is_slow = True
            await asyncio.to_thread(disk.write_whole, path, AFTER)

        process = process_of(loop, of)
        process.begin(write())
        await asyncio.sleep(0.05)
        assert path.read_bytes() == AFTER
        process.kill()
        of.process_was_killed()

    in_world(scene)
    assert path.read_bytes() == BEFORE
    assert path.with_name("file.partial").read_bytes() == AFTER[: len(AFTER) // 2]


def test_a_power_cut_takes_names_that_were_not_forced_but_never_half_a_file(
    tmp_path: Path,
) -> None:
    path, seen = tmp_path / "file", set()

    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        async def write(content: bytes) -> None:
            disk.write_whole(path, content)

        for number in range(20):
            path.unlink(missing_ok=True)
            process = process_of(loop, of)
            await process.begin(write(BEFORE))
            await asyncio.sleep(2 * LASTS_AFTER_NS / 1e9)
            await process.begin(write(AFTER))
            of.power_was_cut(random.Random(number))
            seen.add(path.read_bytes())

    in_world(scene)
    assert seen == {BEFORE, AFTER}


def test_what_was_forced_to_the_disk_outlives_a_power_cut_unless_the_disk_lies(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"

    def after_power_cuts(lies: bool) -> set[bytes]:
        async def scene(loop: VirtualLoop, of: VirtualDisk) -> set[bytes]:
            async def write() -> None:
                disk.write_whole(path, AFTER)
                disk.sync_directory(tmp_path)

            of.lies = lies
            found = set()
            for number in range(20):
                path.write_bytes(BEFORE)
                await process_of(loop, of).begin(write())
                of.power_was_cut(random.Random(number))
                found.add(path.read_bytes())
            return found

        result: set[bytes] = in_world(scene)
        return result

    assert after_power_cuts(lies=False) == {AFTER}
    assert after_power_cuts(lies=True) == {BEFORE, AFTER[: len(AFTER) // 2]}


def test_a_wall_clock_is_set_and_the_other_goes_on() -> None:
    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        process = process_of(loop, of)
        before_ns, wall_ns = process.monotonic_ns(), process.wall_ns()
        process.wall_ahead_ns = -3600 * 10**9
        assert process.monotonic_ns() == process.awake_or_asleep_ns() == before_ns
        assert process.wall_ns() == wall_ns - 3600 * 10**9

    in_world(scene)


def test_this_machines_disk_writes_whole_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    disk.write_whole(path, BEFORE, disk.ONLY_OWNER)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        disk.write_whole(path, AFTER)
    assert path.read_bytes() == BEFORE
    assert list(tmp_path.iterdir()) == [path]


def test_a_life_is_never_lower_though_the_clock_was_ahead_and_then_the_power_was_cut(
    tmp_path: Path,
) -> None:
    """Others had heard of the higher life: they took this peer for a copy of itself (500811)."""

    async def scene(loop: VirtualLoop, of: VirtualDisk) -> None:
        lives: list[int] = []

        async def begin() -> None:
            lives.append(Home(tmp_path).next_life())

        first, second = process_of(loop, of), process_of(loop, of)
        first.wall_ahead_ns = 3600 * 10**9
        await first.begin(begin())
        of.power_was_cut(random.Random(1))
        await second.begin(begin())
        assert lives[0] < lives[1]

    in_world(scene)
