"""Which checkpoints go, so that a disk does not fill with them."""

import contextlib
from collections.abc import Collection
from pathlib import Path

from p2p_dtfm.ports.disk import PARTIAL
from p2p_dtfm.train.model.checkpoint import (
    fullest,
    list_checkpoints,
    remove_checkpoint,
    step_directories,
    step_of,
    worth_keeping,
)


def prune(
    root: Path,
    keep: int,
    made: int | None = None,
    undo_every: int = 0,
    in_use: Collection[Path] = (),
    run: str = "",
) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and torn ones older than those.

    The one of step `made` stays as well: those of later steps may be of a side of a split swarm
    that was given up. So do those that are kept to go back to (`worth_keeping`), and those
    `in_use`. Those of another run than `run`, if it is named, count for nothing. Returns the
    deleted directories. Raises `CheckpointFailed`.
    """
    assert keep >= 1, keep
    found = list_checkpoints(root, run)
    kept = [it.directory for n, it in enumerate(found) if n < keep or it.manifest.step == made]
    oldest = min((step_of(directory) for directory in kept), default=0)
    kept += [it.directory for it in worth_keeping(found, 0, undo_every)]
    return _remove_but([*kept, *in_use], root, oldest)


def prune_parts(
    root: Path,
    made: int,
    newest: int,
    full: int,
    undo_every: int = 0,
    in_use: Collection[Path] = (),
    run: str = "",
) -> list[Path]:
    """Delete the oldest checkpoints, and torn ones with them, while those that are made here do not
    become whole. Else nothing would ever go, until the disk was full.

    Of those up to step `made` these stay: the `newest`, the `full` fullest, those that are kept to
    go back to (`worth_keeping`) and those `in_use`. Later ones may be of a side of a split swarm
    that was given up; they take no place from these. Nor do those of another run than `run`, if it
    is named. Returns the deleted directories. Raises `CheckpointFailed`.
    """
    found = [it for it in list_checkpoints(root, run) if it.manifest.step <= made]
    kept = [it.directory for it in worth_keeping(found, newest, undo_every)]
    kept += [it.directory for it in fullest(found, full)]
    oldest = min((it.manifest.step for it in found[:newest]), default=0)
    return _remove_but([*kept, *in_use], root, oldest)


def remove_leftovers(root: Path) -> None:
    """Remove what a process that was killed was writing or fetching in its checkpoints. Call it
    while nobody writes there. What the disk does not remove stays."""
    with contextlib.suppress(OSError):
        for directory in step_directories(root):
            for path in (*directory.glob(f"*{PARTIAL}"), *directory.glob(f".*{PARTIAL}.*")):
                path.unlink(missing_ok=True)


def _remove_but(kept: Collection[Path], root: Path, oldest: int) -> list[Path]:
    """Delete all that is older than step `oldest`, but for what is kept."""
    doomed = [d for d in step_directories(root) if d not in kept and step_of(d) < oldest]
    for directory in doomed:
        remove_checkpoint(directory)
    return doomed
