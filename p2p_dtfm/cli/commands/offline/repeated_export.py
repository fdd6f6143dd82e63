"""Exports of a run while it trains: one every so many steps. The newest stay.

A run may take back what a barred liar has done, or give up a side of a split swarm. Then training
goes on from an earlier step. Exports of later steps are no part of it any more: they are marked,
and count as the oldest.
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.lineage import Epochs, epochs_of, is_undone_of

if TYPE_CHECKING:
    from p2p_dtfm.train.model.checkpoint import CheckpointManifest

POLL_S = 1.0
FAILURES_LIMIT = 3
"""So many failed exports in a row end the repetition. A checkpoint that is gone before it is read
is one failure, and the next attempt reads another checkpoint."""
_RUN_CHARACTERS = 8
_TAKEN_BACK = "taken-back-"
_NAME = re.compile(
    rf"({_TAKEN_BACK})?step-([0-9]{{8,12}})-([0-9a-f]{{8}})"
    r"(?:-epoch-([1-9][0-9]{0,8}))?(\.gguf|\.safetensors)?"
)
"""The name contains the beginning of the run's digest. So what other runs have left there, and
checkpoints, whose names have the step alone, are neither counted nor removed. It also says how
often the run had gone back before, if it had."""


class _PastExport(NamedTuple):
    """An export that is there."""

    is_marked: bool
    """Whether its name says that it was taken back."""
    step: int
    epoch: int
    path: Path

    def is_behind(self, epochs: Epochs) -> bool:
        """Whether training, which has come to `epochs`, has taken it back."""
        return self.is_marked or is_undone_of(self.step, self.epoch, epochs)


class RepeatedExport:
    """Exports the newest whole checkpoint that `newest()` finds, into `out`. It does so whenever
    that checkpoint is `every` steps newer than the last exported one, or is the run's last."""

    def __init__(
        self,
        newest: Callable[[], Path],
        write: Callable[[Path, Path], None],
        out: Path,
        every: int,
        keep: int,
        suffix: str,
        nobody_trains: Callable[[], str] = str,
    ) -> None:
        """`nobody_trains`: why no newer checkpoint will come, if that is so now; else empty."""
        self._newest = newest
        self._write = write
        self._out = out
        self._every = every
        self._keep = keep
        self._suffix = suffix
        self._nobody_trains = nobody_trains
        self._written = set[Path]()

    def once(self, tell: Callable[[str], None]) -> Path | None:
        """Export if it is time to; returns what was written. Raises `UserError`."""
        directory, manifest = self._look()
        epochs = epochs_of(manifest.lineage)
        run, step = _run_of(manifest), manifest.step
        self._mark_taken_back(run, epochs, step, tell)
        done = self._steps(manifest)
        is_last = step == manifest.spec().total_steps
        if step in done or (done and step < max(done) + self._every and not is_last):
            return None
        self._out.mkdir(parents=True, exist_ok=True)
        epoch = f"-epoch-{epochs.number}" if epochs.number else ""
        target = self._out / f"step-{step:08d}-{run}{epoch}{self._suffix}"
        self._write(directory, target)
        self._written.add(target)
        self._prune(run, epochs)
        return target

    def complete(self) -> str:
        """A sentence that the run's last step is exported, and where; empty while it is not."""
        try:
            _, manifest = self._look()
        except UserError:
            return ""
        epochs, spec = epochs_of(manifest.lineage), manifest.spec()
        if manifest.step != spec.total_steps:  # then an older export of it is given up
            return ""
        for made in self._made(_run_of(manifest)):
            if made.step == spec.total_steps and not made.is_behind(epochs):
                run = f"run {manifest.run_digest[:16]} ({spec.name})"
                return f"{run} is complete: its last step is {made.path}"
        return ""

    def follow(self, tell: Callable[[str], None], wait: Callable[[float], object]) -> None:
        """Export again and again until the run is complete. A checkpoint may be gone before it is
        read: then the next one is exported. Raises `UserError` for an export that keeps failing."""
        said, failures, alone = "", 0, ""
        while True:
            try:
                written = self.once(tell)
                if written is not None:
                    tell(f"{written}")
                said, failures = "", 0
            except UserError as error:
                failures = failures + 1 if self._is_there() else 0
                if failures >= FAILURES_LIMIT:
                    raise
                if error.cause != said:
                    said = error.cause
                    tell("; ".join([f"waits: {error.cause}", *error.fixes]))
            if told := self.complete():
                tell(told)
                return
            was_alone, alone = alone, self._nobody_trains()
            if alone and not was_alone:
                tell(alone)
            wait(POLL_S)

    def _is_there(self) -> bool:
        """Whether there is a checkpoint to export at all."""
        try:
            self._look()
        except UserError:
            return False
        return True

    def _look(self) -> "tuple[Path, CheckpointManifest]":
        """Raises `UserError`."""
        from p2p_dtfm.train.model.checkpoint import read_manifest

        directory = self._newest()
        return directory, read_manifest(directory)

    def _steps(self, manifest: "CheckpointManifest") -> set[int]:
        """Steps with an export that training has not taken back since."""
        epochs = epochs_of(manifest.lineage)
        return {it.step for it in self._made(_run_of(manifest)) if not it.is_behind(epochs)}

    def _made(self, run: str) -> list[_PastExport]:
        """The exports of this run, in this form, that lie in `out`, known by their names."""
        if not self._out.is_dir():
            return []
        found = []
        for path in self._out.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and name[3] == run and (name[5] or "") == self._suffix:
                found.append(_PastExport(bool(name[1]), int(name[2]), int(name[4] or 0), path))
        return found

    def _mark_taken_back(
        self, run: str, epochs: Epochs, step: int, tell: Callable[[str], None]
    ) -> None:
        """Mark exports that training has taken back, by their names: the higher number would pass
        for more training. A marked export stays, for whoever has use for it, until there are enough
        newer ones. Exports of this process beyond `step`, the newest, come from a side of a split
        swarm that was given up. Exports of other processes there may come from peers that are
        further on."""
        for made in sorted(self._made(run)):
            is_behind = made.is_behind(epochs)
            is_beyond = made.step > step and made.path in self._written
            if made.is_marked or not (is_behind or is_beyond):
                continue
            marked = made.path.with_name(f"{_TAKEN_BACK}{made.path.name}")
            with contextlib.suppress(OSError):  # without the mark its name still says the epoch
                made.path.rename(marked)
                start = epochs.starts[-1] if is_behind else step
                tell(f"the run went back to step {start:,}: {made.path.name} is {marked.name} now")

    def _prune(self, run: str, epochs: Epochs) -> None:
        oldest_first = sorted(self._made(run), key=lambda it: (not it.is_behind(epochs), it))
        for made in oldest_first[: -self._keep]:
            if made.path.is_dir():
                shutil.rmtree(made.path)
            else:
                made.path.unlink()


def _run_of(manifest: "CheckpointManifest") -> str:
    return manifest.run_digest[:_RUN_CHARACTERS]
