"""What the trainer asks of its daemon; see `daemon.trainer_state.Outlet`."""

import logging
import math
import time

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.stage_progress import StageProgress
from p2p_dtfm.core.step import SignedPrepared, StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon.membership import Membership
from p2p_dtfm.daemon.run_source import fetch_blob
from p2p_dtfm.daemon.wire import CheckpointFiles
from p2p_dtfm.net.errors import Refused, Unreachable

log = logging.getLogger("p2p_dtfm")


class TrainerOutlet(Membership):
    """Prepared, commits, lost tensors, data shards and checkpoints on their way out."""

    def say_prepared(self, signed: Signed, view: View) -> None:
        """First to those for whom the others wait: the first stages begin the next step."""
        message = SignedPrepared(signed)
        position = {peer_id: math.inf for peer_id in view.member_ids}
        if isinstance(view.plan, Plan):
            for pipeline in view.plan.pipelines:
                position |= {stage.peer_id: at for at, stage in enumerate(pipeline.stages)}
        for peer_id in sorted(view.member_ids, key=position.__getitem__):
            self._courier.tell(peer_id, message)

    def committed(self, outcome: StepOutcome) -> None:
        assert self._agreement is not None
        self._troubled.clear()
        assert self._step_watch is not None
        self._step_watch.committed(time.monotonic_ns())
        self._plan_times.committed()
        self._device_pace.committed(self.compute.busy_ns)
        self._do(self._agreement.committed(outcome, time.monotonic_ns()))

    def states_changed(self) -> None:
        assert self._agreement is not None and self._trainer is not None
        assert self._checkpoints is not None
        held = self._trainer.held
        if held is not None:
            self._agreement.held = held

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
        if self._agreement.view is not None and peer_id in self._agreement.view.member_ids:
            self._do(self._agreement.distrust(peer_id, cause, time.monotonic_ns()))

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
        return self._agreement.inventory.lineage.at(step) or ""

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
            peers = [peer for peer in self._courier.known if peer != self._me.peer_id]
            await fetch_blob(self._run.blobs, self._blobs, digest, peers, sizes[digest])

    def damaged_shard(self, digest: str) -> None:
        assert self._run is not None
        self._run.blobs.quarantine(digest)

    def _announce(self, files: CheckpointFiles) -> None:
        if self._agreement is not None and self._agreement.view is not None:
            for peer_id in self._agreement.view.member_ids:
                self._courier.tell(peer_id, files)

    def _on_step(self, outcome: StepOutcome) -> None:
        self._events.write(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            held_out_loss=outcome.held_out_loss,
            gradient_norm=outcome.gradient_norm,
            view=self.views[-1]["view"] if self.views else 0,
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
