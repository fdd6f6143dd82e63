"""Exports of a run while it trains: one every so many steps, of which the newest stay."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_dtfm.core.protocol.errors import UserError

if TYPE_CHECKING:
    from p2p_dtfm.train.model.checkpoint import CheckpointManifest

POLL_S = 1.0
FAILURES_LIMIT = 3
"""So many exports in a row that come to nothing end it: a checkpoint that is gone before it is read
is one of them, and the next one is another."""
_RUN_CHARACTERS = 8
_NAME = re.compile(r"step-([0-9]{8,12})-([0-9a-f]{8})(\.gguf|\.safetensors)?")
"""With the beginning of the run's digest: what other runs have left there, and checkpoints, which
are called by their steps alone, are neither counted nor removed."""


class RepeatedExport:
    """Of the newest whole checkpoint that `newest()` finds, whenever it is `every` steps newer than
    the last that was exported into `out`, or is the run's last one."""

    def __init__(
        self,
        newest: Callable[[], Path],
        write: Callable[[Path, Path], None],
        out: Path,
        every: int,
        keep: int,
        suffix: str,
    ) -> None:
        self._newest = newest
        self._write = write
        self._out = out
        self._every = every
        self._keep = keep
        self._suffix = suffix

    def once(self) -> Path | None:
        """Export if it is time for it; what was written. Raises `UserError`."""
        directory, manifest = self._look()
        run, step = _run_of(manifest), manifest.step
        done = self._made(run)
        is_last = step == manifest.spec().total_steps
        if step in done or (done and step < max(done) + self._every and not is_last):
            return None
        self._out.mkdir(parents=True, exist_ok=True)
        target = self._out / f"step-{step:08d}-{run}{self._suffix}"
        self._write(directory, target)
        self._prune(run)
        return target

    def is_complete(self) -> bool:
        """Whether the run's last step is exported."""
        try:
            _, manifest = self._look()
            return manifest.spec().total_steps in self._made(_run_of(manifest))
        except UserError:
            return False

    def follow(self, tell: Callable[[str], None], wait: Callable[[float], object]) -> None:
        """Until the run is complete. A checkpoint may be gone before it is read: the next one is
        exported then. Raises `UserError` for an export that fails again and again."""
        said, failures = "", 0
        while True:
            try:
                written = self.once()
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
            if self.is_complete():
                return
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

    def _made(self, run: str) -> dict[int, Path]:
        """What lies in `out` under names that this makes of this run, in this form."""
        if not self._out.is_dir():
            return {}
        found = {}
        for path in self._out.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and name[2] == run and (name[3] or "") == self._suffix:
                found[int(name[1])] = path
        return found

    def _prune(self, run: str) -> None:
        for _, path in sorted(self._made(run).items())[: -self._keep]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _run_of(manifest: "CheckpointManifest") -> str:
    return manifest.run_digest[:_RUN_CHARACTERS]
