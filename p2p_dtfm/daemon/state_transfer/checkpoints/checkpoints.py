"""Checkpoints of a swarm: each peer saves the layers it holds and fetches the others' files.

So that every peer ends with a whole model, files are announced by their digest and fetched as
blobs in the background. A checkpoint that cannot be written is a warning; training goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.lineage import epochs_of
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.recovery.contradictions import AgreedState
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.machine.disk import SET_ASIDE
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.announced_files import AnnouncedFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.disk_room import DiskRoom, NoRoom
from p2p_dtfm.daemon.state_transfer.checkpoints.files_here import SAVED_TOLD, FilesHere
from p2p_dtfm.daemon.state_transfer.checkpoints.layer_fetches import LayerFetches
from p2p_dtfm.daemon.state_transfer.checkpoints.layer_writes import LayerWrites, report_bug
from p2p_dtfm.daemon.state_transfer.checkpoints.pruning import prune, prune_parts
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.ports import now, rarely
from p2p_dtfm.train.model.checkpoint import (
    Checkpoint,
    CheckpointFailed,
    checkpoint_directory,
    is_begun,
    load_layer,
    put_aside,
    read_manifest,
    take_back,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState

log = logging.getLogger("p2p_dtfm.checkpoints")
SET_ASIDE_KEPT = 2
RETRY_S, LONGEST_REST_S = 2.0, 30.0
"""How long to rest between tries to fetch what stays incomplete."""
TOLD_EVERY_S = 5.0
TOLD_LAYER_BYTES = 100
TELLING_BYTES_PER_S = 50_000
"""While files come, others are told of them no more often than this, and with no more bytes to all
of them. Each telling takes the names of all files."""


class Checkpoints:
    """`announce(files)` tells the other members what is on disk here.

    `saves_itself()` says whether this peer has a stage, and so makes checkpoints of its own.
    """

    def __init__(
        self,
        root: Path,
        spec: RunSpec,
        blobs: BlobExchange,
        compute: Compute,
        announce: Callable[[CheckpointFiles], None],
        saves_itself: Callable[[], bool],
        troubles: Troubles | None = None,
    ) -> None:
        self._root = root
        self._spec = spec
        self._blobs = blobs
        self._compute = compute
        self._announce = announce
        self._saves_itself = saves_itself
        self._troubles = troubles or Troubles()
        self._announced = AnnouncedFiles(spec)
        self.agree = self._announced.agree
        self._here = FilesHere(root, spec)
        self.is_of_ends, self.unread = self._here.is_of_ends, self._here.unread
        self._busy = asyncio.Lock()
        self._writes = LayerWrites(spec, compute, self._busy, self._here)
        self._room = DiskRoom(root, spec, self._troubles)
        self.fetches = LayerFetches(blobs, self._announced, self._room, self._busy)
        self.withheld: frozenset[int] = frozenset()
        """Layers that the run does not leave to this peer: a whole checkpoint has all others."""
        self._committed_step = -1
        self._lineage = ""
        """The lineage from which that step started."""
        self._epoch = 0
        """The epoch for which this disk was looked through for what was taken back."""
        self._completing: asyncio.Task[None] | None = None
        self._taking_back: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._incomplete: set[int] = set()
        """Steps of which somebody's file did not come, as was logged."""
        self._unsaved: set[int] = set()
        """The last step that was to be saved, if this disk took nothing of it."""
        self._untold = False
        """Whether something came that others have not heard of yet."""
        self._under_way: Path | None = None
        """The checkpoint that is completed now."""
        self._told_again_s = 0.0
        self.whole_step: int | None = None
        """The newest step, on the way to where training is, of which every layer's file is here."""
        self._reached = 1 << 62
        """How far training has come since it last went back: all later steps are lost."""

    def path_of(self, blob: str) -> Path | None:
        """A checkpoint's layer file by its digest, for the blob exchange."""
        return self._here.path_of(blob)

    @property
    def saved(self) -> tuple[SavedState, ...]:
        """What can be loaded from this disk, newest first."""
        return self._here.saved

    async def load(self, layer: int, step: int) -> LayerState:
        """A layer as it was saved after `step` steps. Raises `UserError`; then nobody is told of
        that file any more, in this life."""
        directory = checkpoint_directory(self._root, step)
        try:
            return await self._compute.run(load_layer, directory, layer)
        except UserError:
            self._here.mark_damaged(step, layer)
            raise

    async def newest_whole(self) -> tuple[Checkpoint, dict[int, LayerState]] | None:
        """The newest on this disk that has all layers, loaded. Newer ones that are damaged, as a
        power cut may leave them, are put aside. Raises `UserError` where none can be loaded, and
        leaves all of them as they are: the trouble may pass, or have another reason."""
        damaged: list[tuple[Checkpoint, UserError]] = []
        for checkpoint in self._here.of_run():
            if len(checkpoint.layers) < layer_count(self._spec):
                continue
            try:
                states = {
                    layer: await self._compute.run(load_layer, checkpoint.directory, layer)
                    for layer in checkpoint.layers
                }
            except UserError as error:
                damaged.append((checkpoint, error))
                continue
            if damaged:
                await self._put_aside(damaged)
            return checkpoint, states
        if damaged:
            raise damaged[0][1]
        return None

    async def _put_aside(self, damaged: list[tuple[Checkpoint, UserError]]) -> None:
        directories = [checkpoint.directory for checkpoint, _ in damaged]
        try:
            async with self._busy:
                places = await asyncio.to_thread(put_aside, directories)
            for where, (checkpoint, error) in zip(places, damaged, strict=True):
                step, cause = checkpoint.manifest.step, error.cause
                log.warning("the checkpoint of step %d is put aside as %s: %s", step, where, cause)
        except CheckpointFailed as error:
            log.warning("damaged checkpoints stay where they are: %s", error)
        self._here.changed()
        self._here.look()

    def refused(self, step: int) -> bool:
        """Whether this disk took nothing of that step, if it was the last that was to be saved."""
        return step in self._unsaved

    def has_no_room(self, step: int) -> bool:
        """Whether the whole model of that step is not here, and this disk does not take it."""
        return self._room.is_short and self.whole_step != step

    async def save(self, step: int, states: dict[int, LayerState], lineage: str = "") -> None:
        """Write these layers as they are after `step` committed steps."""
        held, self._reached = list(states.values()), max(self._reached, step)
        await rarely.lingers("save late")
        written = await self._writes.unbroken(partial(self._saved, step, held, lineage))
        if written is not None:
            await self._files_changed(step)
        if states:
            self._room.saves = () if step >= self._spec.total_steps else tuple(states)
            if self.whole_step != step:
                await self._prune_parts(step)
            if written is not None:
                self._complete_later()

    async def _saved(self, step: int, held: list[LayerState], lineage: str) -> set[int] | None:
        """Which layers the disk took; None if it took nothing."""
        try:
            written = await self._writes.write(self._root, step, held, lineage)
        except CheckpointFailed as error:
            if step not in self._unsaved:  # else it is tried again
                log.warning("%s", error)
            self._unsaved = {step}
            self._troubles.tell(
                "checkpoint",
                f"checkpoints cannot be written: {error.cause}",
                f"free space on the disk of {self._root}, or make it writable",
            )
            return None
        self._troubles.over("checkpoint")
        self._unsaved.discard(step)
        self._here.mark_written(step, written)
        self._here.changed()
        return written

    async def set_aside(
        self, states: dict[int, LayerState], step: int, lineage: str
    ) -> Path | None:
        """Keep what a side of a split swarm had come to, where training never looks for it.

        Only the layers that are here and as new as `step`; None if there are none, or no room.
        """
        self.whole_step = None
        kept = [state for state in states.values() if state.version == step > 0]
        if not kept:
            return None
        return await self._writes.unbroken(partial(self._put_by, step, kept, lineage))

    async def _put_by(self, step: int, kept: list[LayerState], lineage: str) -> Path | None:
        root = self._root.parent / SET_ASIDE
        try:
            await self._writes.write(root, step, kept, lineage)
            await asyncio.to_thread(prune, root, SET_ASIDE_KEPT)
        except (CheckpointFailed, OSError) as error:
            log.warning("%s", error)
            return None
        return checkpoint_directory(root, step)

    async def take_back(self, step: int, lineage: str) -> None:
        """Training goes on from `step`, without what a barred peer has done since: that is removed
        here and never started from. A peer that was away calls this when it is back. `goes_on_from`
        is to be called before: by the end of this, later steps may be saved."""
        self._epoch = epochs_of(lineage).number
        async with self._busy:
            try:
                gone = await asyncio.to_thread(take_back, self._root, lineage, step)
            except (CheckpointFailed, OSError) as error:
                log.warning("what was taken back stays on this disk: %s", error)
                return
        if gone:
            log.info("removes %s that were taken back", counted(len(gone), "checkpoint"))
        self._here.changed()
        self._here.look()

    def goes_on_from(self, step: int, at: Callable[[int], str | None]) -> None:
        """Training goes on from `step`: later steps are not whole on its way, even if their files
        come. `at`: the lineage of each step on that way, as far as it is remembered."""
        self._reached = min(self._reached, step)
        if self.whole_step is not None and self.whole_step > step:
            there = (it for it in self.saved if it.version <= step and it.lineage == at(it.version))
            self.whole_step = next((it.version for it in there if self._are_all(it.layers)), None)

    def remote_files(self, sender: str, message: CheckpointFiles) -> None:
        """Another member has these files. Raises `PeerFault` for impossible ones."""
        is_news = self._announced.take(sender, message, self._committed_step)
        if is_news or self._completing is None or self._completing.done():
            self._complete_later()

    def committed(self, step: int, agreed: Mapping[int, AgreedState], lineage: str) -> None:
        """A step is committed that started from this lineage. `agreed`: the states from which it
        starts, by layer, as all holders say them in its Prepared; or none."""
        self._committed_step, self._lineage = step, lineage
        self._reached = max(self._reached, step)
        if not self._saves_itself():  # no write will come with which the trouble would end
            self._troubles.over("checkpoint")
        if not self._saves_itself() or step >= self._spec.total_steps:
            self._room.saves = ()
        if epochs_of(lineage).number > self._epoch:  # this peer was away meanwhile
            self.goes_on_from(step, {step: lineage}.get)
            self._taking_back = asyncio.create_task(self.take_back(step, lineage))
            self._taking_back.add_done_callback(report_bug)
        self.agree(step, agreed)
        if step in self._announced:
            self._complete_later()

    def safe_step(self, others: Collection[str]) -> int | None:
        """The newest whole checkpoint that one of `others` has, too: without this peer they could
        not go on from one that it alone has. With nobody else it is this disk's."""
        newest = self.whole_step or 0
        whole = [it.version for it in self.saved if self._are_all(it.layers)]
        return next((it for it in whole if it <= newest and self._is_with(it, others)), None)

    def _is_with(self, step: int, others: Collection[str]) -> bool:
        return not others or any(self._announced.all_have(step, {other}) for other in others)

    def whole_at(self, step: int, members: set[str]) -> bool:
        """Whether this peer and all `members` have every layer of that step."""
        return self.whole_step == step and self._announced.all_have(step, members)

    def _complete_later(self) -> None:
        self._news.set()
        if self._completing is None or self._completing.done():
            self._completing = asyncio.create_task(self._complete())
            self._completing.add_done_callback(report_bug)

    async def _complete(self) -> None:
        """Ask again for what did not come: after the last step nothing else would lead to that."""
        rest_s = RETRY_S
        while self._news.is_set():
            self._news.clear()
            try:
                if await self._complete_steps():
                    continue
            except OSError as error:  # the disk cannot be looked at
                log.debug("no checkpoint is completed now: %s", error)
            await asyncio.sleep(RETRY_S)  # however often others tell of what came to them
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s - RETRY_S):
                    await self._news.wait()
            self._news.set()
            rest_s = min(2 * rest_s, LONGEST_REST_S)

    async def _complete_steps(self) -> bool:
        """Whether all came that is offered of any step."""
        is_all, announced = True, self._announced.newest_first()
        self._incomplete &= {step for step, _ in announced}  # nobody tells of other steps any more
        for step, told in announced:
            if step > min(self._committed_step, self._reached):
                continue  # its digests are told with the next step
            directory = checkpoint_directory(self._root, step)
            saves_itself = self._saves_itself() and step not in self._unsaved
            if step == self._spec.total_steps and not saves_itself:
                # in the end a spare wants the model, and a peer that had no room for its layers
                await self._begin(directory, step)
            if (self.whole_step is not None and step <= self.whole_step) or not is_begun(directory):
                continue
            self._under_way = directory
            is_all &= await self._complete_step(step, told, directory)
        self._under_way = None
        if is_all:
            self._room.over()
        return is_all

    async def _complete_step(
        self, step: int, told: Mapping[str, CheckpointFiles], directory: Path
    ) -> bool:
        """Whether all came that is offered of a step. Others hear of what came, even if not all
        did. Of nothing new they do not hear, else all would answer one another for ever."""
        first_s = now.monotonic_s() + TOLD_EVERY_S
        self._told_again_s, self._untold = max(self._told_again_s, first_s), False
        came = partial(self._layer_came, step, len(told))
        fetch = partial(self._fetched, directory, told, came)
        if (failure := await fetch()) is not None and self._room.is_short:
            # no checkpoint may be saved any more that would make old ones go
            await self._make_room(step)
            failure = await fetch()
        if self._untold:
            await self._files_changed(step)
        if failure is not None and not isinstance(failure, NoRoom):
            level = logging.DEBUG if step in self._incomplete else logging.WARNING
            log.log(level, "checkpoint of step %d stays incomplete: %s", step, failure)
            self._incomplete.add(step)
        return failure is None

    async def _fetched(
        self,
        directory: Path,
        told: Mapping[str, CheckpointFiles],
        came: Callable[[], Awaitable[None]],
    ) -> Exception | None:
        """Why something did not come; None if all came."""
        try:
            return await self.fetches.complete(directory, told, self.withheld, came)
        except (UserError, OSError, NoRoom) as error:
            return error

    async def _layer_came(self, step: int, others: int) -> None:
        """Others may have the layer from here at once: its saver has one line for all of them."""
        self._untold = True
        if (now_s := now.monotonic_s()) >= self._told_again_s:
            told_bytes = others * layer_count(self._spec) * TOLD_LAYER_BYTES
            self._told_again_s = now_s + max(TOLD_EVERY_S, told_bytes / TELLING_BYTES_PER_S)
            self._untold = False
            await self._files_changed(step)

    async def _begin(self, directory: Path, step: int) -> None:
        """Begin a checkpoint of the step that is committed now, on its lineage."""
        try:
            is_right = read_manifest(directory).lineage == self._lineage
        except UserError:
            is_right = False
        if not is_right:
            await self.save(step, {}, self._lineage)

    def tell(self, step: int) -> Collection[int] | None:
        """Tell the others which layers of a step are here, and return them; None if none is."""
        if (files := self._here.files_of(step)) is None:
            return None
        self._announce(files)
        return files.files

    async def _files_changed(self, step: int) -> None:
        self._here.look()
        if (files := self.tell(step)) is None:
            return
        if self._are_all(files) and step <= self._reached:
            self.whole_step = max(step, self.whole_step or 0)
            await self._prune(step)
        self._here.changed()

    def _are_all(self, layers: Iterable[int]) -> bool:
        """Whether these are all layers that the run leaves to this peer."""
        return self.withheld.union(layers) == set(range(layer_count(self._spec)))

    async def _prune(self, made: int) -> None:
        keep, every = self._spec.checkpoint.keep, self._spec.audit.undo_every
        await self._remove(prune, self._root, keep, made, every)

    async def _prune_parts(self, made: int) -> None:
        """Remove parts that are too old. All may go back to what others are told of, so it stays
        until a whole one takes its place; and so does what is in use. As many whole ones stay as
        ever, but only one where there is no room for the next."""
        keep, every = self._spec.checkpoint.keep, self._spec.audit.undo_every
        newest, full = max(keep, SAVED_TOLD), 1 if self._room.is_short else keep
        await self._remove(prune_parts, self._root, made, newest, full, every, self.in_use())

    async def _make_room(self, made: int) -> None:
        """Make room for a whole one. Of those before it the newest that can be loaded stays: others
        are told of it, too, so it takes the place of all that is older."""
        await self._prune_parts(made)
        if (whole := self.safe_step(())) is not None and whole < made:
            every = self._spec.audit.undo_every
            await self._remove(prune, self._root, 1, whole, every, self.in_use())
        self._here.look()
        self._here.changed()

    def in_use(self) -> list[Path]:
        """Checkpoints that are fetched here or from here just now, and the newest on the way of
        training. Those of later steps may be of a side of a split swarm that was given up."""
        newest = (it for it in (self._here.written_step, self.whole_step) if it is not None)
        on_the_way = (checkpoint_directory(self._root, it) for it in newest if it <= self._reached)
        return [*on_the_way, *self._here.asked_lately(), *filter(None, [self._under_way])]

    async def _remove(self, pruned: Callable[..., list[Path]], *given: Any) -> None:
        try:
            async with self._busy:
                await asyncio.to_thread(pruned, *given, run=self._spec.digest())
        except (CheckpointFailed, OSError) as error:
            log.warning("old checkpoints stay: %s", error)

    async def close(self) -> None:
        for task in (self._completing, self._taking_back):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._writes.close()
