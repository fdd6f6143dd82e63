"""The samples of a run, out of shards of tokens.

A sample is a window of context + 1 tokens: inputs are all but its last token, targets all but its
first. Windows do not overlap, and none straddles two shards: so each sample needs exactly one
shard, at the price of at most `context` tokens at the end of each.
"""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.sample_order import sample_indices_of
from p2p_dtfm.train.data.manifest import Manifest, ShardEntry, Split
from p2p_dtfm.train.data.shard_files import (
    ShardDamaged,
    ShardReader,
    ShardUnreadable,
    open_shard,
)

UNCOUNTED = -100
"""Stands in place of a target that does not count; torch's cross entropy leaves it out."""
_OPEN_SHARDS = 64
"""Shards that are open at once, as each takes a file descriptor."""


class ShardMissing(Exception):
    """The shard is not on this machine. Fetch it by its digest and try again."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"data shard {digest} is not here yet")


class Dataset:
    """Training and held-out samples of a manifest. May be used from several threads."""

    def __init__(
        self, manifest: Manifest, shard_paths: Callable[[str], Path | None], context: int
    ) -> None:
        """`shard_paths` says where the shard of a digest lies, or None if it is not here.

        Raises `UserError` if the text is too short for one window in either split.
        """
        assert context > 0
        if manifest.sequence_tokens not in (0, context + 1):
            made_for = manifest.sequence_tokens - 1
            raise UserError(
                f"the conversations were prepared in sequences of {made_for} tokens, and the model "
                f"reads {context}",
                (
                    f"set model.context to {made_for}",
                    f"prepare them anew, with --context {context}",
                ),
            )
        self.manifest = manifest
        self.context = context
        self._shard_paths = shard_paths
        self._train = _Windows(manifest, "train", context + 1)
        self._held_out = _Windows(manifest, "held_out", context + 1)
        self._verified: set[str] = set()
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        self._ahead: list[dict[tuple[Split, int], np.ndarray]] = [{}, {}]
        """Windows that were read ahead: for this peer's own work, and for another peer's."""
        self._lock = threading.Lock()

    @property
    def sample_count(self) -> int:
        """Training samples in one pass."""
        return self._train.count

    @property
    def held_out_count(self) -> int:
        """Windows in the held-out split."""
        return self._held_out.count

    def require_fits(self, spec: RunSpec) -> None:
        """Refuse a run whose model cannot read these tokens. Raises `UserError`."""
        self._require_vocabulary(spec)
        if spec.data.manifest and spec.data.manifest != self.manifest.digest():
            raise UserError(
                f"the data are {self.manifest.digest()[:12]}, but the run wants "
                f"{spec.data.manifest[:12]}",
                "let the daemon fetch the run's own data, or found a new swarm",
            )
        if self.manifest.sequence_tokens and spec.sync.mode == "local":
            raise UserError(
                "the data are conversations, of which only answers count, and sync.mode is "
                '"local": inner steps of unlike weight would be averaged as if they were alike',
                'set sync.mode = "every_step"',
            )
        if self.manifest.sequence_tokens and (spec.audit.rate or spec.data.masks_documents):
            name = "audit.rate" if spec.audit.rate else 'data.packing = "documents"'
            raise UserError(
                f"{name} does not know conversations, of which only answers count",
                f"leave {name} out of the run spec",
            )
        assert spec.model.context == self.context

    def sample_indices(self, spec: RunSpec, step: int, microbatch: int) -> tuple[int, ...]:
        """The training samples of a microbatch. Steps and microbatches count from 0."""
        return sample_indices_of(
            spec.seed,
            step,
            microbatch,
            spec.batch.microbatch,
            spec.batch.global_batch,
            self.sample_count,
        )

    def held_out_indices(self, spec: RunSpec, index: int) -> tuple[int, ...]:
        """The held-out windows of evaluation microbatch `index`: fixed, and spread evenly.

        If the run asks for more than there are, all are used, some more than once.
        """
        assert 0 <= index < spec.evaluation_microbatches
        first = index * spec.batch.microbatch
        return tuple(
            place * self.held_out_count // spec.evaluation.sequences
            for place in range(first, first + spec.batch.microbatch)
        )

    def counted(self, spec: RunSpec, step: int) -> int:
        """How many targets of a step count."""
        if not self.manifest.sequence_tokens:
            return spec.tokens_per_step
        microbatches = range(spec.microbatches_per_step)
        indices = (n for m in microbatches for n in self.sample_indices(spec, step, m))
        return sum(map(self._train.counted, indices))

    def held_out_counted(self, spec: RunSpec) -> int:
        """How many targets of an evaluation count."""
        if not self.manifest.sequence_tokens:
            return spec.evaluation.sequences * self.context
        microbatches = range(spec.evaluation_microbatches)
        indices = (n for m in microbatches for n in self.held_out_indices(spec, m))
        return sum(map(self._held_out.counted, indices))

    def shards_of(self, sample_indices: Iterable[int]) -> set[str]:
        """Digests of the shards that hold these training samples."""
        return {self._train.locate(index)[0].digest for index in sample_indices}

    def held_out_shards(self, spec: RunSpec) -> set[str]:
        """Digests of the shards that evaluation reads."""
        return {
            self._held_out.locate(window)[0].digest
            for index in range(spec.evaluation_microbatches)
            for window in self.held_out_indices(spec, index)
        }

    def open_shards(self, digests: Iterable[str]) -> None:
        """Open shards before they are needed; this verifies them.

        Raises `ShardMissing`, `ShardDamaged` and `ShardUnreadable`.
        """
        entries = {shard.digest: shard for shard in self.manifest.shards}
        for digest in sorted(digests):
            self._opened(entries[digest])

    def read_ahead(
        self,
        spec: RunSpec,
        step: int,
        microbatches: Iterable[int],
        *,
        held_out: bool,
        of_another: bool = False,
    ) -> None:
        """Read the windows of these microbatches of a step, and of evaluation, into memory. They
        stay there until others are asked for, so that nothing fails in the middle of the step.

        Raises `ShardMissing`, `ShardDamaged` and `ShardUnreadable`.
        """
        evaluated = range(spec.evaluation_microbatches if held_out else 0)
        asked = [
            *((self._train, n) for m in microbatches for n in self.sample_indices(spec, step, m)),
            *((self._held_out, n) for m in evaluated for n in self.held_out_indices(spec, m)),
        ]
        self._ahead[of_another] = {
            (windows.split, index): self._window(windows, index) for windows, index in asked
        }

    def microbatch(
        self, spec: RunSpec, step: int, microbatch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a training microbatch, int64 [b, t] each.

        Raises `ShardMissing`, `ShardDamaged` for a shard that is corrupt and `ShardUnreadable`.
        """
        self._require_vocabulary(spec)
        return self._read(self._train, self.sample_indices(spec, step, microbatch))

    def held_out_microbatch(self, spec: RunSpec, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for evaluation microbatch `index`."""
        self._require_vocabulary(spec)
        return self._read(self._held_out, self.held_out_indices(spec, index))

    def _require_vocabulary(self, spec: RunSpec) -> None:
        if self.manifest.vocabulary > spec.model.vocabulary:
            raise UserError(
                f"the data have a vocabulary of {self.manifest.vocabulary}, the model only "
                f"{spec.model.vocabulary}",
                (
                    f"set model.vocabulary to {self.manifest.vocabulary}",
                    f"prepare the data with a vocabulary of {spec.model.vocabulary}",
                ),
            )

    def _read(self, windows: "_Windows", indices: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        length = self.context + 1
        samples = np.empty((len(indices), length), dtype=np.int64)
        for row, index in enumerate(indices):
            samples[row] = self._window(windows, index)
        if not self.manifest.sequence_tokens:
            return samples[:, :-1].copy(), samples[:, 1:].copy()
        tokens = samples >> 1
        targets = np.where(samples[:, 1:] & 1, tokens[:, 1:], UNCOUNTED)
        return tokens[:, :-1].copy(), targets

    def _window(self, windows: "_Windows", index: int) -> np.ndarray:
        """A window as its shard has it, [context + 1]."""
        for ahead in self._ahead:
            if (window := ahead.get((windows.split, index))) is not None:
                return window
        shard, start = windows.locate(index)
        try:
            return self._opened(shard).read(start, self.context + 1)
        except (ShardDamaged, ShardUnreadable):
            with self._lock:  # a file fetched in its place, or mounted again, is opened anew
                self._open.pop(shard.digest, None)
                self._verified.discard(shard.digest)
            raise

    def _opened(self, entry: ShardEntry) -> ShardReader:
        """The open shard; its hash is checked when it is opened for the first time."""
        with self._lock:
            shard = self._open.get(entry.digest)
            if shard is None:
                shard = self._open_shard(entry)
                self._open[entry.digest] = shard
                if len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(entry.digest)
            return shard

    def _open_shard(self, shard: ShardEntry) -> ShardReader:
        path = self._shard_paths(shard.digest)
        if path is None:
            raise ShardMissing(shard.digest)
        opened = open_shard(
            path,
            shard,
            self.manifest.token_type,
            self.manifest.stored_values,
            verified=shard.digest in self._verified,
        )
        self._verified.add(shard.digest)
        return opened


class _Windows:
    """The windows of one split, numbered from 0 in the order of its shards."""

    def __init__(self, manifest: Manifest, split: Split, length: int) -> None:
        self.split: Split = split
        self._length = length
        self._shards = [shard for shard in manifest.shards_in(split) if shard.tokens >= length]
        self._ends = list(accumulate(shard.tokens // length for shard in self._shards))
        self.count = self._ends[-1] if self._ends else 0
        if self.count == 0:
            raise UserError(
                f"the {split.replace('_', '-')} text has no shard with one window of {length} "
                "tokens",
                ("prepare more text, in larger shards", "choose a smaller model.context"),
            )

    def counted(self, index: int) -> int:
        """How many tokens of a window count, where not all do."""
        shard, start = self.locate(index)
        return shard.counted[start // self._length]

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that holds window `index`, and the window's first token in it."""
        assert 0 <= index < self.count, (index, self.count)
        place = bisect.bisect_right(self._ends, index)
        before = self._ends[place - 1] if place else 0
        return self._shards[place], (index - before) * self._length
