"""Bugs in what is written, and read again."""

import json
from pathlib import Path
from typing import Any

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.peers import home_memory
from p2p_dtfm.daemon.state_transfer.checkpoints.layer_writes import LayerWrites
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.ports import disk, now
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import ABSENCES, QUICK_LIES
from p2p_dtfm.train.model import checkpoint


def _checkpoints_are_believed(patches: Patches) -> None:
    """Reads a file that is there without a look at its length or digest."""

    def sound_parts(directory: Path, manifest: Any, layer: int) -> list[bytes]:
        path = checkpoint.layer_path(directory, layer)
        if str(layer) not in manifest.layers or not path.is_file():
            return list(right(directory, manifest, layer))
        return [path.read_bytes()]

    def list_checkpoints(root: Path, run: str = "") -> list[Any]:
        found = []
        for directory in sorted(root.glob("step-*"), reverse=True):
            if (directory / "manifest.json").exists():
                manifest = checkpoint.read_manifest(directory)
                if run in ("", manifest.run_digest):
                    found.append(checkpoint.Checkpoint(directory, manifest))
        return found

    from p2p_dtfm.daemon.state_transfer.checkpoints import files_here

    right = patches.put(checkpoint, "_sound_parts", sound_parts)
    for module in (checkpoint, files_here):
        patches.put(module, "list_checkpoints", list_checkpoints)


def _a_full_disk_ends_training(patches: Patches) -> None:
    async def write(*args: Any, **options: Any) -> Any:
        try:
            return await right(*args, **options)
        except checkpoint.CheckpointFailed as error:
            raise RuntimeError("planted") from error

    right = patches.put(LayerWrites, "write", write)


def _a_full_disk_ends_the_history(patches: Patches) -> None:
    def write(log: Any, event: str, **facts: Any) -> None:
        disk.append(log._path, json.dumps({"event": event, **facts}) + "\n")

    patches.put(EventLog, "write", write)


def _lives_follow_the_clock(patches: Patches) -> None:
    def next_life(home: Any) -> int:
        return int(now.wall_s() * 1000)

    patches.put(Home, "next_life", next_life)


def _views_are_forgotten(patches: Patches) -> None:
    patches.nothing(ViewHistory, "write")


def _half_a_memory_ends_it(patches: Patches) -> None:
    def read(path: Path, run: str) -> Any:
        return home_memory._checked(path.read_bytes(), run) if path.exists() else None

    patches.put(home_memory, "_read", read)


def _fetched_files_stay(patches: Patches) -> None:
    """Leaves fetched files behind, beside the layers to which they were copied."""

    def add_layer_file(directory: Path, layer: int, source: Path) -> None:
        right(directory, layer, source)
        (directory / f"another-{layer}.partial").write_bytes(b"")

    from p2p_dtfm.daemon.state_transfer.checkpoints import layer_fetches

    right = patches.put(layer_fetches, "add_layer_file", add_layer_file)


def _offers_stay(patches: Patches) -> None:
    """Leaves what was offered to a peer on the disk, though the peer has all of it or has gone."""

    def drop(donor: Any, key: Any) -> None:
        if (subscription := donor._subscriptions.get(key)) is not None:
            subscription.blobs = set()
        right(donor, key)

    right = patches.put(Donor, "_drop", drop)


DISKS = (
    Planted("believed", "files of checkpoints are not looked at", _checkpoints_are_believed),
    Planted("full-ends-training", "a full disk ends training", _a_full_disk_ends_training),
    Planted("full-ends-history", "a full disk ends the daemon", _a_full_disk_ends_the_history),
    Planted(
        "life-by-clock", "a clock put back is an earlier life", _lives_follow_the_clock, ABSENCES
    ),
    Planted("views-forgotten", "who comes back knows no view", _views_are_forgotten, QUICK_LIES),
    Planted("torn-memory", "half a file of its memory ends a daemon", _half_a_memory_ends_it),
    Planted("offers-stay", "states that were offered stay on the disk", _offers_stay),
    Planted("files-stay", "fetched files are left behind", _fetched_files_stay),
)
