"""A sample of a transcript's works computed again, each from the nearest states before it. Steps
that are missing in between are computed as well, as far as that can be."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.lineage import unmarked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.transcript.checking import Checker, NotTrue, Step
from p2p_dtfm.daemon.proof.work_again import Unjudged, WorkAgain
from p2p_dtfm.train.model.checkpoint import Checkpoint, list_checkpoints, load_layer
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.batches import Batches

Work = tuple[int, str]
"""A step, and the member that held a stage in it."""
Gap = tuple[int, int]
"""Steps that are missing: the first, and the next one that is there."""
States = Callable[[], dict[int, LayerState]]


def works_of(checker: Checker) -> list[Work]:
    """All stage-steps that trained and stayed, in order; and the evaluation after the last one,
    where it is accounted for."""
    return [
        (number, peer)
        for number, step in sorted(checker.steps.items())
        for peer, prepared in sorted(step.said.items())
        if step.outcome.loss is not None or prepared.audit is not None
    ]


def drawn(works: Sequence[Work], share: float, below: Callable[[int], int]) -> list[Work]:
    """So large a share of the works, at least one unless `share` is 0, each as likely as any other;
    sorted. `below(n)`: chance, from 0 to n - 1."""
    left = list(works)
    count = min(len(left), math.ceil(share * len(left))) if share > 0 else 0
    return sorted(left.pop(below(len(left))) for _ in range(count))


@dataclass
class Judged:
    """What came of judging a sample."""

    works: int = 0
    """Works that were judged: those drawn, and those that had to be computed on the way."""
    steps: int = 0
    """Steps that were computed."""
    unjudged: dict[str, int] = field(default_factory=dict)
    """How many of those drawn could not be judged here, by the reason."""
    behind_gaps: int = 0
    """How many of these could not since steps are missing."""
    passed_over: list[str] = field(default_factory=list)
    """Checkpoints whose states are not those that were signed, and why. Nothing was judged by them:
    what a disk holds is nobody's word."""
    signed_checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints beside the transcript that hold what was signed."""
    bridged: set[int] = field(default_factory=set)
    """Missing steps that were computed as those before: what follows is, to the bit, where that
    leads."""
    open: dict[Gap, str] = field(default_factory=dict)
    """By gap: why nothing shows that what stands before it has led to what stands after it."""


class _StepMissing(Unjudged):
    """A step is missing, whatever machine computes."""


class _Damaged(Exception):
    """A checkpoint is of no use; there may be an earlier one."""


class WorkSample:
    """`judge` raises `NotTrue` for the first work that is not what was signed."""

    def __init__(
        self,
        spec: RunSpec,
        steps: Mapping[int, Step],
        batches: Batches,
        genesis: States,
        checkpoints: Path | None,
        tell: Callable[[int, int], None],
    ) -> None:
        """`genesis`: the states before the first step. `checkpoints`: a directory of them; only
        those are believed whose digests stage-holders have signed. `tell` gets the step that is
        computed now, and the last one that will be."""
        self._spec = spec
        self._steps = steps
        self._batches = batches
        self._genesis = genesis
        self._root = checkpoints
        self._anchors = _anchors(checkpoints, spec, steps)
        self._useless: set[Path] = set()
        """Checkpoints that were passed over."""
        self._tell = tell
        self._again: WorkAgain | None = None
        self._stops: dict[int, Unjudged] = {}
        """Steps that cannot be computed here, and why. Only a checkpoint after such a step leads
        past it."""
        self._is_guess = False
        """Whether the present states come from a missing step, computed as it must have been."""
        self._found = Judged()

    def judge(self, works: Collection[Work], gaps: Collection[Gap] = ()) -> Judged:
        """Judge all that is drawn; then whether anything shows that what stands before each gap has
        led to what stands after it. Else any model could be put in there, however true what follows
        is. Raises `NotTrue`."""
        wanted: dict[int, set[str]] = {}
        for step, peer in works:
            wanted.setdefault(step, set()).add(peer)
        numbers = sorted(wanted)
        for number in numbers:
            try:  # the whole step, and where it led: nothing of the next need be drawn
                again = self._go_to(number, numbers[-1])
                self._tell(number, numbers[-1])
                self._advance(again)
            except Unjudged as reason:
                self._again = None
                text = str(reason)
                count = self._found.unjudged.get(text, 0)
                self._found.unjudged[text] = count + len(wanted[number])
                if isinstance(reason, _StepMissing):
                    self._found.behind_gaps += len(wanted[number])
        for gap in gaps:
            why = "" if gap[0] in self._found.bridged else self._bridge(*gap)
            if why:
                self._found.open[gap] = why
        return self._found

    def look_at_checkpoints(self) -> None:
        """Note which checkpoints beside the transcript hold what was signed, whether or not
        anything was computed from them. Whoever gets a model from one wants to know. Raises
        `NotTrue`."""
        self._again = None  # its states take as much memory
        for checkpoint in reversed(_whole(self._root, self._spec)):
            step, directory = checkpoint.manifest.step, checkpoint.directory
            if directory in self._useless:
                continue
            try:
                if self._anchors.get(step) != directory:
                    reason = (
                        f"no step here has a signature for what the checkpoint {directory} holds"
                    )
                    raise _Damaged(reason)
                self._states_at(step)
                self._found.signed_checkpoints.append(step)
            except _Damaged as found:
                self._found.passed_over.append(str(found))

    def _bridge(self, first: int, end: int) -> str:
        """Why a gap cannot be bridged; empty if it is. Raises `NotTrue`."""
        if first == 0:
            return "it begins there"
        if end > first + 1:
            return "more than one in a row cannot be computed"
        try:
            again = self._go_to(first, end)
            while first not in self._found.bridged:
                self._tell(again.step, end)
                self._advance(again)
        except Unjudged as reason:
            self._again = None
            return str(reason)
        return ""

    def _anchor(self, step: int) -> int:
        """The nearest step, before this one or itself, whose states can be taken from somewhere."""
        return max((it for it in self._anchors if it <= step), default=0)

    def _go_to(self, number: int, last: int) -> WorkAgain:
        """Compute up to step `number`. Raises `NotTrue` and `Unjudged`."""
        again = self._again
        if again is None or not self._anchor(number) <= again.step <= number:
            again = self._again = self._nearest_before(number)
        stops = [step for step in self._stops if again.step <= step < number]
        if stops:
            raise self._stops[min(stops)]
        while again.step < number:
            self._tell(again.step, last)
            try:
                self._advance(again)
            except Unjudged as reason:
                self._stops[again.step] = reason
                raise
        return again

    def _nearest_before(self, number: int) -> WorkAgain:
        """Begin with the nearest states before a step that are what was signed."""
        while True:
            anchor = self._anchor(number)
            try:
                return self._from(anchor)
            except _Damaged as found:
                # nobody knows whose fault that is: only where it lies on the disk
                self._useless.add(self._anchors.pop(anchor))
                self._found.passed_over.append(str(found))

    def _from(self, anchor: int) -> WorkAgain:
        """Begin with the states of a step. Raises `_Damaged` where a checkpoint is not what was
        signed."""
        self._is_guess = False
        if anchor == 0:
            return WorkAgain(self._spec, self._batches, self._genesis())
        return self._states_at(anchor)

    def _states_at(self, anchor: int) -> WorkAgain:
        """The states of a checkpoint. Raises `_Damaged`, and `NotTrue` for what nobody can have
        signed."""
        directory = self._anchors[anchor]
        try:
            states = {
                layer: load_layer(directory, layer) for layer in range(layer_count(self._spec))
            }
            again = WorkAgain(self._spec, self._batches, states)
            again.judge_states(self._steps[anchor])
        except NotTrue as found:
            raise _Damaged(
                f"the checkpoint {directory} has other states: {found.reason}"
            ) from found
        except UserError as error:
            raise _Damaged(f"the checkpoint {directory} is of no use: {error}") from error
        for layer, state in states.items():
            if state.version != anchor:  # from there that step would be judged, and not this one
                signer = min(
                    it for it, said in self._steps[anchor].said.items() if layer in said.states
                )
                reason = (
                    f"{signer} has signed a state of layer {layer} that is of step {state.version}"
                )
                raise NotTrue(reason, anchor, signer)
        return again

    def _advance(self, again: WorkAgain) -> None:
        number, before = again.step, again.judged
        step = self._steps.get(number)
        if step is None:
            self._guess(again, number)
            return
        try:
            again.advance(step)
            after = self._steps.get(again.step)
            if after is not None:
                again.judge_states(after)
        except NotTrue as found:
            self._unless_guessed(found, number - 1)
        if self._is_guess:
            self._found.bridged.add(number - 1)
        self._is_guess = False
        self._count(again, before)

    def _guess(self, again: WorkAgain, number: int) -> None:
        """Compute a missing step as the one before, as it most likely was: what follows shows
        whether it was. Raises `Unjudged`."""
        before = self._steps.get(number - 1)
        if before is None or self._is_guess:
            raise _StepMissing(f"step {number} is missing, and no checkpoint after it is here")
        again.advance_unseen(before, number)
        self._is_guess = True
        self._found.steps += 1
        after = self._steps.get(again.step)
        if after is None:
            return
        try:
            if again.judge_states(after):
                self._found.bridged.add(number)
                self._is_guess = False
        except NotTrue as found:
            self._unless_guessed(found, number)

    def _unless_guessed(self, found: NotTrue, missing: int) -> None:
        if self._is_guess:
            raise _StepMissing(f"step {missing} is missing, and was not computed as the one before")
        raise found

    def _count(self, again: WorkAgain, before: int) -> None:
        self._found.works += again.judged - before
        self._found.steps += 1


def _anchors(root: Path | None, spec: RunSpec, steps: Mapping[int, Step]) -> dict[int, Path]:
    """Whole checkpoints of the lineage that stayed, whose digests are in the step's Prepared."""
    found = {}
    for checkpoint in _whole(root, spec):
        manifest = checkpoint.manifest
        step = steps.get(manifest.step)
        if step is None or manifest.step == 0:  # nobody need tell what a run begins with
            continue
        said = step.said.values()
        named = {layer for prepared in said for layer in prepared.states}
        lineage = unmarked(manifest.lineage)
        is_same = all(unmarked(prepared.base) == lineage for prepared in said)
        if is_same and len(named) == layer_count(spec):
            found[manifest.step] = checkpoint.directory
    return found


def _whole(root: Path | None, spec: RunSpec) -> list[Checkpoint]:
    """Checkpoints of this run with all layers."""
    found = list_checkpoints(root) if root is not None and root.is_dir() else []
    return [
        it
        for it in found
        if len(it.layers) == layer_count(spec) and it.manifest.run_digest == spec.digest()
    ]
