"""A disk that is too small for the whole model keeps this peer's own layers. It is not filled with
what it cannot take."""

import asyncio
import contextvars
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from p2p_dtfm.daemon.machine import disk as disk_limit
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints import checkpoints as checkpoint_files
from p2p_dtfm.daemon.state_transfer.checkpoints import disk_room
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.checkpoints.files_here import ASKED_S, SAVED_TOLD
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.ports import disk, now
from p2p_dtfm.train.model.checkpoint import checkpoint_directory, list_checkpoints
from p2p_dtfm.train.model.layer_state import state_bytes_limit
from tests.daemon.test_saved_states import LINEAGE, SPEC, _FromAnother, _Slow, _states
from tests.daemon.trainer_parts import NO_BLOBS

STEP = 4
EVERY = set(range(SPEC.model.layer_count))
MODEL_BYTES = sum(state_bytes_limit(SPEC, layer) for layer in EVERY)
LAST = SPEC.total_steps
NEEDED_BYTES = (
    MODEL_BYTES
    - state_bytes_limit(SPEC, 0)
    + max(state_bytes_limit(SPEC, layer) for layer in EVERY - {0})
)
"""Room for all layers but the first one, and for the largest of them twice."""


class _SmallDisk(disk.MachineDisk):
    def __init__(self, room_bytes: int, takes_files: bool = True) -> None:
        self.room_bytes, self.takes_files = room_bytes, takes_files

    def free_bytes(self, directory: Path) -> int:
        return self.room_bytes

    def write(self, file: BinaryIO, payload: disk.Payload) -> None:
        if not self.takes_files:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        super().write(file, payload)


class _Counting(_FromAnother):
    def __init__(self, *theirs: Path) -> None:
        super().__init__(*theirs)
        self.asked = 0

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        self.asked += 1
        with target.with_suffix(".begun").open("wb") as file:
            disk.write(file, b"")
        target.with_suffix(".begun").unlink()
        return await super().fetch(digest, peers, target, max_bytes)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


def _in_world(scenario: Callable[[Compute], Any]) -> None:
    compute = Compute()
    contextvars.copy_context().run(asyncio.run, scenario(compute))
    compute.close()


@pytest.mark.parametrize("takes_files", [True, False])
def test_a_disk_without_room_for_the_model_is_not_filled_with_it_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    takes_files: bool,
) -> None:
    """Each layer was fetched until the disk was full, and then again, every thirty seconds. A disk
    under a quota says that it has room, and takes nothing."""
    for name in ("RETRY_S", "LONGEST_REST_S"):
        monkeypatch.setattr(checkpoint_files, name, 0.01)
    monkeypatch.setattr(disk_room, "FIRST_REST_S", 0.1)
    told: list[CheckpointFiles] = []
    mine, theirs, troubles = tmp_path / "mine", tmp_path / "theirs", Troubles()

    async def scenario(compute: Compute) -> None:
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(STEP, _states(STEP, EVERY), LINEAGE)
        own_bytes = state_bytes_limit(SPEC, 0)
        small = _SmallDisk(MODEL_BYTES if takes_files else 10 * MODEL_BYTES, takes_files)
        disk.live_by(small)
        blobs: Any = _Counting(theirs)
        member = Checkpoints(mine, SPEC, blobs, compute, lambda files: None, lambda: True, troubles)
        member.committed(STEP, {}, LINEAGE)
        await member.save(STEP, _states(STEP, {0}), LINEAGE)
        member.remote_files("other", told[0])
        await asyncio.sleep(1.0)
        assert blobs.asked <= (0 if takes_files else 5), "each time it is asked more rarely"
        ((what, fix),) = troubles.present()
        assert "whole model" in what and str(mine) in fix
        assert len([line for line in caplog.messages if "whole model" in line]) == 1
        assert [set(it.layers) for it in member.saved] == [{0}]
        largest = max(state_bytes_limit(SPEC, layer) for layer in EVERY - {0})
        small.room_bytes, small.takes_files = MODEL_BYTES + largest, True
        assert own_bytes + (MODEL_BYTES - own_bytes) + largest == small.room_bytes, "just enough"
        await _until(lambda: member.whole_step == STEP)
        await _until(lambda: not troubles.present())
        await member.close()
        await other.close()

    _in_world(scenario)


def test_of_what_never_becomes_whole_the_newest_stay_and_the_fullest(tmp_path: Path) -> None:
    """Nothing was removed before one checkpoint was whole: the disk became full of the peer's own
    layers."""

    async def scenario(compute: Compute) -> None:
        member = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
        whole, torn = (1, 2, 3), checkpoint_directory(tmp_path, 5)
        for step in range(1, 20):
            member.committed(step, {}, LINEAGE)
            torn.mkdir(exist_ok=True)
            await member.save(step, _states(step, EVERY if step in whole else {0}), LINEAGE)
        told = [it.version for it in member.saved]
        assert told == [19, 18, 17, 16, 3] and len(told) == SAVED_TOLD + 1
        found = [it.manifest.step for it in list_checkpoints(tmp_path)]
        assert found == [*told, 2], "as many whole ones as the run keeps"
        assert not torn.exists()
        await member.close()

    _in_world(scenario)


def test_under_a_limit_what_was_given_up_takes_no_place_from_what_is_saved_now(
    tmp_path: Path,
) -> None:
    """The highest steps stayed, and they were of a side that was given up. What was saved since
    went at once, whole or not, until training had come as far again."""
    run, lineages = tmp_path / "runs" / "mine", {95: "of both", 100: "side b", 110: "side b"}

    def left() -> list[tuple[int, str]]:
        disk_limit.trim(tmp_path, run, 1, member.in_use())
        found = list_checkpoints(run / "checkpoints")
        return [(it.manifest.step, it.manifest.lineage) for it in found]

    async def scenario(compute: Compute) -> None:
        nonlocal member
        nobody: Any = NO_BLOBS
        root = run / "checkpoints"
        run.mkdir(parents=True)
        member = Checkpoints(root, SPEC, nobody, compute, lambda files: None, lambda: True)
        for step in (90, 105, 115, 120):
            await member.save(step, _states(step, EVERY), "side a")
        assert [step for step, _ in left()] == [120, 115]
        member.goes_on_from(95, lineages.get)
        await member.save(100, _states(100, {0}), lineages[100])
        assert (100, "side b") in left()
        await member.save(100, _states(100, EVERY), lineages[100])
        assert (100, "side b") in left() and member.whole_step == 100
        await member.save(110, _states(110, {0}), lineages[110])
        assert {(110, "side b"), (100, "side b")} <= {*left()}, "the newest, and the newest whole"
        await member.close()

    member: Any = None
    _in_world(scenario)


def test_what_others_fetch_from_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch takes longer than four checkpoints where the model is large, or where steps are
    short."""

    class _Later(now.MachineClock):
        late_ns = 0

        def monotonic_ns(self) -> int:
            return super().monotonic_ns() + self.late_ns

    clock, told = _Later(), list[CheckpointFiles]()

    async def scenario(compute: Compute) -> None:
        now.live_by(clock)
        member = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        for step in range(1, 10):
            await member.save(step, _states(step, {0}), LINEAGE)
            assert member.path_of(told[0].files[0][0]) is not None
        assert [it.manifest.step for it in list_checkpoints(tmp_path)] == [9, 8, 7, 6, 1]
        clock.late_ns = int((ASKED_S + 1) * 1e9)
        await member.save(10, _states(10, {0}), LINEAGE)
        assert member.path_of(told[0].files[0][0]) is None
        await member.close()

    _in_world(scenario)


def test_what_is_fetched_just_now_stays(tmp_path: Path) -> None:
    told: list[CheckpointFiles] = []
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"

    async def scenario(compute: Compute) -> None:
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(STEP, _states(STEP, EVERY), LINEAGE)
        slow: Any = _Slow(theirs)
        member = Checkpoints(mine, SPEC, slow, compute, lambda files: None, lambda: True)
        member.committed(STEP, {}, LINEAGE)
        await member.save(STEP, _states(STEP, {0}), LINEAGE)
        member.remote_files("other", told[0])
        await _until(slow.asked.is_set)
        for step in range(STEP + 1, STEP + 10):
            await member.save(step, _states(step, {0}), LINEAGE)
        slow.gives.set()
        await _until(lambda: member.whole_step == STEP)
        await member.close()
        await other.close()

    _in_world(scenario)


def test_a_disk_that_takes_no_checkpoint_is_cleared_of_old_ones(tmp_path: Path) -> None:
    """The disk would stay full, as only a checkpoint that was written made room."""

    async def scenario(compute: Compute) -> None:
        class _Full(disk.MachineDisk):
            def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        member = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
        for step in range(1, 8):
            await member._saved(step, list(_states(step, {0}).values()), LINEAGE)
        disk.live_by(_Full())
        await member.save(8, _states(8, {0}), LINEAGE)
        assert [it.manifest.step for it in list_checkpoints(tmp_path)] == [7, 6, 5, 4]
        await member.close()

    _in_world(scenario)


class _Filling(disk.MachineDisk):
    """A disk of `all_bytes`, less what lies below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.all_bytes = root, 1 << 40

    def free_bytes(self, directory: Path) -> int:
        return self.all_bytes - _bytes_in(self.root)


def _bytes_in(root: Path) -> int:
    return sum(it.stat().st_size for it in root.rglob("*") if it.is_file())


def _is_whole(member: Checkpoints) -> bool:
    return member.whole_step == LAST


def _last_steps(
    root: Path,
    steps: dict[int, set[int]],
    all_bytes: Callable[[], int],
    until: Callable[[Any], bool],
) -> list[int]:
    """Which steps are on the disk of a member in the end that saves these layers of them, and wants
    the whole model of the last one."""
    told: list[CheckpointFiles] = []
    found: list[int] = []
    mine, theirs, last = root / "mine", root / "theirs", SPEC.total_steps

    async def scenario(compute: Compute) -> None:
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(last, _states(last, EVERY), LINEAGE)
        disk.live_by(filling := _Filling(mine))
        blobs: Any = _FromAnother(theirs)
        member = Checkpoints(mine, SPEC, blobs, compute, lambda files: None, lambda: True)
        for step, layers in steps.items():
            await member.save(step, _states(step, layers), LINEAGE)
        filling.all_bytes = all_bytes()
        member.committed(last, {}, LINEAGE)
        member.remote_files("other", told[0])
        await _until(lambda: until(member))
        found.extend(it.manifest.step for it in list_checkpoints(mine))
        await member.close()
        await other.close()

    _in_world(scenario)
    return found


@pytest.mark.parametrize("between", [(), (15, 16, 17, 18)])
def test_for_the_last_model_an_older_whole_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: tuple[int, ...]
) -> None:
    """Older checkpoints went with the next save, and after the last step there is none. The last
    model was refused for ever, however many whole checkpoints were there."""
    monkeypatch.setattr(checkpoint_files, "RETRY_S", 0.01)
    steps = {5: EVERY, 10: EVERY, **{step: {0} for step in between}, LAST: {0}}

    def all_bytes() -> int:
        one_less = _bytes_in(checkpoint_directory(tmp_path / "mine", 5))
        return _bytes_in(tmp_path / "mine") - one_less + NEEDED_BYTES

    assert _last_steps(tmp_path, steps, all_bytes, _is_whole)[0] == LAST


def test_where_even_that_is_too_little_the_newest_whole_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "RETRY_S", 0.01)
    steps = {3: EVERY, 5: EVERY, 10: EVERY, LAST: {0}}

    def has_settled(member: Checkpoints) -> bool:
        return member.has_no_room(LAST) and len(list_checkpoints(tmp_path / "mine")) == 2

    assert _last_steps(tmp_path, steps, lambda: 0, has_settled) == [LAST, 10]


def test_after_the_last_step_no_room_is_kept_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for this peer's own layers had to stay free, for a checkpoint that never came."""
    monkeypatch.setattr(checkpoint_files, "RETRY_S", 0.01)

    def all_bytes() -> int:
        return _bytes_in(tmp_path / "mine") + NEEDED_BYTES

    assert _last_steps(tmp_path, {LAST: {0}}, all_bytes, _is_whole) == [LAST]
