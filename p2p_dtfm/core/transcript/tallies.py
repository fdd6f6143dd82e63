"""What each peer has done for a run, as the plans and the signed Prepared of committed steps say.

It is a pure sum over steps: whoever reads the same steps comes to the same numbers.
"""

from collections.abc import Iterable, Mapping

import msgspec

from p2p_dtfm.core.commit.shares import shares_of
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View


class Tally(msgspec.Struct, frozen=True):
    """What one peer has done, over all steps."""

    stage_steps: int = 0
    """Steps in which it held a stage."""
    tasklets: int = 0
    """Microbatches through its stages: each forward and its backward count once."""
    token_layers: int = 0
    """Tokens times layers. Of all peers together: the run's tokens times its layers."""
    audits: int = 0
    """Works of others of which it has said what they come to, as it computed them again."""
    guarded_layers: int = 0
    """Copies of layers that nobody else held, over the steps: layers times steps."""
    predicted_ns: int = 0
    """How long its steps take by the plans."""

    def plus(self, other: "Tally") -> "Tally":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Tally(*(mine + theirs for mine, theirs in pairs))


def of_step(
    view: View, prepared: Mapping[str, Prepared], tokens_per_microbatch: int
) -> dict[str, Tally]:
    """What each peer did in one committed step that trained."""
    plan = view.plan
    assert isinstance(plan, Plan)
    microbatches = dict.fromkeys(plan.stage_holders(), 0)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            microbatches[stage.peer_id] += pipeline.microbatch_count
    shares = shares_of(plan, tokens_per_microbatch)
    found = {
        peer: Tally(
            stage_steps=1,
            tasklets=microbatches[peer],
            token_layers=shares[peer],
            audits=_audits(prepared[peer]),
            predicted_ns=plan.predicted_step_ns,
        )
        for peer in microbatches
    }
    for guardian in view.guards.values():
        found[guardian] = found.get(guardian, Tally()).plus(Tally(guarded_layers=1))
    return found


def _audits(prepared: Prepared) -> int:
    return 0 if prepared.audit is None else len(prepared.audit.found)


def added(each: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    """The sum over steps, by peer, sorted."""
    found: dict[str, Tally] = {}
    for tallies in each:
        for peer, tally in tallies.items():
            found[peer] = found.get(peer, Tally()).plus(tally)
    return dict(sorted(found.items()))
