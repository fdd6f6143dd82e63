"""What of a run's checkpoints is on this disk and can be loaded, as it is at this moment."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.disk import changed_ns
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.ports import now
from p2p_dtfm.train.data import file_digest
from p2p_dtfm.train.model.checkpoint import (
    Checkpoint,
    CheckpointManifest,
    LayerFile,
    checkpoint_directory,
    fullest,
    layer_path,
    list_checkpoints,
    read_manifest,
    step_of,
    worth_keeping,
)
from p2p_dtfm.train.model.gpt import layer_count

SAVED_TOLD = 4
"""How many of the newest checkpoints others are told of, should all have to go back to one. They
are told of as many of those that are kept for that, and of the fullest, if it is not among
these."""
ASKED_S, ASKED_KEPT = 600.0, 2
"""Checkpoints from which somebody has fetched within this time are in use, at most this many."""

log = logging.getLogger("p2p_dtfm.checkpoints")


class FilesHere:
    """Whoever changes files here calls `changed`, and `look` once files have other names."""

    def __init__(self, root: Path, spec: RunSpec) -> None:
        self._root = root
        self._spec = spec
        self.written_step: int | None = None
        """The step of which layers were written last."""
        self._places: dict[str, tuple[Path, int]] = {}
        """The directory and the layer of each file, by its digest."""
        self._of_ends: frozenset[str] = frozenset()
        self._damaged: set[tuple[int, int, str]] = set()
        """Files that could not be loaded: step, layer and digest."""
        self._changes = 0
        self._seen: tuple[int, int] | None = None
        self._asked_s: dict[Path, float] = {}
        """When a file of a checkpoint was last asked for, the latest at the end."""
        self._saved: tuple[SavedState, ...] = ()
        self.look()
        self._unread = set(self._places)
        """Digests of files that an earlier life has left, and that were not read since."""

    def path_of(self, blob: str) -> Path | None:
        """A layer's file by its digest, for somebody who wants it."""
        place = self._places.get(blob)
        if place is None or not (path := layer_path(*place)).is_file():
            return None
        self._asked_s.pop(path.parent, None)
        self._asked_s[path.parent] = now.monotonic_s()
        return path

    def unread(self, blob: str) -> Callable[[], bool] | None:
        """What a thread has to do before a file is given (`net.streams.blobs.Unread`): read what an
        earlier life has left. A power cut may have put other bytes in its place."""
        here = blob in self._unread and blob in self._places
        return partial(self._is_sound, blob) if here else None

    def _is_sound(self, blob: str) -> bool:
        if (place := self._places.get(blob)) is None:
            return False
        try:
            is_sound = file_digest(layer_path(*place)) == blob
        except OSError:  # its disk may be away
            return False
        if is_sound:
            self._unread.discard(blob)
        else:  # another file may have taken its place by now: that one is not meant
            self._damaged.add((step_of(place[0]), place[1], blob))
            self._places.pop(blob, None)
            self.changed()
        return is_sound

    def asked_lately(self) -> list[Path]:
        """The checkpoints that others fetch from just now."""
        since_s = now.monotonic_s() - ASKED_S
        asked = [(it, at_s) for it, at_s in self._asked_s.items() if at_s > since_s]
        self._asked_s = dict(asked[-ASKED_KEPT:])
        return list(self._asked_s)

    def is_of_ends(self, blob: str) -> bool:
        """Whether this is a file of the first layer, or of the last one."""
        return blob in self._of_ends

    @property
    def saved(self) -> tuple[SavedState, ...]:
        """What can be loaded, newest first, perhaps with the fullest at the end. Read anew when
        that has changed."""
        seen = (self._changes, changed_ns(self._root))
        if seen != self._seen:
            every, there = self._spec.audit.undo_every, self._there()
            if there is None:
                return ()
            found = worth_keeping(there, SAVED_TOLD, every)
            found += [it for it in fullest(there) if it not in found]
            sound = ((it.manifest, self._sound_layers(it)) for it in found)
            self._seen = seen
            self._saved = tuple(SavedState(it.step, it.lineage, n) for it, n in sound if n)
        return self._saved

    def of_run(self) -> list[Checkpoint]:
        """All of this run, newest first. Raises `OSError`."""
        return list_checkpoints(self._root, self._spec.digest())

    def _there(self) -> list[Checkpoint] | None:
        """The same; None while the disk cannot be looked at. It may be another machine's."""
        try:
            return self.of_run()
        except OSError as error:
            log.debug("what is saved cannot be looked at: %s", error)
            return None

    def _sound_layers(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """The layers that are not known to be damaged."""
        return tuple(sorted(self._sound_files(checkpoint.manifest)))

    def _sound_files(self, manifest: CheckpointManifest) -> dict[int, LayerFile]:
        """Those of a manifest that are not known to be damaged, by layer."""
        return {
            int(layer): file
            for layer, file in manifest.layers.items()
            if (manifest.step, int(layer), file.digest) not in self._damaged
        }

    def files_of(self, step: int) -> CheckpointFiles | None:
        """What others are told of a checkpoint; None if it is not here."""
        try:
            manifest = read_manifest(checkpoint_directory(self._root, step))
        except UserError:
            return None
        if manifest.run_digest != self._spec.digest():
            return None
        sound = self._sound_files(manifest)
        files = {layer: (file.digest, file.bytes) for layer, file in sound.items()}
        return CheckpointFiles(step, manifest.lineage, files)

    def mark_damaged(self, step: int, layer: int) -> None:
        """A file could not be loaded: nobody is told of it any more, in this life."""
        if (told := self.files_of(step)) is not None and layer in told.files:
            self._damaged.add((step, layer, told.files[layer][0]))
        self.changed()
        self.look()

    def mark_written(self, step: int, layers: set[int]) -> None:
        """These layers' files are written anew."""
        self.written_step = step
        damaged = tuple(self._damaged)  # a thread that reads files may add to it
        self._damaged = {it for it in damaged if it[0] != step or it[1] not in layers}

    def changed(self) -> None:
        """`saved` is out of date."""
        self._changes += 1

    def look(self) -> None:
        """Learn by which digests files are asked for now."""
        if (there := self._there()) is None:
            return
        found = [
            (file.digest, layer, checkpoint.directory)
            for checkpoint in there
            for layer, file in self._sound_files(checkpoint.manifest).items()
        ]
        ends = (0, layer_count(self._spec) - 1)
        self._places = {digest: (where, layer) for digest, layer, where in found}
        self._of_ends = frozenset(digest for digest, layer, _ in found if layer in ends)
