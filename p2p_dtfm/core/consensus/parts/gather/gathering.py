"""Attempts at a view: opening, Ready, and what happens when one fails."""

from collections.abc import Iterable

from p2p_dtfm.core.consensus.actions import (
    Actions,
    ComputePlan,
    Disagreed,
    Report,
    StopStep,
    Verdict,
    ViewAgreed,
    refused,
)
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.attempt_parts import AttemptClock
from p2p_dtfm.core.consensus.attempts.freezing import freeze, plan_of
from p2p_dtfm.core.consensus.attempts.ready_verdict import Answers, ReadyVerdict, ready_verdict
from p2p_dtfm.core.consensus.attempts.silence import are_few
from p2p_dtfm.core.consensus.attempts.stall_verdict import are_newcomers_links
from p2p_dtfm.core.consensus.parts.gather.contributing import contribution_to
from p2p_dtfm.core.consensus.parts.gather.flooding import Flooding
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.syncing import Syncing
from p2p_dtfm.core.consensus.parts.takeover import Takeover
from p2p_dtfm.core.consensus.views.origins import origins_of_newcomer
from p2p_dtfm.core.membership.newcomers import NUMBERS_PASSED_LIMIT
from p2p_dtfm.core.messages.agreement_messages import Accusation, Gather, Ready, Spread
from p2p_dtfm.core.messages.statements import certified, charge, members_digest, stated
from p2p_dtfm.core.protocol.plan import LAYERS_LOST, NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot, ViewId, names_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS

DISAGREEMENT_NS = 10 * SECOND_NS
DISAGREEMENT_LIMIT_NS = 640 * SECOND_NS
"""A peer that most others contradict waits before it asks to join again: at first for
`DISAGREEMENT_NS`, then twice as long each time, up to `DISAGREEMENT_LIMIT_NS`."""


class Gathering:
    """At most one attempt at a time, and numbers only grow."""

    def __init__(
        self,
        state: AgreementState,
        syncing: Syncing,
        takeover: Takeover,
        outsiders: Outsiders,
        flooding: Flooding,
    ) -> None:
        self._state = state
        self._syncing = syncing
        self._takeover = takeover
        self._outsiders = outsiders
        self._flooding = flooding

    # entering -------------------------------------------------------------------------------------

    def open(self, planned: bool, reason: str, now_ns: int) -> Actions:
        """A new attempt, with a number higher than any that was heard of."""
        state, promises = self._state, self._state.promises
        passed_number = max(promises.passed_number, state.view_id.number)
        number = max(promises.highest_number, passed_number)
        number += 1 if (number % 2 == 0) != planned else 2
        report = Report(f"opens view {number}: {reason}")
        base = state.view_id if planned else GENESIS
        attempt, actions = self.enter(number, planned, base, now_ns)
        return [report, *actions, *self.knowledge_grew(attempt, now_ns)]

    def enter(
        self, number: int, planned: bool, base: ViewId, now_ns: int
    ) -> tuple[Attempt, Actions]:
        """Begin this peer's part in the attempt; the caller tells others of it."""
        state, attempts, promises = self._state, self._state.attempts, self._state.promises
        assert number > promises.passed_number
        if attempts.under_way is not None:
            state.ends(attempts.under_way, now_ns)
            self._inherit_requests(attempts.under_way, now_ns)
        promises.hears_of(number)
        if attempts.replan_reason:
            attempts.replan_number = number
        self._syncing.refuse_unsynced(now_ns, 2)  # some other member may have given up waiting
        state.agreed.forget()
        attempts.reopen_ns = None
        actions = self._freeze(planned)
        attempt = attempts.under_way = self._attempt(number, planned, base, now_ns)
        doubts = state.doubts
        self.charge(attempt, doubts.suspects | doubts.distrusted | doubts.carried)
        doubts.carried = set()
        return attempt, actions

    def _inherit_requests(self, attempt: Attempt, now_ns: int) -> None:
        """A failure undoes the attempt. Newcomers that answered in it need not ask again, whichever
        member they had asked. Those that found a run together do so again together."""
        state = self._state
        if not (attempt.only_newcomers if state.is_newcomer else attempt.planned):
            return
        suspects = state.doubts.suspects if state.is_newcomer else set()
        gone = suspects | {state.me, *state.members, *(item.of for item in attempt.charges)}
        for member, part in sorted(attempt.opened.items()):
            is_there = member.life >= state.others.lives.get(member.peer_id, 0)
            if part.present is None and is_there and member not in gone:
                state.others.newcomers.ask(state.open_record(part.record), part.record, now_ns)

    def _freeze(self, planned: bool) -> Actions:
        """A failure ends the step under way; in a planned change of views it goes on."""
        state, attempts = self._state, self._state.attempts
        if planned:
            if state.is_newcomer:
                attempts.frozen = False  # a newcomer has nothing under way that could freeze
            return []
        if attempts.frozen:
            return []
        attempts.frozen = True
        state.recovery_evidence.freeze(state.ledger)
        return [] if state.is_newcomer else [StopStep()]

    def _attempt(self, number: int, planned: bool, base: ViewId, now_ns: int) -> Attempt:
        state, settings = self._state, self._state.settings
        layer_count, clock = settings.workload.layer_count, AttemptClock.started(now_ns)
        attempt = Attempt(state.me, number, planned, base, layer_count, settings.terms, clock)
        self._flooding.begin(attempt, contribution_to(state, number, planned, now_ns))
        return attempt

    # failing --------------------------------------------------------------------------------------

    def failed(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        """A frozen attempt cannot end any more; only a higher number ends it for everyone."""
        if not attempt.planned:
            return self.reopen(reason, now_ns)
        self._state.give_up(now_ns)
        if self._state.is_newcomer or self._state.ends_here:
            return [Report(f"gives up view {attempt.number}: {reason}")]
        return self.open(True, reason, now_ns)

    def reopen(self, reason: str, now_ns: int) -> Actions:
        """An unplanned attempt has failed: try again with a higher number, later each time.

        The number is never the same one. To the others, rounds that begin anew are older than what
        they have heard, and nothing settles. A newcomer waits for the members to try again: an
        attempt of its own would know of none of them.
        """
        state, attempts = self._state, self._state.attempts
        attempt = attempts.under_way
        if state.is_newcomer and attempt is not None and not attempt.only_newcomers:
            state.stop_attempt(now_ns)
            return [Report(f"gives up view {attempt.number}: {reason}")]
        if attempt is not None:
            self._inherit_requests(attempt, now_ns)
            state.passes(attempt, now_ns)
        attempts.failures += 1
        if attempts.failures == 1:
            return self.open(False, reason, now_ns)
        limit_ns, first_ns = state.timing.backoff_limit_ns, state.timing.backoff_ns
        delay_ns = min(limit_ns, first_ns << min(attempts.failures - 2, 16))
        attempts.reopen_ns = now_ns + delay_ns // 2 + delay_ns * state.prng.below(1024) // 2048
        return [Report(f"will try again: {reason}")]

    def begin_above(self, attempt: Attempt, message: Gather | Spread, now_ns: int) -> Actions:
        """The sender of `message` has passed the number of this attempt, and can take no part in
        it.

        Each sender has this peer begin anew once between two commits, unless most members have
        their part in what is frozen by then. A sender that says so again, or so late, is waited for
        in vain, like a silent one. Even then this peer goes above that number with its next
        attempt, should its own one fail.
        """
        state, sender = self._state, message.sender
        state.promises.hears_of(min(message.number, attempt.number + NUMBERS_PASSED_LIMIT))
        if (
            sender in attempt.opened
            or sender in state.attempts.passed_by
            or self._has_most(attempt)
        ):
            return []
        state.attempts.passed_by.add(sender)
        return self.reopen(f"{sender.peer_id} has passed the number {attempt.number}", now_ns)

    def _has_most(self, attempt: Attempt) -> bool:
        """Whether more than half of the present view's members have their part in what is
        frozen."""
        view, snapshot = self._state.view, attempt.snapshot
        if view is None or snapshot is None:
            return False
        return 2 * len(set(snapshot.contributors) & set(view.members)) > len(view.members)

    def held_up(
        self, attempt: Attempt, by: Iterable[Member], reason: str, now_ns: int, is_late: bool
    ) -> Actions:
        """A few of those that agreed say Ready to something else, or not at all, or tell late what
        they know (`is_late`). Messages that cross may bring that about once; who does it again is
        left out."""
        state, few_or_many, snapshot = self._state, list(by), attempt.snapshot
        had_agreed = snapshot is not None and not is_late
        again = state.doubts.accusers.holds_up(few_or_many, attempt.number, now_ns, had_agreed)
        all_of_it = snapshot.contributors if snapshot is not None else attempt.participants
        few = are_few(few_or_many, attempt, len(all_of_it))
        if state.is_newcomer or not (few and again):
            if few and attempt.only_newcomers:
                state.doubts.carried |= again
            if snapshot is None:
                state.give_up(now_ns)
                return []
            return self.failed(attempt, reason, now_ns)
        state.doubt_newcomers(again, now_ns)
        state.distrust_members(again)
        if not attempt.planned or not state.doubts.distrusted:
            return self.failed(attempt, reason, now_ns)
        state.give_up(now_ns)
        return self.open(False, reason, now_ns)

    # evidence -------------------------------------------------------------------------------------

    def charge(self, attempt: Attempt, members: Iterable[Member]) -> bool:
        """Accuse these in this attempt: they cannot be reached. True if that is news."""
        state, settings = self._state, self._state.settings
        new = {Accusation(state.me, member) for member in members} - attempt.charges.keys()
        for item in sorted(new):
            said = charge(item, settings.run_digest, attempt.number, settings.sign)
            attempt.charges[item] = said
        return bool(new)

    def accuse(self, attempt: Attempt, members: Iterable[Member], now_ns: int) -> Actions:
        """Accuse these in this attempt, and tell all."""
        new = self.charge(attempt, members)
        return self.knowledge_grew(attempt, now_ns) if new else []

    def knowledge_grew(self, attempt: Attempt, now_ns: int, own: bool = True) -> Actions:
        """Tell what is new, and see what it comes to. `own`: it is this peer's own evidence."""
        told = self._flooding.tell_news(attempt, now_ns, own)
        return told + self.check_settled(attempt, now_ns)

    def resend(self, attempt: Attempt, now_ns: int) -> Actions:
        """Send again what may have got lost."""
        return self._flooding.resend(attempt, now_ns)

    # settling -------------------------------------------------------------------------------------

    def check_settled(self, attempt: Attempt, now_ns: int) -> Actions:
        """Once all know the same, the knowledge is frozen, and planned."""
        state = self._state
        if attempt.snapshot is not None or attempt.is_waiting:
            return []
        if state.me not in attempt.participants:
            return self._excluded(attempt, now_ns)
        if not attempt.settled or (attempt.planned and attempt.only_newcomers):
            return []  # newcomers alone never make a planned view
        if instead := self._instead_of_freezing(attempt, now_ns):
            return instead
        left_out = [Report(f"leaves out {p}: {why}") for p, why in attempt.distrust.told()]
        settings = state.settings
        run_digest, workload = settings.run_digest, settings.workload
        snapshot = freeze(attempt, run_digest, workload, state.open_record)
        attempt.clock.progress_ns = attempt.clock.frozen_ns = now_ns
        for member in attempt.kept_out:
            state.others.newcomers.refuse(member.peer_id, now_ns)
        if snapshot.lost_layers:
            names = ", ".join(map(str, snapshot.lost_layers))
            reason = f"{LAYERS_LOST} {names} any more; waits for a peer that does"
            return left_out + self.plan_computed(snapshot, NoPlan(reason), now_ns)
        return [*left_out, ComputePlan(snapshot)]

    def _instead_of_freezing(self, attempt: Attempt, now_ns: int) -> Actions:
        """What is done where no view should come of what all know; nothing if one should."""
        state = self._state
        if accused := self._accused_by_all(attempt):
            state.distrust_members(accused)
            state.give_up(now_ns)
            return self.open(False, f"all accuse {names_of(accused)}", now_ns)
        if attempt.has_lost_members:
            state.give_up(now_ns)
            state.attempts.frozen = False
            return [Report(f"gives up view {attempt.number}: no member of its views is left")]
        if better := state.others.views.of_fellows.counts_more(attempt, state.view):
            return self._outsiders.rejoin(f"view {better} counts, where more of its fellows are")
        return []

    def _accused_by_all(self, attempt: Attempt) -> list[Member]:
        """Members of the present view that all others of it accuse in a planned attempt. Steps need
        their Prepared, so a view without them is never taken over; and they may open the next
        attempt for as long as they like."""
        view = self._state.view
        if view is None or not attempt.planned:
            return []
        staying = set(view.members) & set(attempt.participants)
        gone = sorted(set(view.members) - staying)
        return [of for of in gone if all(Accusation(by, of) in attempt.charges for by in staying)]

    def _excluded(self, attempt: Attempt, now_ns: int) -> Actions:
        awaits_others = attempt.only_newcomers or not self._state.is_newcomer
        if awaits_others and not attempt.planned:
            return []  # the others will say that they have gone on, or the attempt stalls
        self._state.stop_attempt(now_ns)
        return [Report(f"was not heard in time for view {attempt.number}; asks again")]

    def plan_computed(self, snapshot: Snapshot, plan: Plan | NoPlan, now_ns: int) -> Actions:
        """The result of `ComputePlan`."""
        state, attempt = self._state, self._state.attempt
        if attempt is None or attempt.snapshot is not snapshot or attempt.plan is not None:
            return []
        plan = attempt.outcome.plan = plan_of(attempt, plan)
        attempt.clock.progress_ns = now_ns
        promises, view = state.promises, View(snapshot, plan)
        promises.readies(attempt.number)
        others = state.others
        origins = None
        if state.is_newcomer:
            was_in_none = not others.views.history
            origins = origins_of_newcomer(attempt.counted, others.familiar, was_in_none)
        others.views.says_ready(view, attempt.sources, origins)
        ready = Ready(state.me, view.id, plan.digest(), members_digest(snapshot.members))
        mine = attempt.ready[state.me] = stated(ready, state.settings.sign)
        promises.said_ready.add(attempt, mine)
        told = self._flooding.tell_ready(attempt, mine, now_ns)
        return told + self.check_ready(now_ns)

    # ready ----------------------------------------------------------------------------------------

    def receive_ready(self, message: Ready, now_ns: int) -> Verdict:
        """One Ready for a number: a second one that says something else is a lie."""
        attempt = self._state.attempt
        if attempt is None or message.view.number != attempt.number:
            return refused("it is of another attempt")
        if message.sender not in attempt.universe:
            return refused("its sender takes no part in the attempt")
        if message.sender in attempt.ready:
            return refused("its sender has said Ready before")
        self.take_ready(attempt, [message], now_ns)
        told = self._flooding.pass_on(attempt, now_ns)
        told += self.check_settled(attempt, now_ns)  # most may have frozen what this peer knows
        return Verdict([*told, *self.check_ready(now_ns)], ready_verdict(attempt).reason)

    def take_ready(self, attempt: Attempt, said: Iterable[Ready], now_ns: int) -> bool:
        """Count the first Ready of each peer that takes part; True if any is new."""
        before = len(attempt.ready)
        for ready in said:
            if ready.sender in attempt.universe:
                attempt.ready.setdefault(ready.sender, ready)
        if len(attempt.ready) > before:
            attempt.clock.progress_ns = now_ns
        return len(attempt.ready) > before

    def check_ready(self, now_ns: int) -> Actions:
        """What the Ready of the contributors come to, for the attempt under way."""
        attempt = self._state.attempt
        if attempt is None:
            return []
        found = ready_verdict(attempt)
        if found.answers is Answers.MISSING:
            return []
        if found.answers is Answers.ALIKE:
            return self._agreed(attempt, now_ns)
        if found.answers is Answers.OTHER_VIEWS:
            return self.held_up(attempt, found.members, found.reason, now_ns, False)
        if found.answers is Answers.OUTVOTED:
            return self._disagrees(attempt, found.reason, now_ns)
        if found.answers is Answers.SPLIT:
            return self.failed(attempt, found.reason, now_ns)
        return self._on_other_plans(attempt, found, now_ns)

    def _agreed(self, attempt: Attempt, now_ns: int) -> Actions:
        state = self._state
        assert attempt.snapshot is not None and attempt.plan is not None
        answers = [attempt.ready[member] for member in attempt.snapshot.contributors]
        proof = certified(attempt.ready[state.me].view, attempt.snapshot.members, answers)
        view = View(attempt.snapshot, attempt.plan, proof)
        state.attempts.disagreements = 0
        state.others.views.note_agreed(view.id)
        last = self._flooding.end(attempt, now_ns)
        return last + self._waits_or_takes_over(attempt, view, now_ns)

    def _waits_or_takes_over(self, attempt: Attempt, view: View, now_ns: int) -> Actions:
        state = self._state
        if state.is_newcomer:
            state.doubts.accusers.adopt(attempt.heard.values(), now_ns)
        if not attempt.planned:
            return [ViewAgreed(view), *self._takeover.take_over(view, now_ns)]
        state.attempts.under_way = None
        state.doubts.heed(attempt, state.me, now_ns)
        state.waits_for_takeover(view, now_ns)
        if state.is_newcomer:
            state.recovery_evidence.held = {}
        return [ViewAgreed(view, discard=state.is_newcomer)]

    def _on_other_plans(self, attempt: Attempt, found: ReadyVerdict, now_ns: int) -> Actions:
        """A few planned the view otherwise: they lose their place, or are not let in. They may run
        another version, or lie."""
        state, report = self._state, Report(found.reason)
        if attempt.planned and are_newcomers_links(found.members, state.view):
            state.doubt_newcomers(found.members, now_ns)
            return [report, *self.failed(attempt, found.reason, now_ns)]
        state.doubts.suspects |= set(found.members)
        if state.is_newcomer:
            state.stop_attempt(now_ns)
            return [report]
        if not attempt.planned:
            return [report, *self.reopen(found.reason, now_ns)]
        state.give_up(now_ns)
        return [report, *self.open(False, found.reason, now_ns)]

    def _disagrees(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        state, attempts = self._state, self._state.attempts
        assert attempt.snapshot is not None
        pause_ns = min(DISAGREEMENT_NS << attempts.disagreements, DISAGREEMENT_LIMIT_NS)
        attempts.disagreements = min(attempts.disagreements + 1, 16)
        state.stop_attempt(now_ns)
        again = [] if state.is_newcomer else self._outsiders.rejoin(reason, pause_ns=pause_ns)
        return [Disagreed(reason, attempt.snapshot), *again]
