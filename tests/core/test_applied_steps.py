"""What a peer says it has of a step's gradients, while it applies the step and afterwards."""

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from tests.core.test_long_prepared import NAMES, PLAN, STEP, VIEW, all_prepared

ME, OWN, GUARDED = NAMES[0], 0, 1


def committed() -> RecoveryEvidence:
    """The peer holds one layer and guards another; the step's gradients of both are here."""
    held = RecoveryEvidence(ME)
    held.lineage.move_to(STEP, "the state of step 7")
    held.held = {OWN: STEP, GUARDED: STEP}
    held.reduced(VIEW, STEP, {OWN, GUARDED})
    ledger = Ledger(VIEW, PLAN, STEP)
    for statement in all_prepared().values():
        ledger.record(statement)
    outcome = ledger.next_outcome()
    assert outcome is not None
    held.committed(VIEW, outcome, range(OWN, OWN + 1), ledger.last_commit)
    return held


def test_what_is_committed_and_not_applied_yet_can_still_be_rolled_forward() -> None:
    """Until then the peer counts the state before the step, whatever it tells of its states."""
    held = committed()
    assert held.held[OWN] == STEP + 1
    held.held = {OWN: STEP, GUARDED: STEP}
    assert held.retained is not None and held.retained.reduced_layers == (OWN, GUARDED)


def test_of_what_is_applied_guarded_layers_alone_wait_for_the_step() -> None:
    held = committed()
    held.applied(STEP, {OWN})
    assert held.retained is not None and held.retained.reduced_layers == (GUARDED,)
    held.applied(STEP - 1, {GUARDED})
    assert held.retained.reduced_layers == (GUARDED,), "that was another one"
