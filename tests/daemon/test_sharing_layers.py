"""All members fetch the whole model at once, and each gives the others what it has got."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints import checkpoints as checkpoint_files
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from tests.daemon.test_saved_states import LINEAGE, SPEC, _FromAnother, _states
from tests.daemon.trainer_parts import NO_BLOBS

STEP = 4
EVERY = set(range(SPEC.model.layer_count))


class _Recording(_FromAnother):
    """`most`: as many files as come; then nothing comes any more."""

    def __init__(self, *theirs: Path, most: int = 100, denies: str = "") -> None:
        super().__init__(*theirs)
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.gives, self._most, self._denies = asyncio.Event(), most, denies

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        self.asked.append((digest, tuple(peers)))
        if digest == self._denies:
            raise BlobUnavailable(digest, {peer: "it has gone" for peer in peers})
        if len(self.asked) > self._most:
            await self.gives.wait()
        return await super().fetch(digest, peers, target, max_bytes)


def _member(root: Path, me: str, blobs: Any, compute: Compute) -> tuple[Checkpoints, list[Any]]:
    told: list[CheckpointFiles] = []
    member = Checkpoints(root, SPEC, blobs, compute, told.append, lambda: True)
    member.fetches.me = me
    member.committed(STEP, {}, LINEAGE)
    return member, told


async def _saved_by(root: Path, layers: set[int], compute: Compute) -> CheckpointFiles:
    told: list[CheckpointFiles] = []
    other = Checkpoints(root, SPEC, NO_BLOBS, compute, told.append, lambda: True)
    await other.save(STEP, _states(STEP, layers), LINEAGE)
    await other.close()
    return told[-1]


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


def test_members_begin_with_layers_that_differ_and_ask_the_donors_in_turn(tmp_path: Path) -> None:
    """All members took the first layer, from the same donor: the lines of all others were idle."""
    compute, theirs = Compute(), tmp_path / "theirs"

    async def scenario() -> None:
        files = await _saved_by(theirs, EVERY, compute)
        layers = {name: layer for layer, (name, _) in files.files.items()}
        first, donors = set(), set()
        for me in ("one", "two", "three", "four", "five", "six"):
            blobs = _Recording(theirs)
            member, _ = _member(tmp_path / me, me, blobs, compute)
            await member.save(STEP, _states(STEP, {0}), LINEAGE)
            for sender in ("some", "others"):
                member.remote_files(sender, files)
            await _until(lambda member=member: member.whole_step == STEP)
            assert {layers[name] for name, _ in blobs.asked} == EVERY - {0}, "each once"
            assert len(blobs.asked) == len(EVERY) - 1
            first.add(blobs.asked[0][0])
            donors |= {peers[0] for _, peers in blobs.asked}
            await member.close()
        assert len(first) > 1 and donors == {"some", "others"}

    asyncio.run(scenario())
    compute.close()


def test_what_fewest_have_comes_first(tmp_path: Path) -> None:
    compute, theirs = Compute(), tmp_path / "theirs"

    async def scenario() -> None:
        files = await _saved_by(theirs, EVERY, compute)
        blobs = _Recording(theirs)
        member, _ = _member(tmp_path / "mine", "me", blobs, compute)
        await member.save(STEP, _states(STEP, {0}), LINEAGE)
        rare = max(EVERY)
        most = {layer: file for layer, file in files.files.items() if layer != rare}
        for sender in ("some", "others"):
            member.remote_files(sender, CheckpointFiles(STEP, LINEAGE, most))
        member.remote_files("lone", files)
        await _until(lambda: member.whole_step == STEP)
        assert blobs.asked[0] == (files.files[rare][0], ("lone",))
        await member.close()

    asyncio.run(scenario())
    compute.close()


def test_one_gives_what_it_has_fetched_before_it_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For hours, each layer of a large model was only at the peer that saved it. Where that one
    died, no other member had the model whole."""
    monkeypatch.setattr(checkpoint_files, "TOLD_EVERY_S", 0.0)
    monkeypatch.setattr(checkpoint_files, "TELLING_BYTES_PER_S", 1e12)
    compute, theirs = Compute(), tmp_path / "theirs"

    async def scenario() -> None:
        files = await _saved_by(theirs, EVERY - {0}, compute)
        slow = _Recording(theirs, most=1)
        first, told = _member(tmp_path / "first", "first", slow, compute)
        await first.save(STEP, _states(STEP, {0}), LINEAGE)
        first.remote_files("lone", files)
        await _until(lambda: len(slow.asked) == 2)
        assert first.whole_step is None and len(told[-1].files) == 2
        assert {len(it.layers) for it in first.saved} == {2}, "it could be gone back to"
        blobs = _Recording(tmp_path / "first")
        second, _ = _member(tmp_path / "second", "second", blobs, compute)
        await second.save(STEP, _states(STEP, {0}), LINEAGE)
        second.remote_files("first", told[-1])
        (came,) = told[-1].files.keys() - {0}
        await _until(lambda: any(came in it.layers for it in second.saved))
        assert blobs.asked == [(files.files[came][0], ("first",))]
        assert first.path_of(files.files[came][0]) is not None, "it serves it"
        await first.close()
        await second.close()

    asyncio.run(scenario())
    compute.close()


def test_a_layer_that_nobody_gives_holds_up_no_other_and_what_came_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member had gone with what it alone had. The rest of the layers was neither asked for nor
    told."""
    monkeypatch.setattr(checkpoint_files, "TOLD_EVERY_S", 1e9)  # however slow this machine is
    compute, theirs = Compute(), tmp_path / "theirs"

    async def scenario() -> None:
        files = await _saved_by(theirs, EVERY, compute)
        blobs = _Recording(theirs, denies=files.files[1][0])
        member, told = _member(tmp_path / "mine", "me", blobs, compute)
        await member.save(STEP, _states(STEP, {0}), LINEAGE)
        most = {layer: file for layer, file in files.files.items() if layer != 1}
        member.remote_files("other", CheckpointFiles(STEP, LINEAGE, most))
        member.remote_files("gone", files)
        await _until(lambda: told[-1].files.keys() == EVERY - {1})
        assert len(told) == 2, "once as it was saved, and once more: others are not told of each"
        await member.close()

    asyncio.run(scenario())
    compute.close()
