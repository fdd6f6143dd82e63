"""What the parts of the trainer share: what they work with, and where this peer stands."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer.state_tools import StateStores, TowardsOthers
from p2p_dtfm.daemon.telemetry.seen_paces import SeenPaces
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.batches import Batches
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

Tensor = Any


class Outlet(Protocol):
    """What the trainer asks of the daemon."""

    def say_prepared(self, signed: Signed, view: View) -> None:
        """Send to all other members of the view."""

    def committed(self, outcome: StepOutcome) -> None:
        """The ledger gave an outcome, which is not applied yet. A view that follows is taken over
        later, by when `settled` returns."""

    async def settled(self) -> None:
        """Wait until what came of earlier words is done, for instance another view taken over."""

    def states_changed(self) -> None:
        """What is held here, or its version, has changed."""

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        """What is here of cuts has changed."""

    def reduced(self, step: int, layers: set[int]) -> frozenset[tuple[ViewId, int]]:
        """The reduced gradients of these layers are here, and are kept. Returns which of those from
        before, by view and step, may still be named."""

    def applied(self, step: int, layers: Collection[int]) -> None:
        """The states of these layers have taken a committed step; its gradients are not kept for
        them."""

    def computed(self, step: int, progress: StageProgress | None) -> None:
        """How far this peer has come with the microbatches of `step`; it keeps all of that."""

    def skip_to(self, step: int, lineage: str) -> None:
        """At a peer without a stage: most stage-holders prepare `step`, from this lineage, so all
        steps before it are committed."""

    def trouble(self, peer_id: str, cause: str) -> None:
        """What a peer needs for the step under way, or what it sent for it, is lost."""

    def poison(self, peer_id: str, cause: str) -> None:
        """What a peer sent for the step under way no correct peer sends."""

    def contradiction(self, reason: str) -> None:
        """The step under way cannot commit: what its stage-holders say of it cannot all be true."""

    def lineage_at(self, step: int) -> str:
        """The digest of the lineage of states after `step` committed steps."""

    def vouch(self) -> ViewId | None:
        """The next view, if all its members are synced: it stays until the step commits."""

    def shown_of(self, steps: int) -> int:
        """How many of these committed steps another member could show by this peer's Prepared."""

    def are_all_in(self) -> bool:
        """Whether all members of the view in force have said that they are in it."""

    def synced(self, view: ViewId) -> None:
        """This peer has what its place in the next view needs."""

    async def fetch_shards(self, digests: set[str]) -> None:
        """Bring data shards. Raises `BlobUnavailable`."""

    async def replace_shard(self, digest: str) -> None:
        """Bring a data shard though there is a file of it, which is of no use. Raises
        `BlobUnavailable`, and `OSError` for a disk that does not take it."""

    def damaged_shard(self, digest: str) -> bool:
        """A shard on this disk is not what it was: put it aside. Returns whether that could be
        done."""


@dataclass(frozen=True)
class Tools:
    """What the trainer works with."""

    me: str
    spec: RunSpec
    batches: Batches
    net: TowardsOthers
    stores: StateStores
    compute: Compute
    status: Status
    recorder: StepRecorder = field(default_factory=StepRecorder)


class Stopped(Exception):
    """The step under way will not be ended in this view."""


class TrainerState:
    """Where this peer stands; whoever changes it so that somebody may go on calls `wake.set`."""

    def __init__(self, me: str = "") -> None:
        self.paces = SeenPaces(me)
        """How slow the others are seen to compute."""
        self.states: dict[int, LayerState] = {}
        self.view: View | None = None
        self.step = 0
        self.ledger: Ledger | None = None
        self.restarts: deque[tuple[Restart, int]] = deque()
        """What unplanned views make of the states, and at which step, until it is done. The oldest
        comes first, as each begins where the one before has led to."""
        self.replay: PartialReplay | None = None
        """What the present view keeps of the step with which it began."""
        self.stopped = False
        """A failure has frozen the step under way."""
        self.fetches = False
        """States or data without which the step cannot begin are on their way here."""
        self.stuck_at: int | None = None
        """The step that this peer cannot do: nobody gives the data, or the run has diverged."""
        self.memory = ReplicaMemory()
        self.reduced: dict[tuple[ViewId, int], dict[int, Tensor]] = {}
        """Reduced gradients by view, step and layer: the next view may roll them forward."""
        self.wake = asyncio.Event()
        self._failure: BaseException | None = None

    def is_over(self, view: View) -> bool:
        """Whether no step will be ended in this view any more."""
        return self.stopped or self.view is not view

    @property
    def stands_still(self) -> bool:
        """Whether no step commits by which others could take over what is here."""
        return self.stuck_at == self.step

    def late(self, layers: Iterable[int]) -> set[int]:
        """Those of `layers` that are not here at the step that comes."""
        held = self.states
        return {n for n in layers if n not in held or held[n].version != self.step}

    def watched(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that ends by being cancelled. If it fails, it must not leave this peer waiting for
        ever."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Whoever waits raises `error`: a part that ended must not leave the others waiting."""
        self._failure = error
        self.wake.set()

    async def wait(self, limit_s: float | None = None) -> None:
        """Wait until anything changes, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.wake.wait()
        self.wake.clear()
        if self._failure is not None:
            raise self._failure

    async def until_over(self, view: View) -> NoReturn:
        """Wait until the others have agreed on how to go on. Raises `Stopped`."""
        while not self.is_over(view):
            await self.wait()
        raise Stopped

    async def done_or_woken(self, task: "asyncio.Task[Any]") -> None:
        """Wait for a task, or until `wake` is set; `wake` stays as it is."""
        waking = asyncio.create_task(self.wake.wait())
        await asyncio.wait({task, waking}, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()

    def keep_reduced(
        self, view: ViewId, step: int, gradients: dict[int, Tensor], outlet: Outlet
    ) -> None:
        """Keep gradients until a later step commits: the next view may have to roll this step
        forward. If a step fails in one view after the other, only those stay that a restart may
        still name. While a restart is due, all stay."""
        self.reduced.setdefault((view, step), {}).update(gradients)
        named = outlet.reduced(step, set(gradients)) | {(view, step)}
        if not self.restarts:
            self.reduced = {key: held for key, held in self.reduced.items() if key in named}

    def forget_reduced(self, committed_step: int) -> None:
        """Gradients before the last committed step are not needed for any recovery."""
        self.reduced = {k: held for k, held in self.reduced.items() if k[1] >= committed_step}

    def forget_applied(self, step: int, layers: Collection[int]) -> None:
        """These layers have taken the step: its gradients are for those alone that have not."""
        for (_, of_step), held in self.reduced.items():
            for layer in layers if of_step == step else ():
                held.pop(layer, None)
