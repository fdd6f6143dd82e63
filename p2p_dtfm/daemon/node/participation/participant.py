"""A member that trains: the trainer with all that it works with, and what it asks of the daemon.

What the trainer asks for is `daemon.trainer.trainer_state.Outlet`: Prepared, commits, lost tensors,
data shards and checkpoints on their way out. What the agreement makes of it is done later, when the
trainer is not in the middle of a step (`action_loop`).
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Collection, Coroutine, Set
from typing import Any

from p2p_dtfm.core.consensus.actions import Actions, StopStep
from p2p_dtfm.core.liveness.lost_tensors import AfterLoss, LostTensors
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.contradictions import agreed_states
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.resident_limit import memory_bytes
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.node.participation.end_of_run import EndOfRun
from p2p_dtfm.daemon.node.participation.prepared_telling import PreparedTelling
from p2p_dtfm.daemon.node.participation.sampling import sample_writer_of
from p2p_dtfm.daemon.peers.run_source import SharedFetches
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.proof.counted_again import contributions_beside
from p2p_dtfm.daemon.proof.transcript_file import transcript_in
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.checkpoints.pruning import remove_leftovers
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.state_transfer.state_tools import StateStores, TowardsOthers
from p2p_dtfm.daemon.step.lane_frames import frame_limits, require_of_lane
from p2p_dtfm.daemon.telemetry.device_pace import DevicePace
from p2p_dtfm.daemon.telemetry.event_log import FILE_NAME, EventLog
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import Tools
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.ports import now
from p2p_dtfm.train.data import Dataset
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.stage.batches import Batches

IN_FLIGHT_PART = 8  # one part in 8 of the memory offered, for tensors that others announced

NO_PLACE = "a tensor of somebody who has no place here"
BLAMED = "%s sends %s"
"""For the log: what no correct peer does."""

log = logging.getLogger("p2p_dtfm")


class Participant:
    """Trains in the views that `membership` comes to."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.local = local = membership.local
        self.network = network = membership.network
        self._agreement = membership.agreement
        run = membership.run
        directory = local.home.run_directory(run.digest)
        shutil.rmtree(directory / "offers", ignore_errors=True)  # left by a process that was killed
        for leftover in run.blobs.root.glob(".*"):
            with contextlib.suppress(OSError):  # a folder, or what another program has open on NFS
                leftover.unlink(missing_ok=True)
        remove_leftovers(local.home.checkpoints(run.digest))
        self.events = EventLog(directory / FILE_NAME, local.status.troubles)
        self.transcript = transcript_in(directory, run.spec, local.settings.transcript_mib)
        layers, me = membership.workload.layer_count, network.me.peer_id
        self.contributions = contributions_beside(self.transcript, run.spec, layers, me)
        self.views: list[dict[str, Any]] = []
        """The history's entry of each view."""
        self.offers = Offers(directory / "offers")
        self._fetches = SharedFetches(run.blobs, network.blobs, self._donors)
        self.bulk = self._bulk_plane()
        self.checkpoints = Checkpoints(
            local.home.checkpoints(run.digest),
            run.spec,
            network.blobs,
            local.compute,
            self._announce,
            membership.has_stage,
            local.status.troubles,
        )
        tools = self._tools()
        self.initial = tools.stores.initial
        withheld = run.spec.privacy.withheld(network.me.peer_id, layer_count(run.spec))
        self.checkpoints.withheld = self.initial.withheld = withheld
        self.checkpoints.fetches.me = network.me.peer_id
        self.trainer = Trainer(tools, self)
        self.trainer.history.told_before(self.events.last_step())
        self.trainer.history.on_record = self._on_step
        self.step_watch = StepWatch(
            network.me.peer_id,
            run.spec,
            run.manifest.blobs().values(),
            self.trainer.waits,
            network.liveness.sleep_ns,
        )
        self.device_pace = DevicePace()
        self._lost_tensors = LostTensors()
        self._prepared = PreparedTelling(membership)
        self.samples = sample_writer_of(membership, self.trainer, self.checkpoints)
        done = self.trainer.done
        self.end_of_run = EndOfRun(local, run, done, self.checkpoints, self.samples)

    @classmethod
    async def start(cls, membership: Membership, stack: contextlib.AsyncExitStack) -> "Participant":
        """Start a participant that is ready for tensors of others."""
        participant = cls(membership)
        await participant.bulk.ready()
        for close in (
            participant.bulk.close,
            participant.checkpoints.close,  # after the trainer, which saves with it
            participant.trainer.close,
            participant._fetches.close,
            participant.initial.close,
        ):
            stack.push_async_callback(close)
        if participant.samples is not None:
            stack.callback(participant.samples.close)
        run, observer = membership.run, membership.local.observer
        observer.trains(run.spec, run.digest, membership.workload, membership.agreement)
        observer.tallies(participant.contributions)
        stack.callback(participant.contributions.write)
        stack.push_async_callback(participant.end_of_run.tell)
        membership.local.life.spawn(participant.end_of_run.when_done())
        if run.spec.model.initial:
            keeps = participant.initial.keep_beside(lambda: membership.agreement.view is not None)
            membership.local.life.spawn(keeps)
        observer.measures_with(lambda: participant.measured_rate() > 0)
        return participant

    def _bulk_plane(self) -> BulkPlane:
        membership, network = self.membership, self.network
        frames = frame_limits(membership.workload)
        listeners = BulkListeners(
            self._on_frame, network.on_fault, self._on_lost, self._on_undelivered, self._admit_frame
        )
        in_flight_bytes = memory_bytes(self.local.settings) // IN_FLIGHT_PART
        limits = BulkLimits(frames, in_flight_bytes=in_flight_bytes)
        host, digest, settings = network.host, membership.run.digest, self.local.settings
        lines = None
        if settings.direct_lines:
            lines = self.local.world.direct_lines(host, digest, settings.listen, network.control)
        return BulkPlane(host, digest, listeners, limits, lines)

    def _tools(self) -> Tools:
        local, network, run = self.local, self.network, self.membership.run
        messenger, blobs, compute = network.messenger, network.blobs, local.compute
        dataset = Dataset(run.manifest, run.blobs.path, run.spec.model.context)
        return Tools(
            me=network.me.peer_id,
            spec=run.spec,
            batches=Batches(dataset, run.spec),
            net=TowardsOthers(messenger, self.bulk, blobs, self.membership.sign),
            stores=StateStores(
                InitialStates(run.spec, run.blobs, blobs, compute, local.status, network.others),
                self.checkpoints,
                Donor(messenger, self.bulk, compute, self.offers),
            ),
            compute=compute,
            status=local.status,
            recorder=local.recorder,
        )

    async def resume_from_checkpoint(self) -> None:
        """Every peer tells what it has on disk before it asks to be let in. A founder that finds
        whole checkpoints of its run goes on from the newest."""
        self._agreement.set_saved(self.checkpoints.saved)
        if not self.membership.founds or (found := await self.checkpoints.newest_whole()) is None:
            return
        if self._agreement.view is not None or self._agreement.next_view is not None:
            return  # let in meanwhile: it takes the others' states
        checkpoint, states = found
        step = checkpoint.manifest.step
        self.trainer.adopt(states, step)
        held = dict.fromkeys(states, step)
        lineage = checkpoint.manifest.lineage
        self._agreement.resume(step, held, lineage, self.checkpoints.saved)
        self.checkpoints.whole_step = step
        log.info("goes on from the checkpoint of step %d", step)

    def measured_rate(self) -> int:
        """Tokens a second in the view in force; 0 while too little of it was seen."""
        if not self.trainer.history.pace.is_settled:
            return 0
        return int(self.local.status.figures().get("tokens_per_s") or 0)

    def _donors(self) -> list[str]:
        """Peers to ask for the run's data."""
        agreement = self._agreement
        coming = agreement.next_view.member_ids if agreement.next_view is not None else ()
        return self.network.donors((*coming, *(it.peer_id for it in agreement.joiners)))

    # what the trainer asks for -------------------------------------------------------------------

    def _later(self, actions: Actions) -> None:
        """Do these actions later. But a peer that is frozen says and computes nothing more from now
        on."""
        if any(isinstance(action, StopStep) for action in actions):
            self.trainer.stop_step()
        self.membership.actions.later(actions)

    async def settled(self) -> None:
        await self.membership.actions.settled()

    def say_prepared(self, signed: Signed, view: View) -> None:
        self._prepared.say(signed, view)

    def committed(self, outcome: StepOutcome) -> None:
        self._lost_tensors.clear()
        self.step_watch.committed(now.monotonic_ns())
        self.membership.plan_times.committed()
        self.device_pace.committed(self.local.compute.busy_ns)
        if (ledger := self._agreement.ledger) is not None:
            self.step_watch.vouched(self._agreement, ledger.last_commit)
            self.transcript.committed(outcome.step, ledger.last_commit)
            states, lineage = agreed_states(ledger.last_commit), self.lineage_at(outcome.step)
            self.checkpoints.committed(outcome.step, states, lineage)
        self._later(self._agreement.committed(outcome, now.monotonic_ns()))

    def states_changed(self) -> None:
        self._agreement.set_saved(self.checkpoints.saved)
        held = self.trainer.held
        if held is not None:
            self._agreement.held = held

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        self._agreement.set_cuts(cuts)

    def reduced(self, step: int, layers: set[int]) -> frozenset[tuple[ViewId, int]]:
        self._agreement.reduced(step, layers)
        return self._agreement.recovery_evidence.rollable_steps

    def applied(self, step: int, layers: Collection[int]) -> None:
        self._agreement.applied(step, layers)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        self._agreement.computed(step, progress)

    def skip_to(self, step: int, lineage: str) -> None:
        self._agreement.skip_to(step, lineage)

    def trouble(self, peer_id: str, cause: str) -> None:
        """What goes to or comes from a peer was lost. The link may be at fault, so the step is
        repeated. If that fails as well, the peer is suspected."""
        view, now_ns = self._agreement.view, now.monotonic_ns()
        if view is None or peer_id not in view.member_ids:
            return
        self.network.on_broken(peer_id, cause)
        remedy = self._lost_tensors.remedy(peer_id, view.id, now_ns)
        if remedy is AfterLoss.SUSPECT:
            self._later(self._agreement.suspect(peer_id, cause, now_ns))
        elif remedy is AfterLoss.REPEAT:
            text = f"what goes to or comes from {peer_id} is lost: {cause}"
            self._later(self._agreement.repeat_step(text, now_ns))

    def poison(self, peer_id: str, cause: str) -> None:
        """A member sends what no faulty link can produce. The step is repeated without it."""
        view = self._agreement.view
        if view is not None and peer_id in view.member_ids:
            log.warning(BLAMED, peer_id, cause)
            self._later(self._agreement.distrust(peer_id, cause, now.monotonic_ns()))
            loop = asyncio.get_running_loop()
            loop.call_later(self.step_watch.grace_s, self._accuse, view, peer_id, cause)

    def _accuse(self, view: View, peer_id: str, cause: str) -> None:
        if self._agreement.view is view:
            self._later(self._agreement.suspect(peer_id, cause, now.monotonic_ns()))

    def contradiction(self, reason: str) -> None:
        """Members' statements contradict each other. The next view finds out, from what all were
        told, which of them is left out."""
        self._later(self._agreement.repeat_step(reason, now.monotonic_ns()))

    def lineage_at(self, step: int) -> str:
        """The lineage of the states here at that step; empty if it is not known."""
        if self.trainer.are_given:
            return ""
        return self._agreement.recovery_evidence.lineage.at(step) or ""

    def vouch(self) -> ViewId | None:
        return self._agreement.vouch()

    def shown_of(self, steps: int) -> int:
        return self._prepared.shown_of(steps)

    def are_all_in(self) -> bool:
        return self._agreement.is_taken_over_by_all

    def synced(self, view: ViewId) -> None:
        self.states_changed()
        self._later(self._agreement.synced(view))

    async def fetch_shards(self, digests: set[str]) -> None:
        sizes = self.membership.run.manifest.blobs()
        for digest in sorted(digests):
            await self._fetches.have(digest, sizes[digest])

    async def replace_shard(self, digest: str) -> None:
        await self._fetches.replace(digest, self.membership.run.manifest.blobs()[digest])

    def damaged_shard(self, digest: str) -> bool:
        return self.membership.run.blobs.quarantine(digest) is not None

    def _announce(self, files: CheckpointFiles) -> None:
        view = self._agreement.view
        for peer_id in view.member_ids if view is not None else ():
            self.network.messenger.tell(peer_id, files)

    def _on_step(self, outcome: StepOutcome) -> None:
        since = (view for view in reversed(self.views) if view["step"] <= outcome.step)
        self.events.write(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            held_out_loss=outcome.held_out_loss,
            gradient_norm=outcome.gradient_norm,
            view=next((view["view"] for view in since), 0),  # the next may be there already
            safe_step=self.trainer.tell_safe_step(),
        )
        self.local.observer.step_committed(outcome)
        if self.local.event_files is not None:
            rate = self.local.status.figures().get("tokens_per_s")
            self.local.event_files.step_committed(outcome, rate)
        held_out = outcome.held_out_loss
        if held_out is not None and self.samples is not None:
            self.samples.evaluated(outcome.step, held_out)
        text = "" if held_out is None else f", held-out loss {held_out:.4f}"
        if outcome.loss is not None:
            level = logging.INFO if held_out is not None else logging.DEBUG
            log.log(level, "step %d: loss %.4f%s", outcome.step, outcome.loss, text)

    # tensors -------------------------------------------------------------------------------------

    def _admit_frame(self, sender: str, lane: str, header: FrameHeader) -> Awaitable[None] | None:
        """Judge a frame before memory is taken for it; what this returns is awaited first. Raises
        `PeerFault`."""
        if not self.network.keeper.is_near(sender):
            raise PeerFault(NO_PLACE, sender)
        require_of_lane(sender, lane, header)
        return self.trainer.admit(sender, header)

    def _on_frame(
        self, sender: str, header: FrameHeader, payload: bytearray
    ) -> Coroutine[Any, Any, None]:
        self.network.messenger.heard(sender)
        return self.trainer.frame(sender, header, payload)

    def _on_lost(self, peer_id: str, lane: str, error: Unreachable) -> None:
        log.debug("stream %s with %s: %s", lane, peer_id, error.cause)
        self.network.on_broken(peer_id, error.cause)

    def _on_undelivered(
        self, peer_id: str, lane: str, failure: Refused | Unreachable, views: Set[ViewId]
    ) -> None:
        log.debug("frames of %s to %s are lost: %s", lane, peer_id, failure.cause)
        view = self._agreement.view
        if lane == "state":
            self.trainer.undelivered(peer_id)
        elif view is not None and view.id in views:  # of one that is over nobody misses any
            self.trouble(peer_id, failure.cause)
