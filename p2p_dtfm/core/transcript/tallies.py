"""What each peer has done for a run, as the plans and the signed Prepared of committed steps say.

It is a pure sum over steps: whoever reads the same steps comes to the same numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from p2p_dtfm.core.audit.draw import COLLUDERS_DIVISOR
from p2p_dtfm.core.commit.shares import shares_of
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Account, auditor_and_audited
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View

FEWEST_WHO_HEARD = 2


class Tally(msgspec.Struct, frozen=True):
    """What one peer has done, over all steps."""

    stage_steps: int = 0
    """Steps in which it held a stage."""
    tasklets: int = 0
    """Microbatches through its stages: each forward and its backward count once."""
    token_layers: int = 0
    """Tokens times layers. Of all peers together: the run's tokens times its layers."""
    audits: int = 0
    """Works of others that it was drawn to compute again, and of which others have heard what they
    come to."""
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
    shares, audits = shares_of(plan, tokens_per_microbatch), _audits(prepared)
    found = {
        peer: Tally(
            stage_steps=1,
            tasklets=microbatches[peer],
            token_layers=shares[peer],
            audits=audits[peer],
            predicted_ns=plan.predicted_step_ns,
        )
        for peer in microbatches
    }
    for guardian in view.guards.values():
        found[guardian] = found.get(guardian, Tally()).plus(Tally(guarded_layers=1))
    return found


def _audits(prepared: Mapping[str, Prepared]) -> Counter[str]:
    """By auditor: the works of which it has told what they come to, as the accounts of at least two
    members, and of more than a quarter, have heard it.

    An auditor's own account is nobody's word but its own. Nor would all readers count the same by
    it: a liar may sign two Prepared that come to one outcome. Where more was drawn than an account
    has room for, as in a large view's first step, not all of it counts."""
    accounts = [it.audit for it in prepared.values() if it.audit is not None]
    heard = Counter(pair for account in accounts for pair in _heard(account))
    needed = max(FEWEST_WHO_HEARD, len(accounts) // COLLUDERS_DIVISOR + 1)
    return Counter(by for (by, _), count in heard.items() if count >= needed)


def _heard(account: Account) -> set[tuple[str, str]]:
    """Each auditor and the peer whose work it was, as far as it got through."""
    holders = sorted(account.heard)
    named = (auditor_and_audited(it, holders) for it in account.audits if it.work != COULD_NOT)
    return {pair for pair in named if pair is not None}


def added(each: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    """The sum over steps, by peer, sorted."""
    found: dict[str, Tally] = {}
    for tallies in each:
        for peer, tally in tallies.items():
            found[peer] = found.get(peer, Tally()).plus(tally)
    return dict(sorted(found.items()))
