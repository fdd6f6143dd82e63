"""Reads a transcript and believes nothing of it that is not signed.

Afterwards this holds: each view is what all who made it have signed. Each step committed by what
all its stage-holders have signed, from the lineage to which the step before led. A transcript does
not show that anybody computed what it says: for that, a sample of it has to be computed again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import StepTerms, terms_of
from p2p_dtfm.core.messages.message_bounds import ITEMS_LIMIT
from p2p_dtfm.core.messages.prepared import Prepared, Statement, StepOutcome, open_prepared
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.lineage import GENESIS_LINEAGE, extend, unmarked
from p2p_dtfm.core.protocol.plan import Plan, flaw_of
from p2p_dtfm.core.protocol.records import Intent, require_sane
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed, Verify, covered, verifying_in
from p2p_dtfm.core.protocol.snapshot import Snapshot, ViewId
from p2p_dtfm.core.recovery.loss_counts import loss_counts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.transcript.entries import FORMAT, Began, Committed, Entry, TookOver, format_of
from p2p_dtfm.core.transcript.tallies import Tally, added, of_step

VIEWS_LIMIT = 1 << 16
ODD_FACTS = (ArithmeticError, LookupError, ValueError)
"""What tables of machines and links may raise where what a view says of them was made up."""


class NotTrue(Exception):
    """A transcript says what cannot be, or what is not so."""

    def __init__(self, reason: str, step: int | None = None, peer_id: str = "") -> None:
        """`peer_id`: whose signature stands under what is not true, if it is one peer's."""
        self.reason = reason
        self.step = step
        self.peer_id = peer_id
        super().__init__(reason)


class Step(NamedTuple):
    """A step of the lineage that stayed."""

    view: View
    said: dict[str, Prepared]
    """By stage-holder."""
    outcome: StepOutcome


class Checker:
    """`take` each entry in order. Afterwards `steps` holds what stayed."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.spec: RunSpec | None = None
        self.steps: dict[int, Step] = {}
        """Steps of the lineage that stayed, by number. Some may be missing: see `gaps`."""
        self.views: list[ViewId] = []
        """Views in the order in which they took over."""
        self.repeated = 0
        """How many committed steps later views have given up."""
        self._terms: StepTerms | None = None
        self._view: View | None = None
        self._ledger: Ledger | None = None
        self._lineage: dict[int, str] = {0: GENESIS_LINEAGE}
        """The lineage after so many steps."""
        self._must_follow = True
        """Whether the next step has to start where the last one here has led. If not, the writer
        may have come over from another part of the swarm."""

    def take(self, entry: Entry) -> None:
        """Checks the next entry. Raises `NotTrue`."""
        if isinstance(entry, Began):
            self._begin(entry)
        elif self.spec is None:
            raise NotTrue("it does not begin with its run")
        elif isinstance(entry, TookOver):
            self._take_over(entry, self.spec)
        else:
            self._commit(entry)

    @property
    def layer_count(self) -> int:
        """Layers of the run's model: embedding, blocks and head."""
        assert self.spec is not None, "it has begun"
        return self.spec.model.layer_count

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Steps that are missing, as (first, end): the writer was away, or learnt of the outcome
        from others after a failure."""
        found: list[tuple[int, int]] = []
        before = -1
        for step in sorted(self.steps):
            if step > before + 1:
                found.append((before + 1, step))
            before = step
        return found

    def tallies(self) -> dict[str, Tally]:
        """What each peer did in all steps that trained and stayed."""
        assert self.spec is not None, "it has begun"
        tokens = self.spec.batch.microbatch * self.spec.model.context
        trained = [it for it in sorted(self.steps.items()) if self._trains(it[0])]
        return added(_tally_of(number, step, tokens) for number, step in trained)

    def _trains(self, step: int) -> bool:
        return self._terms is not None and self._terms.trains(step)

    def _begin(self, entry: Began) -> None:
        if self.spec is not None:
            raise NotTrue("it begins twice")
        if entry.format < FORMAT:  # its run spec may not be valid today
            raise _of_another_format(entry, FORMAT)
        try:
            spec = RunSpec.from_canonical_bytes(entry.run_spec)
        except (PeerFault, ValueError) as error:
            raise NotTrue(f"its run spec is none: {error}") from error
        if entry.format != (due := format_of(spec)):
            raise _of_another_format(entry, due)
        self.spec = spec
        self._terms = terms_of(self.spec)
        self._verify = verifying_in(self.spec.digest(), self._verify)

    def _take_over(self, entry: TookOver, spec: RunSpec) -> None:
        view = View(entry.snapshot, entry.plan, entry.certificate)
        name = f"view {view.id.number}"
        if entry.snapshot.run_digest != spec.digest():
            raise NotTrue(f"{name} is of another run")
        if len(self.views) >= VIEWS_LIMIT:
            raise NotTrue(f"more than {VIEWS_LIMIT} views")
        if (flaw := _flaw_of_members(entry.snapshot, spec)) is not None:
            raise NotTrue(f"{name} is none of this run: {flaw}")
        if isinstance(view.plan, Plan):  # before anything goes through it one by one
            flaw = flaw_of(view.plan, self.layer_count, spec.microbatches_per_step)
            flaw = flaw or _flaw_of_places(view.plan, view, spec)
            if flaw is not None:
                raise NotTrue(f"the plan of {name} is none of this run: {flaw}")
        self._check_certificate(entry, view, name)
        if view.id not in self.views:
            self.views.append(view.id)
        # where an unplanned view goes on, all have signed; the line beside it is its writer's word
        step = entry.step if entry.snapshot.planned else entry.snapshot.step
        if step < 0:
            raise NotTrue(f"{name} goes on from step {step}")
        self._give_up_from(step)
        self._must_follow = self._goes_on(view)
        self._view, self._ledger = view, None
        if isinstance(view.plan, Plan):
            counts, terms = loss_counts(view.plan), self._terms
            # the first step may be what is left of one that failed: only the members knew then
            # whose losses count there; with audits a step is repeated whole
            first = counts if terms is not None and terms.audits else {}
            self._ledger = Ledger(view.id, view.plan, step, terms, counts, first)

    def _check_certificate(self, entry: TookOver, view: View, name: str) -> None:
        certificate = entry.certificate
        if certificate.view != view.id or certificate.members != view.members:
            raise NotTrue(f"the certificate of {name} is of another view")
        if certificate.plan_digest != view.plan.digest():
            raise NotTrue(f"the plan of {name} is not the one that was agreed on")
        if not view.snapshot.contributors:
            raise NotTrue(f"{name} is one that nobody has agreed on")
        said = signers(certificate, self._verify)
        missing = sorted(it.peer_id for it in set(view.snapshot.contributors) - said)
        if missing:
            raise NotTrue(f"{name} lacks the signature of {missing[0]}")

    def _give_up_from(self, step: int) -> None:
        given_up = [number for number in self.steps if number >= step]
        self.repeated += len(given_up)
        for number in given_up:
            del self.steps[number]
        self._lineage = {n: lineage for n, lineage in self._lineage.items() if n <= step}

    def _goes_on(self, view: View) -> bool:
        """Whether the view's first step starts from what came before it here. A writer that goes
        over to another part of the swarm leaves its own steps: none leads to what follows."""
        snapshot = view.snapshot
        if snapshot.planned:
            return self._view is not None and snapshot.previous == self._view.id
        known = self._lineage.get(snapshot.step)
        if known is None or not isinstance(view.plan, Plan):
            return False
        if unmarked(known) != unmarked(snapshot.lineage):
            self._leave_all()
        # a view that takes back what a liar did names the state that it goes on from anew
        self._lineage[snapshot.step] = snapshot.lineage
        return True

    def _leave_all(self) -> None:
        self._give_up_from(0)
        self._lineage = {}

    def _commit(self, entry: Committed) -> None:
        view, ledger = self._view, self._ledger
        if view is None or ledger is None:
            raise NotTrue("a step where no view with a plan is in force")
        said = [self._opened(signed) for signed in entry.signed]
        if not said:
            raise NotTrue("a step that nobody has prepared", ledger.step)
        step, named = _step_and_view_of(said)
        if step < 0 or (self._terms is not None and step > self._terms.total_steps):
            raise NotTrue("the run has no such step", step)
        if named != view.id:
            if named in self.views:  # its makers have not put it there
                raise NotTrue("a step of a view that was over by then", step)
            return  # the line of that view is lost, and so are its steps
        if step > ledger.step:
            ledger.skip_to(step)
        outcome = _outcome_of(ledger, step, said)
        self._follow(view, step, {it.prepared.peer_id: it.prepared for it in said}, outcome)

    def _opened(self, signed: Signed) -> Statement:
        try:
            return Statement(open_prepared(signed, self._verify), signed)
        except PeerFault as fault:
            text = covered(signed.peer_id, signed.kind, signed.payload)
            if self._verify(signed.peer_id, text, signed.signature):
                raise NotTrue(fault.cause, peer_id=signed.peer_id) from fault
            reason = f"{fault.cause} in the name of {signed.peer_id}: changed since, or damaged"
            raise NotTrue(reason) from fault

    def _follow(
        self, view: View, step: int, said: dict[str, Prepared], outcome: StepOutcome
    ) -> None:
        base = next(iter(said.values())).base
        is_false_start = step == 0 and unmarked(base) != GENESIS_LINEAGE
        if is_false_start or (step in self._lineage and self._lineage[step] != base):
            if is_false_start or self._must_follow:
                raise NotTrue("it starts from another lineage than the step before led to", step)
            self._leave_all()
        self._must_follow = True
        self._lineage[step + 1] = extend(base, step, view.id, outcome.digest)
        self.steps[step] = Step(view, said, outcome)


def _tally_of(number: int, step: Step, tokens_per_microbatch: int) -> dict[str, Tally]:
    """What each peer did in a step. Raises `NotTrue`."""
    try:
        return of_step(step.view, step.said, tokens_per_microbatch)
    except ODD_FACTS as error:
        raise of_odd_facts(number, step) from error


def of_odd_facts(number: int, step: Step) -> NotTrue:
    """The fault of a view by whose facts no member could have planned, though all have signed it.
    It says, for example, that a layer takes no work."""
    reason = f"view {step.view.id.number} states what is so of no machine, link or layer"
    return NotTrue(reason, number)


def _flaw_of_members(snapshot: Snapshot, spec: RunSpec) -> str | None:
    """Why this can be no view of the run; None if it may be. This is checked before anything is
    made for each pair of its members, or for each layer that it speaks of."""
    if len(snapshot.records) > ITEMS_LIMIT:
        return f"it has {counted(len(snapshot.records), 'member')}, and {ITEMS_LIMIT} may be"
    work = snapshot.workload
    if work.layer_count != spec.model.layer_count:
        return f"it is of {counted(work.layer_count, 'layer')}"
    if work.microbatch_count != spec.microbatches_per_step:
        return f"it is of {counted(work.microbatch_count, 'microbatch')} a step"
    try:
        for record in snapshot.records:
            require_sane(record)
    except PeerFault as fault:
        return fault.cause
    return None


def _flaw_of_places(plan: Plan, view: View, spec: RunSpec) -> str | None:
    """Why this can be no plan of the view and the run, though its numbers may be right; None if it
    may be."""
    members = {record.peer_id: record.intent for record in view.snapshot.records}
    if not {*plan.spares, *plan.stage_holders()} <= members.keys():
        return "it has a place for somebody who is no member"
    if any(members[peer_id] is not Intent.TRAIN for peer_id in plan.stage_holders()):
        return "it has a stage for somebody who does not train"
    allowed = spec.codecs
    for activation, gradient in (names for it in plan.pipelines for names in it.codecs):
        if activation not in allowed.activations or gradient not in allowed.gradients:
            return "tensors travel in a codec that the run does not allow"
    return None


def _step_and_view_of(said: Sequence[Statement]) -> tuple[int, ViewId]:
    """Raises `NotTrue` where these are not words of one step. Who has put them together is to blame
    for that, and none of their makers."""
    step, view = said[0].prepared.step, said[0].prepared.view
    if any(it.prepared.step != step for it in said):
        raise NotTrue("words of several steps where those of one are due", step)
    if any(it.prepared.view != view for it in said):
        raise NotTrue("words of several views where those of one are due", step)
    return step, view


def _outcome_of(ledger: Ledger, step: int, said: Sequence[Statement]) -> StepOutcome:
    """The outcome of these statements, as members come to it. Raises `NotTrue`."""
    try:
        for statement in said:
            ledger.record(statement)
    except PeerFault as fault:
        raise NotTrue(fault.cause, step, fault.peer_id or "") from fault
    conflict, missing = ledger.conflict, ledger.missing
    outcome = ledger.next_outcome()
    if outcome is None or outcome.step != step:
        raise NotTrue(conflict.reason or f"no Prepared of {', '.join(missing)}", step)
    return outcome


def _of_another_format(entry: Began, due: int) -> NotTrue:
    return NotTrue(f"it is of format {entry.format}, and this version reads {due}")
