"""The checkpoint that is meant if none is named: the newest whole one of the run that a home is in.

A home may have been in many runs. Within a run, the highest step may come from a side of a split
swarm that was given up. So what the daemon says counts. Without a daemon it is the checkpoint that
a daemon would begin with. The times of files say nothing in a copy, or where a clock was set.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_dtfm.core.protocol.errors import UserError

if TYPE_CHECKING:
    from p2p_dtfm.train.model.checkpoint import Checkpoint

SHOWN_CHARACTERS = 16


def newest_checkpoint(home: Path | None) -> Path:
    """The newest checkpoint with all layers, of the run that this home's daemon is in or would take
    up. Raises `UserError`."""
    from p2p_dtfm.daemon.machine.home import Home, default_home, place_of_run

    root = Home(home or default_home()).root
    if not (run_digest := run_here(root)):
        return _written_last(root)
    here = _whole(place_of_run(root, run_digest))
    if (newest := _on_the_way(root, run_digest, here)) is not None:
        return newest.directory
    others = [found[0] for run in _runs(root) if (found := _whole(run))]
    raise UserError(
        f"no whole checkpoint in {root} of run {run_digest[:SHOWN_CHARACTERS]}, which it was in "
        "last",
        (
            "train on; a checkpoint is whole when every layer has been saved or fetched",
            *(f"of {_told(it)}, which it was in before: {it.directory}" for it in others[:1]),
            "name another home (--home DIR), or a checkpoint's directory instead",
        ),
    )


def run_here(root: Path) -> str:
    """Digest of the run that the daemon of this home is in, or was in last; empty where the home
    remembers none."""
    from p2p_dtfm.daemon.peers.home_memory import NAMES

    files = [path for name in NAMES for path in sorted(root.glob(f"runs/*/{name}"))]
    return _run_here(root, tuple((path, _time_of(path)) for path in files))


@lru_cache(maxsize=1)
def _run_here(root: Path, written: tuple[tuple[Path, float | None], ...]) -> str:
    """The same for what the home remembers as it was `written`. It is cached, so that whoever asks
    again and again verifies it only once."""
    from p2p_dtfm.daemon.peers.home_memory import remembered_runs, seen_by_others

    return next((it.run_digest for it in remembered_runs(root, seen_by_others)), "")


def _on_the_way(root: Path, run_digest: str, here: "list[Checkpoint]") -> "Checkpoint | None":
    """The checkpoint nearest to where this home's daemon is; the newest if it is in no view."""
    from p2p_dtfm.daemon.machine import local_client

    facts = local_client.ask_daemon(root, "status") or {}
    if facts.get("run_digest") != run_digest or facts.get("view") is None:
        return next(iter(here), None)
    whole = facts["whole_checkpoint_step"]
    reached = facts["step"] if whole is None else whole
    so_far = [it for it in here if it.manifest.step <= reached]
    return next((it for it in so_far if it.manifest.step == whole), next(iter(so_far), None))


def _written_last(root: Path) -> Path:
    """The checkpoint that was written last, where the home has no memory of a run but checkpoints
    were put there. Raises `UserError`."""
    found = [it for run in _runs(root) for it in _whole(run)[:1]]
    if not found:
        raise UserError(
            f"no whole checkpoint in {root}",
            (
                "train first; a checkpoint is whole when every layer has been saved or fetched",
                "name another home (--home DIR), or a checkpoint's directory instead",
            ),
        )
    return found[0].directory


def _runs(root: Path) -> list[Path]:
    """Directories of the runs with checkpoints, the one that was written last first."""
    found = [run.parent for run in sorted(root.glob("runs/*/checkpoints"))]
    return sorted(found, key=_written_s, reverse=True)


def _written_s(run: Path) -> float:
    written = run.glob("checkpoints/step-*/manifest.json")
    return max((_time_of(path) or 0.0 for path in written), default=0.0)


def _time_of(path: Path) -> float | None:
    """When the file was changed; None if it has been removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _whole(run: Path) -> "list[Checkpoint]":
    """Whole checkpoints, newest first, as for a daemon. What a daemon has pruned since they were
    listed is left out."""
    from p2p_dtfm.train.model import checkpoint
    from p2p_dtfm.train.model.gpt import layer_count

    found = checkpoint.list_checkpoints(run / "checkpoints")
    whole = [it for it in found if len(it.layers) == layer_count(it.manifest.spec())]
    return [it for it in whole if (it.directory / "manifest.json").exists()]


def _told(found: "Checkpoint") -> str:
    manifest = found.manifest
    return (
        f"run {manifest.run_digest[:SHOWN_CHARACTERS]} ({manifest.spec().name}), step "
        f"{manifest.step:,}"
    )


def told_of_model(directory: Path) -> str:
    """In words, from which run and after which step the model is. Raises `UserError`."""
    from p2p_dtfm.train.model.checkpoint import read_manifest

    manifest = read_manifest(directory)
    run, name = manifest.run_digest[:SHOWN_CHARACTERS], manifest.spec().name
    return f"the model of {name} (run {run}) after step {manifest.step:,}"
