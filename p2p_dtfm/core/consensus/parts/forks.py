"""Shows who has said two Prepared of one step, where some have taken over the next view with that
step and others have not.

A liar may tell some that it is ready for that view, and others that it is not. The ones wait in the
view for the others, which wait in the view before. Each side held the other for stuck, and honest
members went. So a peer that has committed the step without takeover, and hears from the next view,
shows the sender who was not ready by what came here. If the sender has heard otherwise it holds two
signatures. It has all agree anew before anybody accuses anybody.
"""

from p2p_dtfm.core.consensus.actions import Actions, SendMessage
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Active
from p2p_dtfm.core.messages.prepared import SignedPrepared, Statement
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.contradictions import stated


def show_unready(state: AgreementState, heard: Active) -> Actions:
    """What the sender of an Active is shown, if this peer has committed the step before and has not
    taken that view over with it. Where nobody lies all commit a step with the same takeover.

    A peer that was not ready itself shows nothing: it knows that nobody can have taken it over."""
    if heard.step != state.step:
        return []
    came_by, unready = (state.view_id, heard.step - 1), list[Signed]()
    for signed in state.present.newest_commit:
        said = stated(signed)
        if (said.view, said.step) == came_by and said.ready_for != heard.view:
            unready.append(signed)
    if any(signed.peer_id == state.me.peer_id for signed in unready):
        return []
    return [SendMessage((heard.sender.peer_id,), SignedPrepared(it)) for it in unready]


def said_of_last_step(state: AgreementState, peer_id: str) -> Signed | None:
    """The Prepared of the peer by which the last step was committed here."""
    commit = state.present.newest_commit
    return next((signed for signed in commit if signed.peer_id == peer_id), None)


def hears_unlike(state: AgreementState, shown: Statement) -> bool:
    """Whether the maker of a Prepared has said another one of that step, by which this peer has
    committed it. Then this peer shows both in the next attempt."""
    theirs, held = shown.prepared, said_of_last_step(state, shown.prepared.peer_id)
    if held is None or held.payload == shown.signed.payload or state.ledger is None:
        return False
    mine = stated(held)
    if (mine.view, mine.step) != (theirs.view, theirs.step):
        return False
    state.ledger.see_unlike(held, shown.signed)
    return True
