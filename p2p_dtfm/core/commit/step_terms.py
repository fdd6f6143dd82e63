"""The numbers of a step that follow from the run spec, so that nobody needs to be believed."""

import math

import msgspec

from p2p_dtfm.core.audit.boundaries import (
    Due,
    boundary_bytes,
    held_out_is_kept,
    kept_microbatches,
)
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.tied_ends import tied_ends

SQUARED_NORM_LIMIT = 1e100
"""A segment's largest squared norm. The largest gradient of 2^40 fp32 values has 1e89, and a sum of
such norms does not overflow."""


class StepTerms(msgspec.Struct, frozen=True):
    """The terms of one run's steps."""

    microbatch_tokens: int
    evaluation_microbatches: int
    evaluation_every: int
    states_every: int
    """Steps whose number is a multiple of this tell the digests of the states they start from."""
    total_steps: int
    loss_limit: float
    """Nats for each token. A model that knows nothing has ln(vocabulary)."""
    audits: bool = False
    """Whether Prepared have an account (`core.audit`) of what is `due`; otherwise none has one."""
    one_arithmetic: bool = False
    """Whether a peer that computes with another arithmetic than most has no place."""
    follow_steps: int = 0
    """For so many steps a key that comes while training is under way gets no stage; 0 for none."""
    kept_microbatches: int = 1 << 30
    """For at most so many microbatches a stage keeps all that it sends its neighbours."""
    undo_steps: int = 0
    """How many steps before the proof a run goes back to when a peer is barred; 0: it does not."""
    rate_millionths: int = 1_000_000
    """How many of a million works are audited. `undo_steps` are meant for that rate."""
    undo_every: int = 0
    """Steps between the states that are kept for an undo; these steps tell their digests, too."""
    tied_ends: tuple[int, ...] = ()
    """The two layers that hold one matrix, if any do."""

    def trains(self, step: int) -> bool:
        return step < self.total_steps

    def evaluates(self, step: int) -> bool:
        return not self.trains(step) or step % self.evaluation_every == 0

    def due(self, step: int, plan: Plan) -> Due | None:
        """The work that the claims of a step cover; None where nothing is claimed. They cover the
        frames of held-out microbatches where all stages of the plan can keep these."""
        if not self.audits:
            return None
        due = Due(self.trains(step), self.evaluation_microbatches if self.evaluates(step) else 0)
        if held_out_is_kept(plan, due, self.kept_microbatches):
            return due
        return due._replace(held_out=0) if due.trains else None

    def tells_states(self, step: int) -> bool:
        is_kept = self.undo_every > 0 and step % self.undo_every == 0
        return step > 0 and (step % self.states_every == 0 or is_kept or step == self.total_steps)

    def held_out_tokens(self, step: int, plan: Plan, peer_id: str) -> int:
        """How many held-out tokens a peer counts in a step; 0 without the head."""
        if not self.evaluates(step) or not has_head(plan, peer_id):
            return 0
        count, turns = self.evaluation_microbatches, len(plan.pipelines)
        places = plan.places_of(peer_id)
        return sum(len(range(n, count, turns)) for n, _ in places) * self.microbatch_tokens


def terms_of(spec: RunSpec) -> StepTerms:
    return StepTerms(
        microbatch_tokens=spec.batch.microbatch * spec.model.context,
        evaluation_microbatches=spec.evaluation_microbatches,
        evaluation_every=spec.evaluation.every_steps,
        states_every=spec.checkpoint.every_steps,
        total_steps=spec.total_steps,
        loss_limit=10.0 * math.log(spec.model.vocabulary) + 100.0,
        audits=spec.audit.rate > 0,
        kept_microbatches=kept_microbatches(boundary_bytes(spec)),
        follow_steps=spec.audit.follow_steps if spec.audit.rate > 0 else 0,
        one_arithmetic=spec.audit.rate > 0 and spec.audit.arithmetic == "most",
        undo_steps=spec.audit.undo_steps,
        rate_millionths=spec.audit.rate_millionths,
        undo_every=spec.audit.undo_every,
        tied_ends=tied_ends(spec),
    )


def has_head(plan: Plan, peer_id: str) -> bool:
    """Whether losses are made at this peer."""
    layers = plan.layers_of(peer_id)
    return bool(layers) and layers.stop == plan.pipelines[0].stages[-1].end_layer
