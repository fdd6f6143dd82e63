"""The steps of one view in order: takes Prepared as they arrive, gives outcomes as they follow."""

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.step import Statement, StepOutcome, StepTransaction

STEPS_AHEAD_LIMIT = 2
"""A peer that commits first may be one step ahead; two leaves room for a message overtaking."""


class Ledger:
    """Follows a view from `step` on.

    While `may_commit` is False no step commits: not all members have said that they are active in
    the view. Once `freeze` is called nothing is taken and nothing commits any more: the step under
    way is now decided by what the peers bring to the next view.
    """

    def __init__(self, view: ViewId, plan: Plan, step: int) -> None:
        self.view = view
        self.plan = plan
        self.step = step
        self.may_commit = True
        self.frozen = False
        self.last_commit: tuple[Signed, ...] = ()
        """Every stage-holder's Prepared of the step that was committed last in this view."""
        self._transactions: dict[int, StepTransaction] = {}

    def record(self, statement: Statement) -> None:
        """Take a Prepared. One of a step that is committed is ignored. Raises `PeerFault`."""
        prepared = statement.prepared
        if prepared.view != self.view:
            raise PeerFault(f"Prepared of view {prepared.view}, not {self.view}", prepared.peer_id)
        if self.frozen or prepared.step < self.step:
            return
        if prepared.step >= self.step + STEPS_AHEAD_LIMIT:
            raise PeerFault(
                f"Prepared of step {prepared.step} while step {self.step} is not committed",
                prepared.peer_id,
            )
        self._transaction(prepared.step).record(statement)

    def next_outcome(self) -> StepOutcome | None:
        """Commit the present step if all have said Prepared; call again until None."""
        if self.frozen or not self.may_commit:
            return None
        outcome = self._transaction(self.step).outcome()
        if outcome is not None:
            self.last_commit = self._transactions.pop(self.step).signed
            self.step += 1
        return outcome

    def skip_to(self, step: int) -> None:
        """The steps before are known to be committed."""
        self.step = step
        self._transactions = {n: t for n, t in self._transactions.items() if n >= step}

    def freeze(self) -> tuple[Signed, ...]:
        """Take and commit nothing from now on; returns the Prepared of the step under way."""
        self.frozen = True
        return self._transaction(self.step).signed

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose Prepared of the present step has not come."""
        return self._transaction(self.step).missing

    def _transaction(self, step: int) -> StepTransaction:
        if step not in self._transactions:
            self._transactions[step] = StepTransaction(self.view, step, self.plan)
        return self._transactions[step]
