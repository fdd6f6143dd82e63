"""What this peer contributes to an attempt: a function of what it knows when it enters, and fixed
from then on."""

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Contribution


def contribution_to(state: AgreementState, number: int, planned: bool, now_ns: int) -> Contribution:
    """The contribution of this peer, which has a record."""
    evidence = state.recovery_evidence
    assert state.record is not None
    sees_fork = state.ledger is not None and state.ledger.forks
    # If so, members have states of unlike lineages: no waiting brings one that all layers have.
    return Contribution(
        member=state.me,
        number=number,
        record=state.record,
        present=state.present_view(),
        step=state.step,
        held=dict(evidence.held),
        joiners=state.named_newcomers(planned),
        lineages=evidence.lineages(),
        saved=evidence.saved,
        cuts=evidence.cuts,
        pending=evidence.pending(state.view.id) if state.view and not planned else None,
        retained=evidence.told_of_last_step(planned, sees_fork, trains=state.plan is not None),
        accepts_loss=sees_fork or state.present.agrees_to_loss(state.timing, now_ns),
        may_repeat=state.present.may_repeat_steps,
        accusers=state.doubts.accusers.named(now_ns),
        doubted=state.doubts.accusers.doubted(now_ns),
        bars=state.others.bars,
        origins=state.others.views.origins(state.members or (state.me,)),
    )
