"""The steps of one view in order: takes Prepared as they arrive, gives outcomes as they follow."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from itertools import chain

from p2p_dtfm.core.commit.judgement import Conflict
from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.audit_messages import UNLIKE_LIMIT
from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT, Statement, StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId


class Ledger:
    """Follows a view from `step` on.

    While `may_commit` is False no step commits: not all members have said that they are active in
    the view. After `freeze` nothing is taken and nothing commits: what the peers bring to the next
    view decides about the step under way.
    """

    def __init__(
        self,
        view: ViewId,
        plan: Plan,
        step: int,
        terms: StepTerms | None = None,
        counts: Mapping[str, int] | None = None,
        first_counts: Mapping[str, int] | None = None,
    ) -> None:
        """`counts` are those of a whole step (`loss_counts`). `first_counts` are those of the first
        step here, which may be the rest of a step that failed before."""
        self.view = view
        self.plan = plan
        self.step = step
        self.may_commit = True
        self.frozen = False
        self.last_commit: tuple[Signed, ...] = ()
        """Every stage-holder's Prepared of the step that was committed last in this view."""
        self._terms = terms
        self._counts = counts
        self._first = step, first_counts if first_counts is not None else counts
        self._unlike: dict[str, tuple[Signed, Signed]] = {}
        """By peer: its Prepared of the last step by which that committed here, and another one."""
        self._transactions: dict[int, StepTransaction] = {}
        self._ahead: dict[str, dict[int, Statement]] = {}
        """At a peer without a stage: the newest Prepared too far ahead, by stage-holder."""

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
            self._unlike = {}
            self._take_ahead()
        return outcome

    def has_refused(self, signed: Signed) -> bool:
        """Whether this Prepared is evidence against its maker."""
        evidence = (t.evidence.get(signed.peer_id) for t in self._transactions.values())
        return signed in evidence

    @property
    def conflict(self) -> Conflict:
        """Why the present step does not commit, though all have said Prepared."""
        return self._transaction(self.step).conflict

    @property
    def forks(self) -> bool:
        """Whether members say that the present step starts from different states, or somebody has
        said two things of the step before."""
        said = self._transaction(self.step).said.values()
        return bool(self._unlike) or len({prepared.base for prepared in said}) > 1

    def see_unlike(self, held: Signed, shown: Signed) -> None:
        """Keep a Prepared of the last step by which that committed here, and another one of its
        maker. Both go along: where a later step was rolled forward nobody tells of that one."""
        if len(self._unlike) < UNLIKE_LIMIT:
            self._unlike.setdefault(shown.peer_id, (held, shown))

    def says_ahead(self, statement: Statement) -> tuple[int, str] | None:
        """Takes a Prepared that is too far ahead, at a peer without a stage. Returns the step to
        which this peer may skip, and its lineage, once more than half of the stage-holders say so.

        The Prepared is kept until its step comes: nothing newer follows the last step of a run or a
        view. Raises `PeerFault`.
        """
        prepared = statement.prepared
        if prepared.peer_id not in self.plan.stage_holders():
            raise PeerFault("Prepared from a peer without a stage", prepared.peer_id)
        if self._terms is not None and prepared.step > self._terms.total_steps:
            raise PeerFault(f"Prepared of step {prepared.step}, after the last", prepared.peer_id)
        said = self._ahead.setdefault(prepared.peer_id, {})
        said[prepared.step] = statement
        for oldest in sorted(said)[:-STEPS_AHEAD_LIMIT]:
            del said[oldest]
        base = self.base_of(prepared.step)
        return (prepared.step, base) if base is not None else None

    def base_of(self, step: int) -> str | None:
        """The lineage from which more than half of the stage-holders say that a step starts."""
        said = [held[step].prepared.base for held in self._ahead.values() if step in held]
        if step in self._transactions:
            said += [prepared.base for prepared in self._transactions[step].said.values()]
        base, count = Counter(said).most_common(1)[0] if said else ("", 0)
        return base if 2 * count > len(self.plan.stage_holders()) else None

    def skip_to(self, step: int) -> None:
        """Go on with `step`: the steps before it are known to be committed."""
        self.step = step
        self.last_commit, self._unlike = (), {}
        self._transactions = {n: t for n, t in self._transactions.items() if n >= step}
        self._take_ahead()

    def _take_ahead(self) -> None:
        """Records the Prepared that are no longer too far ahead."""
        for said in self._ahead.values():
            for step in [step for step in said if step < self.step + STEPS_AHEAD_LIMIT]:
                statement = said.pop(step)
                if step >= self.step:
                    with contextlib.suppress(PeerFault):  # a refused one is kept as evidence
                        self._transaction(step).record(statement)

    def freeze(self) -> tuple[Signed, ...]:
        """Take and commit nothing from now on; returns the Prepared of the step under way, and
        after them those that were refused, and unlike ones of the last committed step."""
        self.frozen = True
        transaction = self._transaction(self.step)
        refused, unlike = transaction.evidence.values(), chain(*self._unlike.values())
        return (*transaction.signed, *refused, *unlike)

    def counts_of(self, step: int) -> Mapping[str, int]:
        """For how many microbatches each peer's Prepared counts the loss; empty if unknown."""
        first, first_counts = self._first
        return (first_counts if step == first else self._counts) or {}

    @property
    def missing(self) -> tuple[str, ...]:
        """Stage-holders whose Prepared of the present step has not come."""
        return self._transaction(self.step).missing

    def _transaction(self, step: int) -> StepTransaction:
        if step not in self._transactions:
            counts = self.counts_of(step) or None
            made = StepTransaction(self.view, step, self.plan, self._terms, counts)
            self._transactions[step] = made
        return self._transactions[step]
