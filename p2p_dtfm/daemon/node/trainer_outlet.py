"""What the trainer asks of its daemon; see `daemon.trainer.trainer_state.Outlet`."""

import asyncio
import logging
import math
import time

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import PreparedSteps, SignedPrepared, StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.contradictions import agreed_states
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.peers.run_source import fetch_blob
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.net.errors import Refused, Unreachable

POISON_GRACE_S = 0.25
"""For others to find out as well who sends what no correct peer sends."""

log = logging.getLogger("p2p_dtfm")


class TrainerOutlet(Membership):
    """Prepared, commits, lost tensors, data shards and checkpoints on their way out."""

    def say_prepared(self, signed: Signed, view: View) -> None:
        """First to those for whom the others wait: the first stages begin the next step.

        Where this peer alone computes and guardians lag nobody waits: the others hear of several
        steps at a time, but at once of one after which another view may take over.
        """
        message: SignedPrepared | PreparedSteps = SignedPrepared(signed)
        if self._computes_alone(view):
            now_s = time.monotonic()
            self._held_back.add(view.id, signed)
            if self._may_wait() and not self._held_back.is_due(now_s):
                return
            message = PreparedSteps(self._held_back.take(now_s))
        position = {peer_id: math.inf for peer_id in view.member_ids}
        if isinstance(view.plan, Plan):
            for pipeline in view.plan.pipelines:
                position |= {stage.peer_id: at for at, stage in enumerate(pipeline.stages)}
        for peer_id in sorted(view.member_ids, key=position.__getitem__):
            self._messenger.tell(peer_id, message)

    def _computes_alone(self, view: View) -> bool:
        is_alone = isinstance(view.plan, Plan) and view.plan.stage_holders() == (self._me.peer_id,)
        return is_alone and view.cut_pace is not None

    def _may_wait(self) -> bool:
        """No view waits for the step under way, and it is not the last one."""
        agreement, run = self._agreement, self._run
        assert agreement is not None and run is not None
        return agreement.next_view is None and agreement.step < run.spec.total_steps

    def committed(self, outcome: StepOutcome) -> None:
        assert self._agreement is not None
        self._troubled.clear()
        assert self._step_watch is not None
        self._step_watch.committed(time.monotonic_ns())
        self._plan_times.committed()
        self._device_pace.committed(self.compute.busy_ns)
        ledger = self._agreement.ledger
        if self._checkpoints is not None and ledger is not None:
            self._checkpoints.committed(outcome.step, agreed_states(ledger.last_commit))
        self._do(self._agreement.committed(outcome, time.monotonic_ns()))

    def states_changed(self) -> None:
        assert self._agreement is not None and self._trainer is not None
        assert self._checkpoints is not None
        held = self._trainer.held
        if held is not None:
            self._agreement.held = held

    def has_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        assert self._agreement is not None
        self._agreement.has_cuts(cuts)

    def reduced(self, step: int, layers: set[int]) -> None:
        assert self._agreement is not None
        self._agreement.reduced(step, layers)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        assert self._agreement is not None
        self._agreement.computed(step, progress)

    def skip_to(self, step: int, lineage: str) -> None:
        assert self._agreement is not None
        self._agreement.skip_to(step, lineage)

    def trouble(self, peer_id: str, cause: str) -> None:
        """Once in a step it may be the link, and the step is repeated; twice it is the peer."""
        assert self._agreement is not None
        view, now_ns = self._agreement.view, time.monotonic_ns()
        if view is None or peer_id not in view.member_ids:
            return
        self._liveness.stream_reset(peer_id, now_ns)
        if peer_id in self._troubled:
            self._do(self._agreement.suspect(peer_id, cause, now_ns))
        else:
            self._troubled.add(peer_id)
            text = f"what goes to or comes from {peer_id} is lost: {cause}"
            self._do(self._agreement.repeat_step(text, now_ns))

    def poison(self, peer_id: str, cause: str) -> None:
        """It is no link that makes such numbers, so the step is repeated without their sender."""
        assert self._agreement is not None
        view = self._agreement.view
        if view is not None and peer_id in view.member_ids:
            log.warning("%s sends %s", peer_id, cause)
            self._do(self._agreement.distrust(peer_id, cause, time.monotonic_ns()))
            loop = asyncio.get_running_loop()
            loop.call_later(POISON_GRACE_S, self._accuse, view, peer_id, cause)

    def _accuse(self, view: View, peer_id: str, cause: str) -> None:
        if self._agreement is not None and self._agreement.view is view:
            self._do(self._agreement.suspect(peer_id, cause, time.monotonic_ns()))

    def contradiction(self, reason: str) -> None:
        """The next view finds out from what all were told who is to be left out."""
        assert self._agreement is not None
        self._do(self._agreement.repeat_step(reason, time.monotonic_ns()))

    def _on_undelivered(self, peer_id: str, lane: str, failure: Refused | Unreachable) -> None:
        log.debug("frames of %s to %s are lost: %s", lane, peer_id, failure.cause)
        if self._trainer is None:
            return
        if lane == "state":
            self._trainer.undelivered(peer_id)
        else:
            self.trouble(peer_id, failure.cause)

    def lineage_at(self, step: int) -> str:
        assert self._agreement is not None
        return self._agreement.recovery_evidence.lineage.at(step) or ""

    def ready_for(self) -> ViewId | None:
        assert self._agreement is not None
        return self._agreement.ready_for

    def synced(self, view: ViewId) -> None:
        assert self._agreement is not None
        self.states_changed()
        self._do(self._agreement.synced(view))

    def _on_download(self, digest: str, done_bytes: int, total_bytes: int) -> None:
        name = f"file {digest[:8]}"
        if self._run is not None:
            blobs = self._run.manifest.blobs()
            name = f"data shard {digest[:8]}" if digest in blobs else f"states {digest[:8]}"
        self.status.receives(name, done_bytes, total_bytes)

    async def fetch_shards(self, digests: set[str]) -> None:
        assert self._run is not None
        sizes = self._run.manifest.blobs()
        for digest in sorted(digests):
            peers = [peer for peer in self._messenger.known if peer != self._me.peer_id]
            await fetch_blob(self._run.blobs, self._blobs, digest, peers, sizes[digest])

    def damaged_shard(self, digest: str) -> None:
        assert self._run is not None
        self._run.blobs.quarantine(digest)

    def _announce(self, files: CheckpointFiles) -> None:
        if self._agreement is not None and self._agreement.view is not None:
            for peer_id in self._agreement.view.member_ids:
                self._messenger.tell(peer_id, files)

    def _on_step(self, outcome: StepOutcome) -> None:
        self._events.write(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            held_out_loss=outcome.held_out_loss,
            gradient_norm=outcome.gradient_norm,
            view=self.views[-1]["view"] if self.views else 0,
            safe_step=self._trainer.safe_step if self._trainer else None,
        )
        self.observer.step_committed(outcome)
        if self._event_files is not None:
            self._event_files.step_committed(outcome, self.status.figures().get("tokens_per_s"))
        held_out = outcome.held_out_loss
        text = "" if held_out is None else f", held-out loss {held_out:.4f}"
        if outcome.loss is not None:
            log.log(
                logging.INFO if held_out is not None else logging.DEBUG,
                "step %d: loss %.4f%s",
                outcome.step,
                outcome.loss,
                text,
            )
