"""Keeping what a daemon stores under its owner's limit: the oldest goes first.

These may go: old checkpoints of each run, but for the last two, the fullest, and those in use. Of
runs that are not trained now, data shards may go too, and what was given to others or put aside. So
may the corpora that come along with the program and were prepared for founding.

These stay: identity, manifests, tokenizers, given and frozen models, and whatever somebody else has
put there. The shards of the run under way stay as well, which are fetched as they are needed.
"""

import asyncio
import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.daemon.machine.home import DEVICES, all_below
from p2p_dtfm.ports import now
from p2p_dtfm.train.data import BLOBS_NAME, DIGITS, STANDARD_LIBRARY
from p2p_dtfm.train.data.blob_store import QUARANTINE
from p2p_dtfm.train.model.checkpoint import (
    CheckpointFailed,
    fullest,
    is_begun,
    list_checkpoints,
    read_manifest,
    remove_checkpoint,
    step_directories,
)
from p2p_dtfm.train.model.initial_state import named_as_initial

CHECKPOINTS_KEPT = 2
SET_ASIDE = "set-aside"
"""Folder in a run's directory: what one side of a split swarm had come to."""
LOOK_EVERY_S = 0.5
COUNT_EVERY_S = 60.0
"""Counting looks at every file. In between, only a new checkpoint is a reason to count."""
SHARD_LEAST_BYTES = 1 << 20
"""Smaller blobs (manifests, tokenizers) make the models of a run usable, and stay."""
MANIFEST_STARTS_WITH = b'{"format_version":'
"""How a manifest begins. That of many shards is as large as a shard."""

log = logging.getLogger("p2p_dtfm")


class _File(NamedTuple):
    """One name of a file. `file` is the same for all names of a file."""

    path: Path
    file: tuple[int, int]
    size_bytes: int


@dataclass(frozen=True)
class _Removable:
    changed_s: float
    path: Path
    remove: Callable[[Path], None]


async def keep_under(
    home: Path,
    run_directory: Path,
    limit_bytes: int,
    in_use: Callable[[], Collection[Path]] = tuple,
) -> None:
    """Look now and then, until cancelled, and remove what must go. What is `in_use` stays."""
    told = has_failed = False
    checkpoints = run_directory / "checkpoints"
    while True:
        seen_ns = changed_ns(checkpoints)
        try:
            kept = in_use()
            used_bytes = await asyncio.to_thread(trim, home, run_directory, limit_bytes, kept)
        except OSError as error:  # another machine's disk, or a file removed just now
            level = logging.DEBUG if has_failed else logging.WARNING
            log.log(level, "what %s holds cannot be counted now: %s", home, error)
            has_failed = True
            await asyncio.sleep(COUNT_EVERY_S)
            continue
        has_failed = False
        if used_bytes > limit_bytes and not told:
            log.warning(
                "%s holds %s, more than the limit of %s: nothing more may be removed",
                home, bytes_text(used_bytes), bytes_text(limit_bytes),
            )  # fmt: skip
        told = used_bytes > limit_bytes
        counted_s = now.monotonic_s()
        while changed_ns(checkpoints) == seen_ns and now.monotonic_s() < counted_s + COUNT_EVERY_S:
            await asyncio.sleep(LOOK_EVERY_S)


def changed_ns(directory: Path) -> int:
    """When an entry was last made or removed in a directory; 0 if that cannot be read."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return 0


def trim(home: Path, run_directory: Path, limit_bytes: int, in_use: Collection[Path] = ()) -> int:
    """Remove the oldest until `home` holds at most `limit_bytes`. Returns how many bytes it then
    holds.

    The homes of this machine's other daemons below it do not count: they have limits of their own.
    `run_directory`: of the run that is trained now. What is `in_use` in it stays.
    """
    used = _Used(home, home / DEVICES)
    if used.total_bytes <= limit_bytes:
        return used.total_bytes
    removable = (it for it in _removable(home, run_directory) if it.path not in in_use)
    for item in sorted(removable, key=lambda item: item.changed_s):
        if used.total_bytes <= limit_bytes:
            break
        log.info("removes %s: the disk limit is reached", item.path)
        files = list(_files_of(item.path))
        try:
            item.remove(item.path)
        except (OSError, CheckpointFailed) as error:
            log.warning("%s stays: %s", item.path, error)
        used.forget(files)
    return used.total_bytes


def size_of(path: Path, but: Path | None = None) -> int:
    """Bytes in a file, or in all files of a directory but those of one directory in it. A file with
    several names counts once."""
    return _Used(path, but).total_bytes


class _Used:
    """The bytes of a home, counted once: it may hold a hundred thousand shards, and each may have
    to go."""

    def __init__(self, path: Path, but: Path | None) -> None:
        self.total_bytes = 0
        self._names: Counter[tuple[int, int]] = Counter()
        """How many names each file has here. To remove a file that has another name frees
        nothing."""
        for _, file, size_bytes in _files_of(path, but):
            self.total_bytes += 0 if self._names[file] else size_bytes
            self._names[file] += 1

    def forget(self, files: Iterable[_File]) -> None:
        """Subtract those of these files that are gone."""
        for path, file, size_bytes in files:
            if self._names[file] and not os.path.lexists(path):
                self._names[file] -= 1
                self.total_bytes -= 0 if self._names[file] else size_bytes


def _files_of(path: Path, but: Path | None = None) -> Iterator[_File]:
    for file in (path, *all_below(path, but)):
        try:
            status = file.lstat()
        except OSError:  # removed meanwhile
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield _File(file, (status.st_dev, status.st_ino), status.st_size)


def _removable(home: Path, run_directory: Path) -> Iterator[_Removable]:
    for checkpoints in home.glob("runs/*/checkpoints"):
        found = list_checkpoints(checkpoints)
        for digest in {it.manifest.run_digest for it in found}:  # somebody may put others' there
            own = [it for it in found if it.manifest.run_digest == digest]
            stays = fullest(own)
            for checkpoint in (it for it in own[CHECKPOINTS_KEPT:] if it not in stays):
                yield _item(checkpoint.directory, remove_checkpoint)
    for run in home.glob("runs/*"):
        if run != run_directory:
            yield from (_item(shard, Path.unlink) for shard in _shards(run / BLOBS_NAME))
            yield from (_item(path, shutil.rmtree) for path in _left_over(run))
    for name in (STANDARD_LIBRARY, DIGITS):
        if (prepared := home / "prepared" / name).is_dir():
            yield _item(prepared, shutil.rmtree)


def _left_over(run: Path) -> Iterator[Path]:
    """What may go of a run that is not trained now: what was given to others, or put aside. Of
    states, it is what is torn, damaged, or of another side of a split swarm, where the same layers
    have states here."""
    yield from filter(Path.is_dir, (run / "offers", run / BLOBS_NAME / QUARANTINE))
    checkpoints = run / "checkpoints"
    if not (found := list_checkpoints(checkpoints)):
        return
    yield from (path for path in step_directories(checkpoints) if not is_begun(path))
    here = {*fullest(found)[0].layers}
    yield from (path for path in checkpoints.glob("damaged-*") if here >= _layers_of(path))
    yield from (it.directory for it in list_checkpoints(run / SET_ASIDE) if here >= {*it.layers})


def _layers_of(damaged: Path) -> set[int]:
    """The layers in a damaged checkpoint, as its manifest says. Where the manifest cannot be read,
    now or by this version: one that nothing else has."""
    if not is_begun(damaged):
        return set()
    try:
        return set(map(int, read_manifest(damaged).layers))
    except UserError:
        return {-1}


def _shards(blobs: Path) -> Iterator[Path]:
    """The data shards of a run, and not what it started from, or lies over."""
    if not blobs.is_dir():
        return
    sizes = {path: size_of(path) for path in blobs.iterdir() if path.is_file()}
    large = [path for path, size_bytes in sizes.items() if size_bytes >= SHARD_LEAST_BYTES]
    small = sizes.keys() - set(large) if large else ()
    given = set(chain.from_iterable(map(_named_by, small)))
    for path in large:
        if path.name not in given and not _starts_with(path, MANIFEST_STARTS_WITH):
            yield path


def _named_by(path: Path) -> frozenset[str]:
    try:
        return named_as_initial(path.read_bytes())
    except OSError:  # removed meanwhile
        return frozenset()


def _starts_with(path: Path, start: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return True


def _item(path: Path, remove: Callable[[Path], None]) -> _Removable:
    try:
        return _Removable(path.stat().st_mtime, path, remove)
    except OSError:  # removed meanwhile by another clean-up
        return _Removable(0.0, path, lambda gone: None)
