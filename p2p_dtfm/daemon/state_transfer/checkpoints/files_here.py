"""What of a run's checkpoints is on this disk and can be loaded, as it is at this moment."""

from pathlib import Path

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.disk import changed_ns
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.checkpoint import (
    Checkpoint,
    fullest,
    layer_path,
    list_checkpoints,
    worth_keeping,
)
from p2p_dtfm.train.model.gpt import layer_count

SAVED_TOLD = 4
"""How many of the newest checkpoints others are told of, should all have to go back to one. They
are told of as many of those that are kept for that, and of the fullest, if it is not among
these."""
ASKED_S, ASKED_KEPT = 600.0, 2
"""Checkpoints from which somebody has fetched within this time are in use, at most this many."""


class FilesHere:
    """Whoever changes files here calls `changed`, and `look` once files have other names."""

    def __init__(self, root: Path, spec: RunSpec) -> None:
        self._root = root
        self._spec = spec
        self._paths: dict[str, Path] = {}
        self._of_ends: frozenset[str] = frozenset()
        self._damaged: set[tuple[int, int]] = set()
        """Steps and layers whose files could not be loaded."""
        self._changes = 0
        self._seen: tuple[int, int] | None = None
        self._asked_s: dict[Path, float] = {}
        """When a file of a checkpoint was last asked for, the latest at the end."""
        self._saved: tuple[SavedState, ...] = ()
        self.look()

    def path_of(self, blob: str) -> Path | None:
        """A layer's file by its digest, for somebody who wants it."""
        path = self._paths.get(blob)
        if path is None or not path.is_file():
            return None
        self._asked_s.pop(path.parent, None)
        self._asked_s[path.parent] = now.monotonic_s()
        return path

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
            every = self._spec.audit.undo_every
            there = list_checkpoints(self._root)
            found = worth_keeping(there, SAVED_TOLD, every)
            found += [it for it in fullest(there) if it not in found]
            sound = ((it.manifest, self._sound_layers(it)) for it in found)
            self._seen = seen
            self._saved = tuple(SavedState(it.step, it.lineage, n) for it, n in sound if n)
        return self._saved

    def _sound_layers(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """The layers that are not known to be damaged."""
        step = checkpoint.manifest.step
        return tuple(layer for layer in checkpoint.layers if (step, layer) not in self._damaged)

    def mark_damaged(self, step: int, layer: int) -> None:
        """A file could not be loaded: nobody is told of it any more, in this life."""
        self._damaged.add((step, layer))
        self.changed()
        self.look()

    def mark_written(self, step: int, layers: set[int]) -> None:
        """These layers' files are written anew."""
        self._damaged -= {(step, layer) for layer in layers}

    def changed(self) -> None:
        """`saved` is out of date."""
        self._changes += 1

    def look(self) -> None:
        """Learn by which digests files are asked for now."""
        found = [
            (file.digest, int(layer), checkpoint.directory)
            for checkpoint in list_checkpoints(self._root)
            for layer, file in checkpoint.manifest.layers.items()
            if (checkpoint.manifest.step, int(layer)) not in self._damaged
        ]
        ends = (0, layer_count(self._spec) - 1)
        self._paths = {digest: layer_path(where, layer) for digest, layer, where in found}
        self._of_ends = frozenset(digest for digest, layer, _ in found if layer in ends)
