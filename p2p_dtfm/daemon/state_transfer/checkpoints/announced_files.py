"""What other members say that they have saved, and which of it is what all have agreed on.

It remembers a few steps for each of a bounded number of members: what one member tells takes the
place of nobody else's.
"""

from collections import Counter
from collections.abc import Mapping

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import is_lineage, unmarked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.recovery.contradictions import AgreedState
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.train.data import is_digest
from p2p_dtfm.train.model.checkpoint import CheckpointManifest
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import state_bytes_limit

STEPS_REMEMBERED = 4
"""Steps that are remembered of each member."""
SENDERS_REMEMBERED = 1024
STEPS_AHEAD = 64
"""How many steps further another member may have come when it announces what it has saved. Of a
member that computes alone the others hear up to sixteen steps at a time
(`daemon.peers.held_back`)."""
NO_FILE = bytes(DIGEST_BYTES)
"""The beginning of no file's digest."""


class AnnouncedFiles:
    """Announced files by step and member."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._of_steps: dict[int, dict[str, CheckpointFiles]] = {}
        self._told: dict[str, dict[int, None]] = {}
        """The steps of each sender, the one told last at the end; the senders are in the same
        order."""
        self._agreed: dict[int, Mapping[int, AgreedState]] = {}
        self.completed_step = -1
        """The step whose files are fetched now, or were last. What was agreed on of it is kept:
        whoever has a file alone may take longer to give it than later steps take to be saved."""

    def take(self, sender: str, message: CheckpointFiles, committed_step: int) -> bool:
        """Another member has these files; `committed_step` is -1 while no step has committed.
        Returns whether that is news: a message of fewer files may come after one of all. Raises
        `PeerFault` for impossible ones."""
        self._require_possible(sender, message, committed_step)
        before = self._of_steps.get(message.step, {}).get(sender)
        is_same = before is not None and before.lineage == message.lineage
        if before is not None and is_same and message.files.items() < before.files.items():
            return False
        steps = self._told.pop(sender, {})
        self._told[sender] = steps
        steps.pop(message.step, None)
        steps[message.step] = None
        self._of_steps.setdefault(message.step, {})[sender] = message
        if len(steps) > STEPS_REMEMBERED:
            self._forget(sender, next(iter(steps)))
        if len(self._told) > SENDERS_REMEMBERED:
            oldest = next(iter(self._told))
            for step in list(self._told[oldest]):
                self._forget(oldest, step)
            del self._told[oldest]
        return message != before

    def _require_possible(self, sender: str, message: CheckpointFiles, committed_step: int) -> None:
        if not 0 <= message.step <= self._spec.total_steps:
            raise PeerFault(f"a checkpoint of step {message.step}", sender)
        for layer, (digest, size_bytes) in message.files.items():
            if not 0 <= layer < layer_count(self._spec):
                raise PeerFault(f"a checkpoint file of layer {layer}", sender)
            if not 0 < size_bytes <= state_bytes_limit(self._spec, layer):
                raise PeerFault(f"a checkpoint file of {size_bytes} bytes", sender)
            if not is_digest(digest):
                raise PeerFault("a checkpoint file under a name that is no digest", sender)
        if not is_lineage(message.lineage):
            raise PeerFault("a checkpoint of a lineage that is no digest", sender)
        if message.step > committed_step + STEPS_AHEAD >= STEPS_AHEAD:
            raise PeerFault(f"a checkpoint of step {message.step}, which is far ahead", sender)

    def _forget(self, sender: str, step: int) -> None:
        """Forget what a sender has of a step. A fetch from it that is under way goes on."""
        del self._told[sender][step]
        rest = {peer: item for peer, item in self._of_steps.pop(step).items() if peer != sender}
        if rest:
            self._of_steps[step] = rest

    def __contains__(self, step: int) -> bool:
        return step in self._of_steps

    def newest_first(self) -> list[tuple[int, Mapping[str, CheckpointFiles]]]:
        """By step: who has announced what of it. An earlier list keeps what is forgotten later."""
        return sorted(self._of_steps.items(), reverse=True)

    def all_have(self, step: int, members: set[str]) -> bool:
        """Whether all `members` have every layer of that step that the run leaves to them."""
        layers = set(range(layer_count(self._spec)))
        theirs, privacy = self._of_steps.get(step, {}), self._spec.privacy
        return all(
            member in theirs
            and layers - privacy.withheld(member, len(layers)) <= theirs[member].files.keys()
            for member in members
        )

    def agree(self, step: int, agreed: Mapping[int, AgreedState]) -> None:
        """The Prepared of `step` name these states from which it starts, by layer; or none."""
        if not agreed:
            return
        self._agreed[step] = agreed
        for oldest in sorted(self._agreed)[:-STEPS_REMEMBERED]:
            if oldest != self.completed_step:
                del self._agreed[oldest]

    def offers_of(
        self, layer: int, manifest: CheckpointManifest, told: Mapping[str, CheckpointFiles]
    ) -> dict[str, tuple[str, int]]:
        """Which of the members that have `told` offer this layer for a checkpoint, each as which
        file.

        Of a step of which this peer has heard nothing, as before it was started again, these are
        the files that most of them name: else one member could give what no holder ever had.
        """
        offers = {
            peer: item.files[layer]
            for peer, item in told.items()
            if layer in item.files
            and unmarked(item.lineage) == unmarked(manifest.lineage)
            and self._is_that(manifest.step, layer, item.files[layer][0])
        }
        if layer in self._agreed.get(manifest.step, {}):
            return offers
        named_by = Counter(offers.values())
        most = max(named_by.values(), default=0)
        return {peer: file for peer, file in offers.items() if named_by[file] == most}

    def _is_that(self, step: int, layer: int, blob: str) -> bool:
        """Whether a file is what the layer's holders have said that they have. If nobody has said
        so, it may be."""
        said = self._agreed.get(step, {}).get(layer)
        return said is None or bytes.fromhex(blob)[: len(said.file)] == said.file

    def parameters_of(self, step: int, layer: int) -> bytes:
        """The digest of the parameters that the layer's holders have claimed; empty if unknown."""
        said = self._agreed.get(step, {}).get(layer)
        return said.parameters if said is not None else b""

    def refuse(self, step: int, layer: int, blob: str) -> None:
        """This file, which the layer's holders have named, is not what they claimed. No file of it
        is taken any more, or it would be fetched again and again. If they have named another one
        since, as the step was done again, that one is taken."""
        said = self._agreed.get(step, {})
        if layer in said and self._is_that(step, layer, blob):
            self._agreed[step] = {**said, layer: said[layer]._replace(file=NO_FILE)}
