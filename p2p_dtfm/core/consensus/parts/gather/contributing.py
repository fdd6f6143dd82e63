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
        step=_reached_step(state),
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


def _reached_step(state: AgreementState) -> int:
    """How far this peer has come, by its word. Where layers are lost the members' step counts for
    those that were let in meanwhile, too: they have no state, and alone they would take the
    initial one for the furthest, train from there, and have the others give up theirs."""
    view = state.view
    if view is None or not view.snapshot.lost_layers:
        return state.step
    return max(state.step, view.snapshot.step)
