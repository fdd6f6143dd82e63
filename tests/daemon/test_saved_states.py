"""Others are told what is on disk now, not what was there when the daemon started."""

import asyncio
import contextvars
import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.recovery.contradictions import AgreedState
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.join.own_disk import whole_step
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.held_back import LIMIT as HELD_BACK
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints import checkpoints as checkpoint_files
from p2p_dtfm.daemon.state_transfer.checkpoints import files_here
from p2p_dtfm.daemon.state_transfer.checkpoints.announced_files import SENDERS_REMEMBERED
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.checkpoints.files_here import SAVED_TOLD
from p2p_dtfm.daemon.state_transfer.checkpoints.pruning import prune
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.ports import disk
from p2p_dtfm.train.model.checkpoint import (
    add_layer_file,
    checkpoint_directory,
    layer_path,
    list_checkpoints,
    remove_checkpoint,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.trainer_parts import NO_BLOBS, SPEC
from tests.train.saved_layers import save_layers

LINEAGE = "5a" * 32


def test_what_is_saved_and_removed_is_known_at_once(tmp_path: Path) -> None:
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    every = set(range(layer_count(SPEC)))

    async def save(step: int, layers: set[int]) -> None:
        states = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
        for state in states.values():
            state.version = step
        await checkpoints.save(step, states, f"lineage {step}")

    async def scenario() -> None:
        assert checkpoints.saved == ()
        await save(5, every)
        await save(10, {0})
        found = [(it.version, it.lineage, set(it.layers)) for it in checkpoints.saved]
        assert found == [(10, "lineage 10", {0}), (5, "lineage 5", every)]
        remove_checkpoint(list_checkpoints(tmp_path)[-1].directory)
        assert [it.version for it in checkpoints.saved] == [10]
        for step in range(15, 15 + 5 * SAVED_TOLD, 5):
            await save(step, {0})
        assert len(checkpoints.saved) == SAVED_TOLD
        await save(first := 100, every)
        for step in range(first + 5, first + 5 + 5 * SAVED_TOLD, 5):
            await save(step, {0})
        told = [(it.version, set(it.layers)) for it in checkpoints.saved]
        assert len(told) == SAVED_TOLD + 1 and told[-1] == (first, every)
        assert checkpoints.safe_step(()) == first, "newer ones are this peer's own layers alone"
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_old_checkpoints_are_removed_while_the_daemon_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing files of many layers takes a while, in which others heard nothing of it."""
    compute, begun, others_went_on = Compute(), threading.Event(), threading.Event()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    waited: list[bool] = []

    def slowly(*given: Any, **more: Any) -> list[Path]:
        begun.set()
        waited.append(others_went_on.wait(2))
        return prune(*given, **more)

    monkeypatch.setattr(checkpoint_files, "prune", slowly)

    async def scenario() -> None:
        saving = asyncio.create_task(checkpoints.save(0, states, LINEAGE))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        others_went_on.set()
        await saving
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
    assert waited == [True]


def test_who_comes_back_to_a_damaged_checkpoint_goes_on_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may leave a file as long as it was, with other bytes. The daemon ended at each
    start, and others were told that it had this step."""
    compute, root, resumed = Compute(), tmp_path / "checkpoints", []
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    agreement = SimpleNamespace(
        view=None,
        next_view=None,
        set_saved=lambda saved: None,
        resume=lambda step, held, lineage, saved: resumed.append(
            (step, lineage, [it.version for it in saved])
        ),
    )
    participant: Any = SimpleNamespace(
        membership=SimpleNamespace(founds=True),
        checkpoints=checkpoints,
        trainer=SimpleNamespace(adopt=lambda states, step: None),
        _agreement=agreement,
    )

    async def scenario() -> None:
        for step in (5, 10):
            for state in states.values():
                state.version = step
            await checkpoints.save(step, states, f"lineage {step}")
        path = layer_path(checkpoint_directory(root, 10), 1)
        path.write_bytes(bytes(path.stat().st_size))
        await Participant.resume_from_checkpoint(participant)
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
    assert resumed == [(5, "lineage 5", [5])] and checkpoints.whole_step == 5
    assert path_is_named(caplog.text, root)


def test_who_leaves_again_while_it_arrives_keeps_the_checkpoint_that_it_left_with(
    tmp_path: Path,
) -> None:
    """The peer was given states of the step at which it had left, and had not taken over. It does
    not know their lineage. A checkpoint of no lineage stood in the place of a sound one."""
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in (0, 1)}
    for state in states.values():
        state.version = 7
    knows = RecoveryEvidence()
    participant: Any = SimpleNamespace(
        membership=None,
        local=SimpleNamespace(life=None),
        trainer=SimpleNamespace(states={0: states[0]}),
        lineage_at=lambda step: knows.lineage.at(step) or "",
        checkpoints=checkpoints,
    )

    async def scenario() -> None:
        await checkpoints.save(7, states, LINEAGE)
        assert await Departure(participant)._save() == 0, "nothing is saved"
        (found,) = list_checkpoints(tmp_path)
        assert found.manifest.lineage == LINEAGE and set(found.layers) == {0, 1}
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_where_no_checkpoint_can_be_loaded_none_is_touched(tmp_path: Path) -> None:
    """What keeps the checkpoints from being read may pass. Each was put aside in turn, and deleted
    for the next one; then the run began anew."""
    compute, root = Compute(), tmp_path / "checkpoints"
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}

    async def scenario(whole: bool) -> None:
        for step in (5, 10, 15):
            for state in states.values():
                state.version = step
            snapshots = [state.snapshot() for state in states.values()]
            save_layers(root, SPEC, step, 0, snapshots)
            if step > 5 or not whole:
                path = layer_path(checkpoint_directory(root, step), 1)
                path.write_bytes(bytes(path.stat().st_size))
        found = await checkpoints.newest_whole()
        assert whole and found is not None and found[0].manifest.step == 5
        await checkpoints.close()

    before = {"step-00000005", "step-00000010", "step-00000015"}
    with pytest.raises(UserError, match="is damaged"):
        asyncio.run(scenario(False))
    assert {it.name for it in root.iterdir()} == before
    shutil.rmtree(root)
    asyncio.run(scenario(True))
    compute.close()
    aside = {"damaged-step-00000010", "damaged-step-00000015"}
    assert {it.name for it in root.iterdir()} == {"step-00000005"} | aside, "of both"


def path_is_named(text: str, root: Path) -> bool:
    """A user who wants to look at the damaged file is told where it is now."""
    aside = list(root.glob("damaged-*"))
    return len(aside) == 1 and str(aside[0]) in text


def test_of_checkpoints_that_is_safe_which_another_one_has_as_well(tmp_path: Path) -> None:
    """The only peer with the newest checkpoint lost power, and the others went on from an older one
    (800096)."""
    compute, root = Compute(), tmp_path / "checkpoints"
    told = list[CheckpointFiles]()
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, told.append, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}

    async def scenario() -> None:
        assert checkpoints.safe_step(()) is None
        for step in (5, 10):
            for state in states.values():
                state.version = step
            await checkpoints.save(step, states, f"{step:064x}")
            assert checkpoints.whole_step == checkpoints.safe_step(()) == step
            if step == 5:
                assert checkpoints.safe_step({"m", "n"}) is None
                checkpoints.remote_files("m", told[-1])
            assert checkpoints.safe_step({"m", "n"}) == 5
        checkpoints.remote_files("n", told[-1])
        assert checkpoints.safe_step({"m", "n"}) == 10
        assert checkpoints.safe_step({"m"}) == 5
        await checkpoints.set_aside({}, 10, "given up")
        assert checkpoints.safe_step({"m", "n"}) is None
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_the_newest_whole_one_is_of_the_side_that_this_peer_is_on(tmp_path: Path) -> None:
    """The peer went over to others that have come less far, and its own saved steps count no
    more."""
    compute, root = Compute(), tmp_path / "checkpoints"
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}

    async def save(step: int) -> None:
        for state in states.values():
            state.version = step
        await checkpoints.save(step, states, f"lineage {step}")

    async def scenario() -> None:
        checkpoints.whole_step = 5
        assert checkpoints.whole_step == 5
        for step in range(10, 10 + 5 * SPEC.checkpoint.keep, 5):
            await save(step)
        latest = checkpoints.whole_step
        assert latest == step
        await checkpoints.set_aside(states, step, "given up")
        assert checkpoints.whole_step is None
        await save(5)
        assert checkpoints.whole_step == 5
        assert 5 in [it.version for it in checkpoints.saved]
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_who_computes_alone_is_believed_of_what_it_saves(tmp_path: Path) -> None:
    """The others hear of its steps some at a time, and of a checkpoint at once."""
    compute = Compute()
    spec = SPEC.model_copy(update={"total_steps": 10_000})
    checkpoints = Checkpoints(tmp_path, spec, NO_BLOBS, compute, lambda files: None, lambda: False)

    async def scenario() -> None:
        checkpoints.committed(100, {}, LINEAGE)
        files = {0: ("ab" * 32, 100)}
        checkpoints.remote_files("alone", CheckpointFiles(100 + 3 * HELD_BACK, "", files))
        with pytest.raises(PeerFault, match="far ahead"):
            checkpoints.remote_files("alone", CheckpointFiles(1000, "", files))
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


class _FullDisk(disk.MachineDisk):
    def __init__(self) -> None:
        self.is_full = True

    def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_whole(path, payload, mode)


class _FromAnother:
    """Blobs that lie among other peers' checkpoints."""

    def __init__(self, *theirs: Path) -> None:
        self._theirs = theirs

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        for checkpoint in (it for root in self._theirs for it in list_checkpoints(root)):
            for layer, file in checkpoint.manifest.layers.items():
                if file.digest == digest:
                    source = layer_path(checkpoint.directory, int(layer))
                    target.write_bytes(source.read_bytes())
        return target


def test_whose_disk_was_full_when_the_last_step_was_saved_gets_the_model_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer also does not report, at each message of theirs, a save that it could not begin."""
    compute, step = Compute(), SPEC.total_steps
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    for state in states.values():
        state.version = step
    told: list[CheckpointFiles] = []
    written_to = _FullDisk()

    async def scenario() -> None:
        nobody: Any = NO_BLOBS
        other = Checkpoints(theirs, SPEC, nobody, compute, told.append, lambda: True)
        await other.save(step, states, LINEAGE)
        disk.live_by(written_to)
        from_other: Any = _FromAnother(theirs)
        checkpoints = Checkpoints(mine, SPEC, from_other, compute, told.append, lambda: True)
        await checkpoints.save(step, {0: states[0]}, LINEAGE)
        assert checkpoints.saved == ()
        checkpoints.committed(step, {}, LINEAGE)
        for _ in range(3):
            checkpoints.remote_files("other", told[0])
            await asyncio.sleep(0.05)
        assert not [line for line in caplog.messages if "stays incomplete" in line]
        written_to.is_full = False
        checkpoints.remote_files("other", told[0])
        await until_whole(checkpoints, step)
        await checkpoints.close()
        await other.close()

    contextvars.copy_context().run(asyncio.run, scenario())
    compute.close()
    assert [set(it.layers) for it in list_checkpoints(mine)] == [set(states)]


def test_who_becomes_a_spare_has_no_checkpoint_to_write(tmp_path: Path) -> None:
    """The spare's page said for good that checkpoints cannot be written: only a written one ended
    that."""
    compute, troubles, has_stage = Compute(), Troubles(), True
    states = {0: LayerState.genesis(SPEC, 0)}
    states[0].version = 5

    async def scenario() -> None:
        nonlocal has_stage
        disk.live_by(_FullDisk())
        checkpoints = Checkpoints(
            tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: has_stage, troubles
        )
        await checkpoints.save(5, states, LINEAGE)
        checkpoints.committed(5, {}, LINEAGE)
        ((what, _),) = troubles.present()
        assert what.startswith("checkpoints cannot be written")
        has_stage = False
        checkpoints.committed(6, {}, LINEAGE)
        assert not troubles.present()
        await checkpoints.close()

    contextvars.copy_context().run(asyncio.run, scenario())
    compute.close()


def test_a_spare_takes_the_last_model_of_what_was_committed_whatever_a_member_says(
    tmp_path: Path,
) -> None:
    """A member tells a lineage and files of its own for the last step, long before that step."""
    compute, step = Compute(), SPEC.total_steps
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    told: list[CheckpointFiles] = []

    async def scenario() -> None:
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        liar = Checkpoints(tmp_path / "lies", SPEC, NO_BLOBS, compute, told.append, lambda: True)
        for state in states.values():
            state.version = step
        await other.save(step, states, LINEAGE)
        for state in states.values():
            state.parameters.add_(1.0)
        await liar.save(step, states, LINEAGE)
        await liar.close()
        honest, false = told
        donors: Any = _FromAnother(theirs, tmp_path / "lies")
        spare = Checkpoints(mine, SPEC, donors, compute, told.append, lambda: False)
        with pytest.raises(PeerFault, match="lineage"):
            spare.remote_files("liar", CheckpointFiles(step, "x" * 1000, {}))
        spare.remote_files("liar", false)
        spare.remote_files("other liar", CheckpointFiles(step, "ab" * 32, {}))
        await asyncio.sleep(0.05)
        assert not checkpoint_directory(mine, step).exists(), "nobody has come that far"
        spare.committed(step - 1, {}, "cd" * 32)
        spare.remote_files("liar", false)
        for sender in ("first", "second"):
            spare.remote_files(sender, honest)
        named = {layer: bytes.fromhex(name) for layer, (name, _) in honest.files.items()}
        files = {layer: AgreedState(it, b"") for layer, it in named.items()}
        spare.committed(step, files, LINEAGE)
        await until_whole(spare, step)
        (found,) = list_checkpoints(mine)
        assert found.manifest.lineage == LINEAGE
        assert {file.digest for file in found.manifest.layers.values()} == {
            name for name, _ in honest.files.values()
        }
        await spare.close()
        await other.close()

    asyncio.run(scenario())
    compute.close()


def test_nobody_hides_what_the_others_have_saved(tmp_path: Path) -> None:
    """A member's checkpoints, however new, take the place of its own earlier ones alone."""
    compute = Compute()
    spec = SPEC.model_copy(update={"total_steps": 10_000})
    checkpoints = Checkpoints(tmp_path, spec, NO_BLOBS, compute, lambda files: None, lambda: False)
    files = {layer: ("ab" * 32, 100) for layer in range(layer_count(spec))}

    async def scenario() -> None:
        checkpoints.committed(100, {}, LINEAGE)
        checkpoints.whole_step = 100
        checkpoints.remote_files("honest", CheckpointFiles(100, LINEAGE, files))
        for step in range(101, 165):
            checkpoints.remote_files("liar", CheckpointFiles(step, LINEAGE, files))
        assert checkpoints.whole_at(100, {"honest"})
        for number in range(2000):
            checkpoints.remote_files(f"member {number}", CheckpointFiles(100, LINEAGE, files))
        assert sum(map(len, checkpoints._announced._of_steps.values())) <= SENDERS_REMEMBERED
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


class _Slow(_FromAnother):
    """The only holder of a file, which gives it when it likes."""

    def __init__(self, *theirs: Path) -> None:
        super().__init__(*theirs)
        self.asked, self.gives = asyncio.Event(), asyncio.Event()

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        self.asked.set()
        await self.gives.wait()
        return await super().fetch(digest, peers, target, max_bytes)


async def until_whole(checkpoints: Checkpoints, step: int) -> None:
    async with asyncio.timeout(10):
        while checkpoints.whole_step != step:
            await asyncio.sleep(0.01)


def test_of_what_an_earlier_life_left_nobody_is_given_other_bytes(tmp_path: Path) -> None:
    """A power cut may leave a file as long as it was, with other bytes. Whoever was given them, as
    of the last step, said of its honest giver that it sends wrong bytes, and cut it off."""
    compute, told, every = Compute(), list[CheckpointFiles](), set(range(layer_count(SPEC)))

    def life() -> Checkpoints:
        return Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, told.append, lambda: True)

    async def scenario() -> None:
        first = life()
        await first.save(5, _states(5, every), LINEAGE)
        blobs = {layer: blob for layer, (blob, _) in told[-1].files.items()}
        assert not any(map(first.unread, blobs.values())), "this life has written them"
        await first.close()
        path = layer_path(checkpoint_directory(tmp_path, 5), 1)
        path.write_bytes(bytes(path.stat().st_size))

        again = life()
        reads = {layer: again.unread(blob) for layer, blob in blobs.items()}
        assert {layer: read is not None and read() for layer, read in reads.items()} == {
            layer: layer != 1 for layer in every
        }
        assert not any(map(again.unread, blobs.values())), "each is read once"
        assert {layer for layer in every if again.path_of(blobs[layer])} == every - {1}
        again.tell(5)
        assert told[-1].files.keys() == every - {1} == {*again.saved[0].layers}
        await again.save(5, _states(5, {1}), LINEAGE)
        assert told[-1].files.keys() == every and again.path_of(blobs[1]), "it is written again"
        await again.close()

    asyncio.run(scenario())
    compute.close()


def test_a_layer_that_is_written_while_its_damaged_one_is_read_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found of the file before was said of the one that had taken its place, and nobody
    was told of that."""
    compute, told = Compute(), list[CheckpointFiles]()
    save_layers(tmp_path, SPEC, 5, 0, [*_states(5, {0, 1}).values()], LINEAGE)
    path = layer_path(checkpoint_directory(tmp_path, 5), 1)
    path.write_bytes(bytes(path.stat().st_size))
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, told.append, lambda: True)
    checkpoints.tell(5)
    before, other, right = told[-1].files[1][0], _states(5, {1})[1], files_here.file_digest
    other.parameters.add_(1.0)

    def while_it_is_written_anew(path: Path) -> str:
        digest = right(path)
        path.with_name("came").write_bytes(other.to_bytes())
        add_layer_file(path.parent, 1, path.with_name("came"))
        return digest

    async def scenario() -> None:
        monkeypatch.setattr(files_here, "file_digest", while_it_is_written_anew)
        read = checkpoints.unread(before)
        assert read is not None and not read()
        await checkpoints._files_changed(5)
        assert told[-1].files.keys() == {0, 1} == {*checkpoints.saved[0].layers}
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_a_layer_of_another_lineage_is_not_the_one_that_was_damaged(tmp_path: Path) -> None:
    compute, told = Compute(), list[CheckpointFiles]()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, told.append, lambda: True)

    async def scenario() -> None:
        await checkpoints.save(5, _states(5, {0, 1}), "5a" * 32)
        path = layer_path(checkpoint_directory(tmp_path, 5), 1)
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(UserError):
            await checkpoints.load(1, 5)
        assert [it.layers for it in checkpoints.saved] == [(0,)]
        await checkpoints.save(5, _states(5, {0}), "5b" * 32)
        other = _states(5, {1})[1]
        other.parameters.add_(1.0)
        path.with_name("came").write_bytes(other.to_bytes())
        add_layer_file(path.parent, 1, path.with_name("came"))
        await checkpoints._files_changed(5)
        assert told[-1].files.keys() == {0, 1} == {*checkpoints.saved[0].layers}
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_a_checkpoint_of_another_run_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    """Somebody had changed the run spec, which is another run, and put the checkpoints beside it.
    Its founder went on from them, and each that it gave a layer to took it for a liar."""
    compute, told = Compute(), list[CheckpointFiles]()
    other = SPEC.model_copy(update={"seed": SPEC.seed + 1})
    states = [LayerState.genesis(other, layer) for layer in range(layer_count(SPEC))]
    for state in states:
        state.version = 10
    directory = save_layers(tmp_path, other, 10, 0, states, LINEAGE)

    async def scenario() -> None:
        checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        assert checkpoints.saved == () and await checkpoints.newest_whole() is None
        assert checkpoints.tell(10) is None and not told
        await checkpoints.save(5, _states(5, {0, 1}), LINEAGE)
        assert [it.version for it in checkpoints.saved] == [5] and directory.exists()
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
    home: Any = SimpleNamespace(checkpoints=lambda digest: tmp_path)
    recalled: Any = SimpleNamespace(spec=SPEC, run_digest=SPEC.digest())
    assert whole_step(home, recalled) == 0


def test_checkpoints_of_another_run_take_no_place_from_those_of_this_one(tmp_path: Path) -> None:
    """They were of higher steps, and counted among those that stay: of this run's only the newest
    stayed. A whole one took the place of the only whole one to go on from."""
    compute, every = Compute(), set(range(layer_count(SPEC)))
    other = SPEC.model_copy(update={"seed": SPEC.seed + 1})
    states = [LayerState.genesis(other, layer) for layer in every]
    foreign = (3, *range(100, 100 + SPEC.checkpoint.keep))
    for step in foreign:
        for state in states:
            state.version = step
        save_layers(tmp_path, other, step, 0, states, LINEAGE)

    async def scenario() -> None:
        nobody: Any = NO_BLOBS
        checkpoints = Checkpoints(tmp_path, SPEC, nobody, compute, lambda files: None, lambda: True)
        for step in (1, 2):
            await checkpoints.save(step, _states(step, every), LINEAGE)
        assert [it.version for it in checkpoints.saved] == [2, 1]
        for step in range(4, 4 + SAVED_TOLD + SPEC.checkpoint.keep):
            await checkpoints.save(step, _states(step, {0}), LINEAGE)
        assert 2 in [it.version for it in checkpoints.saved]
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_a_disk_that_cannot_be_looked_at_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another machine, or one that was pulled out: the next checkpoint, or the next look at
    what is there, ended the daemon."""
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)

    class _Gone(disk.MachineDisk):
        def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    def gone(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        await checkpoints.save(5, _states(5, {0}), LINEAGE)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "iterdir", gone)
            patched.setattr(Path, "is_file", gone)
            disk.live_by(_Gone())
            await checkpoints.save(10, _states(10, {0}), LINEAGE)
            await checkpoints.take_back(5, LINEAGE)
            assert checkpoints.refused(10) and checkpoints.saved == ()
            checkpoints.committed(5, {}, LINEAGE)
            checkpoints.remote_files("b", CheckpointFiles(5, LINEAGE, {1: ("ab" * 32, 10)}))
            await asyncio.sleep(0.05)
            assert checkpoints._completing is not None and not checkpoints._completing.done()
        disk.live_by(disk.MachineDisk())
        await checkpoints.save(15, _states(15, {0}), LINEAGE)
        assert [it.version for it in checkpoints.saved] == [15, 5]
        await checkpoints.close()

    contextvars.copy_context().run(asyncio.run, scenario())
    compute.close()


def _states(step: int, layers: set[int]) -> dict[int, LayerState]:
    states = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
    for state in states.values():
        state.version = step
    return states


@pytest.mark.parametrize("begun_anew", [False, True])
def test_who_gives_a_file_slowly_holds_up_nobody_who_saves(
    tmp_path: Path, begun_anew: bool
) -> None:
    """Training waits until its layers are saved. The only holder of a layer gave it as slowly as it
    liked, thirty seconds for each 32 KiB, and all stood still."""
    compute, mine, theirs = Compute(), tmp_path / "mine", tmp_path / "theirs"
    every = set(range(layer_count(SPEC)))

    async def scenario() -> None:
        told: list[CheckpointFiles] = []
        liar = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await liar.save(4, _states(4, every), LINEAGE)
        slow = _Slow(theirs)
        blobs: Any = slow
        honest = Checkpoints(mine, SPEC, blobs, compute, lambda files: None, lambda: True)
        honest.committed(4, {}, LINEAGE)
        await honest.save(4, _states(4, {0}), LINEAGE)
        honest.remote_files("liar", told[-1])
        async with asyncio.timeout(30):
            await slow.asked.wait()
            await honest.save(8, _states(8, {0}), LINEAGE)
            if begun_anew:
                remove_checkpoint(checkpoint_directory(mine, 4))
                await honest.save(4, _states(4, {0}), "other" + LINEAGE[5:])
            slow.gives.set()
            while honest._completing is not None and not honest._completing.done():
                await asyncio.sleep(0.01)
        found = {it.version: set(it.layers) for it in honest.saved}
        assert found == {8: {0}, 4: {0} if begun_anew else every}
        await honest.close()
        await liar.close()

    asyncio.run(scenario())
    compute.close()


def test_what_was_announced_first_and_comes_last_hides_nothing(tmp_path: Path) -> None:
    """Each call goes its own way. A peer that ends with its run waited a minute for another that
    had told it before that it has the whole model. Nobody asked that one for what it alone had
    left."""
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: False)
    files = {layer: ("ab" * 32, 100) for layer in range(layer_count(SPEC))}
    step, other = SPEC.total_steps, "cd" * 32

    async def scenario() -> None:
        checkpoints.committed(step, {}, LINEAGE)
        checkpoints.whole_step = step
        for some in (files, {0: files[0]}):
            checkpoints.remote_files("early", CheckpointFiles(step, LINEAGE, some))
        assert checkpoints.whole_at(step, {"early"})
        for some in ({0: ("ef" * 32, 100)}, {0: files[0]}):
            checkpoints.remote_files("early", CheckpointFiles(step, LINEAGE, some))
            assert not checkpoints.whole_at(step, {"early"}), "it is another file"
        checkpoints.remote_files("early", CheckpointFiles(step, LINEAGE, files))
        checkpoints.remote_files("early", CheckpointFiles(step, other, {0: files[0]}))
        assert not checkpoints.whole_at(step, {"early"}), "the step was taken once more"
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
