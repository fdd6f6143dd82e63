"""Attempts at a view: opening, what is told of it, evidence, and what happens when one fails."""

from collections import Counter
from collections.abc import Iterable

from p2p_dtfm.core.consensus.actions import (
    SECOND_NS,
    Actions,
    ComputePlan,
    Disagreed,
    Report,
    SendMessage,
    StopStep,
    ViewAgreed,
)
from p2p_dtfm.core.consensus.attempt import Attempt
from p2p_dtfm.core.consensus.silence import silent_in
from p2p_dtfm.core.consensus.takeover import Takeover
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Contribution,
    Ready,
    sign_contribution,
)
from p2p_dtfm.core.messages.statements import certified, charge, members_digest, stated
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot, ViewId
from p2p_dtfm.core.recovery.view import View

ROUNDS_LIMIT = 64
"""Rounds of Gather that may each start the deadline anew."""
DEADLINES_LIMIT = 8
"""So many deadlines after its beginning no news starts the deadline of a Gather anew."""
DISAGREEMENT_NS = 10 * SECOND_NS
DISAGREEMENT_LIMIT_NS = 640 * SECOND_NS
"""Whom most others contradict waits so long before it asks to join again; longer each time."""


class Gathering(Takeover):
    """At most one attempt at a time, and numbers only grow."""

    def plan_computed(self, snapshot: Snapshot, plan: Plan | NoPlan, now_ns: int) -> Actions:
        """The result of `ComputePlan`."""
        attempt = self._attempt
        if attempt is None or attempt.snapshot is not snapshot or attempt.plan is not None:
            return []
        plan = attempt.plan = attempt.chosen(plan)
        attempt.progress_ns = now_ns
        self._readied_number = max(self._readied_number, attempt.number)
        assert attempt.view_id is not None
        origins = attempt.origins if self.view is None else None
        self._known.says_ready(View(snapshot, plan), attempt.sources, origins)
        ready = Ready(self.me, attempt.view_id, plan.digest(), members_digest(snapshot.members))
        mine = attempt.ready[self.me] = stated(ready, self._signer)
        self._said_ready.add(attempt, mine)
        return [SendMessage(attempt.others, mine), *self._check_ready(now_ns)]

    def holds_up(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that a member does not do its part of the step: it stays until the takeover,
        however many attempts that takes, and though the member answers."""
        self._doubt_until_takeover(peer_id)
        return self.suspect(peer_id, reason, now_ns)

    def _doubt_until_takeover(self, peer_id: str) -> None:
        if self.view is not None and not self._outside:
            members = self.view.members
            self._distrust_members({m for m in members if m.peer_id == peer_id and m != self.me})

    def suspect(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that this peer cannot reach `peer_id`; hearing from it takes it back."""
        named: set[Member] = set(self.view.members) if self.view else set()
        if self.next_view is not None:
            named |= set(self.next_view.snapshot.contributors)
        if self._attempt is not None:
            named |= self._attempt.universe
        actions: Actions = []
        for member in sorted(named):
            new = member not in self._suspects and member != self.me
            if member.peer_id == peer_id and new and not self._outside:
                actions += self._on_evidence(member, reason, now_ns)
        return actions

    def distrust(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """`peer_id` sends what no correct peer sends, and being heard from is no excuse.

        It is told in an attempt under way, and with the next one; the caller opens that a little
        later, with `suspect`: others, who were sent the same, have then found it out as well, and
        it is not one word against another.
        """
        self._doubt_until_takeover(peer_id)
        return self.suspect(peer_id, reason, now_ns) if self.frozen else []

    def _on_evidence(self, member: Member, reason: str, now_ns: int) -> Actions:
        self._suspects.add(member)
        attempt = self._attempt
        text = f"cannot reach {member.peer_id}: {reason}"
        if attempt is not None and not attempt.planned:
            if attempt.snapshot is None:
                return [Report(text), *self._accuse(attempt, [member], now_ns)]
            if member in attempt.snapshot.contributors and member not in attempt.ready:
                return [Report(text), *self._reopen(text, now_ns)]
            return [Report(text)]
        if self.view is not None and member in self.view.members:
            if self.frozen:
                return [Report(text)]
            return self._open(False, text, now_ns)
        if attempt is not None and member in attempt.universe:
            self._give_up(now_ns)
        if self.next_view is not None and member in self.next_view.members:
            self._drop_next = True
            if self._vouched is None:
                self._drop_next_view()
        self._newcomers.forget(member.peer_id)
        return [Report(text)]

    def _accuse(self, attempt: Attempt, members: list[Member], now_ns: int) -> Actions:
        new = self._charge(attempt, members)
        return self._knowledge_grew(attempt, now_ns) if new else []

    def _charge(self, attempt: Attempt, members: Iterable[Member]) -> bool:
        """Say in this attempt that they cannot be reached; True if that is news."""
        new = {Accusation(self.me, member) for member in members} - attempt.charges.keys()
        for item in sorted(new):
            attempt.charges[item] = charge(item, self._run_digest, attempt.number, self._signer)
        return bool(new)

    def _open(self, planned: bool, reason: str, now_ns: int) -> Actions:
        number = max(
            self._highest_number,
            self._readied_number,
            self._given_up_number,
            self.view.id.number if self.view else 0,
        )
        number += 1 if (number % 2 == 0) != planned else 2
        report = Report(f"opens view {number}: {reason}")
        return [report, *self._enter(number, planned, self._base(planned), now_ns, grew=True)]

    def _base(self, planned: bool) -> ViewId:
        return self.view.id if planned and self.view is not None else GENESIS

    def _enter(
        self, number: int, planned: bool, base: ViewId, now_ns: int, grew: bool = False
    ) -> Actions:
        assert self._record is not None
        assert number > max(self._readied_number, self._given_up_number)
        if self._attempt is not None:
            self._heed_accusers(self._attempt, now_ns)
        self._highest_number = max(self._highest_number, number)
        if self._replan_reason:
            self._replan_number = number
        self._refuse_unsynced(now_ns, 2)  # some other member may have given up waiting
        self._dropped = self.next_view = None
        self._self_synced = self._drop_next = False
        self._synced = set()
        self._reopen_ns = None
        actions: Actions = []
        if planned and self.view is None:
            self.frozen = False  # a newcomer has nothing under way that an attempt could freeze
        if not planned and not self.frozen:
            self.frozen = True
            self.recovery_evidence.freeze(self.ledger)
            if self.view is not None:
                actions.append(StopStep())
        attempt = Attempt(
            self.me,
            number,
            planned,
            base,
            self._workload.layer_count,
            now_ns,
            sent_ns=now_ns,
            terms=self.terms,
        )
        attempt.began_ns = now_ns
        self._attempt = attempt
        recovery_evidence = self.recovery_evidence
        mine = Contribution(
            member=self.me,
            number=number,
            record=self._record,
            present=self._present_view(),
            step=self.step,
            held=dict(recovery_evidence.held),
            joiners=self._named_newcomers(planned),
            lineages=recovery_evidence.lineages(),
            saved=recovery_evidence.saved,
            cuts=recovery_evidence.cuts,
            pending=recovery_evidence.pending(self.view.id) if self.view and not planned else None,
            retained=recovery_evidence.told_of_last_step(planned, self._sees_fork),
            accepts_loss=self._agrees_to_loss(now_ns) or self._sees_fork,
            accusers=self._accusers.named(now_ns),
        )
        attempt.add(sign_contribution(mine, self._signer), mine)
        attempt.newcomers = self._newcomers.members
        if self.view is not None and self.view.certificate is not None:
            attempt.certificates[self.view.id] = self.view.certificate
        self._charge(attempt, self._suspects | self._distrusted | self._carried)
        self._carried = set()
        return actions + (self._knowledge_grew(attempt, now_ns) if grew else [])

    @property
    def _sees_fork(self) -> bool:
        """Members have states of unlike lineages: no waiting brings one that all layers have."""
        return self.ledger is not None and self.ledger.forks

    def _reopen(self, reason: str, now_ns: int) -> Actions:
        """An unplanned attempt has failed: again with a higher number, later each time.

        Never with the same one: to the others, rounds that begin anew are older than what they
        have heard, and nothing settles. A newcomer waits for the members to try again: by itself
        it would know of none of them.
        """
        attempt = self._attempt
        if self.view is None and attempt is not None and not attempt.only_newcomers:
            self._give_up(now_ns)
            self.frozen = False
            return [Report(f"gives up view {attempt.number}: {reason}")]
        if attempt is not None:
            self._given_up_number = max(self._given_up_number, attempt.number)
            self._heed_accusers(attempt, now_ns)
        self._attempt = None
        self._failures += 1
        if self._failures == 1:
            return self._open(False, reason, now_ns)
        limit_ns = self._timing.backoff_limit_ns
        delay_ns = min(limit_ns, self._timing.backoff_ns << min(self._failures - 2, 16))
        self._reopen_ns = now_ns + delay_ns // 2 + delay_ns * self._prng.below(1024) // 2048
        return [Report(f"will try again: {reason}")]

    def _knowledge_grew(self, attempt: Attempt, now_ns: int, own: bool = True) -> Actions:
        """Tell it, but no more than is needed where no message gets lost.

        Everyone sends its contribution and its `own` evidence to all, and says when it knows all;
        `_resend` repairs.
        """
        attempt.round += 1
        lasts_ns = now_ns - attempt.began_ns
        if attempt.round <= ROUNDS_LIMIT and lasts_ns < DEADLINES_LIMIT * self._timing.gather_ns:
            attempt.progress_ns = now_ns
        attempt.digests[self.me] = (attempt.round, attempt.digest)
        others = attempt.others
        actions: Actions = []
        new = tuple(peer_id for peer_id in others if peer_id not in attempt.told)
        if new:
            actions += self._tell_all(attempt, new)
        if len(new) < len(others) and (own or not attempt.waits_for):
            told = tuple(peer_id for peer_id in others if peer_id not in new)
            actions.append(SendMessage(told, attempt.gather()))
        return [*actions, *self._check_settled(attempt, now_ns)]

    def _tell_all(self, attempt: Attempt, peer_ids: tuple[str, ...]) -> Actions:
        """Everything; to those that may not know of contributors' views, with proof of them."""
        attempt.told.update(peer_ids)
        alike = self.view is not None and set(attempt.certificates) <= {self.view.id}
        active = self._active_members.get(self.view.id, {}) if self.view and alike else {}
        fellows = {member.peer_id for member in active}
        actions: Actions = []
        for proofs in (False, True):
            to = tuple(peer_id for peer_id in peer_ids if (peer_id not in fellows) == proofs)
            actions += [SendMessage(to, part) for part in attempt.whole(proofs)] if to else []
        return actions

    def _check_settled(self, attempt: Attempt, now_ns: int) -> Actions:
        if attempt.snapshot is not None or attempt.waits_for:
            return []
        if self.me not in attempt.participants:
            return self._excluded(attempt, now_ns)
        if not attempt.settled or (attempt.planned and attempt.only_newcomers):
            return []  # newcomers alone never make a planned view
        if attempt.has_lost_members:
            self._give_up(now_ns)
            self.frozen = False
            return [Report(f"gives up view {attempt.number}: no member of its views is left")]
        left_out = [Report(f"leaves out {p}: {why}") for p, why in attempt.distrust.told()]
        snapshot = attempt.freeze(self._run_digest, self._workload, self._open_record)
        attempt.progress_ns = attempt.frozen_ns = now_ns
        for member in attempt.kept_out:
            self._newcomers.refuse(member.peer_id, now_ns)
        if snapshot.lost_layers:
            names = ", ".join(str(layer) for layer in snapshot.lost_layers)
            reason = f"no member holds layers {names} any more; waits for a peer that does"
            return left_out + self.plan_computed(snapshot, NoPlan(reason), now_ns)
        return [*left_out, ComputePlan(snapshot)]

    def _excluded(self, attempt: Attempt, now_ns: int) -> Actions:
        if (self.view is not None or attempt.only_newcomers) and not attempt.planned:
            return []  # the others will say that they have gone on, or the attempt stalls
        self._give_up(now_ns)
        if self.view is None:
            self.frozen = False
        return [Report(f"was not heard in time for view {attempt.number}; asks again")]

    def _receive_ready(self, message: Ready, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or message.view.number != attempt.number:
            return []
        if message.sender not in attempt.universe or message.sender in attempt.ready:
            return []  # one Ready for a number: a second one that says something else is a lie
        attempt.progress_ns = now_ns
        attempt.ready[message.sender] = message
        return self._check_ready(now_ns)

    def _check_ready(self, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or attempt.snapshot is None or attempt.plan is None:
            return []
        mine, contributors = attempt.ready[self.me], attempt.snapshot.contributors
        answers = [attempt.ready[member] for member in contributors if member in attempt.ready]
        strays = [theirs.sender for theirs in answers if theirs.view != mine.view]
        if strays:
            if len(answers) < len(contributors):
                return []
            return self._held_up(attempt, strays, "members know different things", now_ns)
        liars = [it for it in answers if not _says_the_same(it, mine)]
        if liars:
            return self._on_other_plans(attempt, liars, len(answers) - len(liars), now_ns)
        if len(answers) < len(contributors):
            return []
        proof = certified(mine.view, attempt.snapshot.members, answers)
        view = View(attempt.snapshot, attempt.plan, proof)
        self._disagreements = 0
        if not attempt.planned:
            return [ViewAgreed(view), *self._take_over(view, now_ns)]
        self._attempt = None
        self.next_view, self._agreed_ns = view, now_ns
        self._synced = set()
        self._self_synced = False
        self._given.begin()
        new = self.view is None
        if new:
            self.held = {}
        return [ViewAgreed(view, discard=new)]

    def _held_up(self, attempt: Attempt, by: list[Member], reason: str, now_ns: int) -> Actions:
        """A few of those that agreed say Ready to something else, or not at all. Messages that
        cross may bring that about once; who does it again is left out, though it answers."""
        snapshot = attempt.snapshot
        again = self._accusers.holds_up(by, attempt.number, now_ns, snapshot is not None)
        few = 2 * len(by) < len(snapshot.contributors if snapshot else attempt.participants)
        if self.view is None or not (few and again):
            if few and attempt.only_newcomers:
                self._carried |= again
            if snapshot is None:
                self._give_up(now_ns)
                return []
            return self._failed(attempt, reason, now_ns)
        self._doubt(again, now_ns)
        self._distrust_members(again)
        if not attempt.planned or not self._distrusted:
            return self._failed(attempt, reason, now_ns)
        self._give_up(now_ns)
        return self._open(False, reason, now_ns)

    def _on_other_plans(
        self, attempt: Attempt, others: list[Ready], alike: int, now_ns: int
    ) -> Actions:
        """They planned the same snapshot differently. Who is in the minority goes, or is left out:
        it may run another version, or lie."""
        assert attempt.snapshot is not None and attempt.plan is not None
        digests = Counter(item.plan_digest for item in others)
        plan_digest, count = digests.most_common(1)[0]
        due = len(attempt.snapshot.contributors)
        if 2 * count > due:
            reason = (
                f"{count} of {due} peers planned view {attempt.number} as {plan_digest[:12]}, "
                f"this peer as {attempt.plan.digest()[:12]}: perhaps it runs another version"
            )
            return self._disagrees(attempt, reason, now_ns)
        if 2 * alike < due:
            decided = alike + len(others) == due
            reason = "the peers planned it in several ways"
            return self._failed(attempt, reason, now_ns) if decided else []
        members = [item.sender for item in others]
        names = ", ".join(sorted(member.peer_id for member in members))
        text = f"{names} planned view {attempt.number} differently: perhaps another version"
        report = Report(text)
        if attempt.planned and self._are_newcomers_links(members):
            self._doubt(members, now_ns)
            return [report, *self._failed(attempt, text, now_ns)]
        self._suspects |= set(members)
        if self.view is None:
            self._give_up(now_ns)
            self.frozen = False
            return [report]
        if not attempt.planned:
            return [report, *self._reopen(text, now_ns)]
        self._give_up(now_ns)
        return [report, *self._open(False, text, now_ns)]

    def _disagrees(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        assert attempt.snapshot is not None
        told = Disagreed(reason, attempt.snapshot)
        pause_ns = min(DISAGREEMENT_NS << self._disagreements, DISAGREEMENT_LIMIT_NS)
        self._disagreements = min(self._disagreements + 1, 16)
        self._give_up(now_ns)
        if self.view is None:
            self.frozen = False
            return [told]
        return [told, *self._rejoin(reason, pause_ns=pause_ns)]

    def _resend(self, attempt: Attempt, now_ns: int) -> Actions:
        attempt.sent_ns = now_ns
        others = attempt.others
        same = attempt.same_as(others)
        behind = tuple(peer_id for peer_id in others if peer_id not in same)
        actions = self._tell_all(attempt, behind) if behind else []
        if same:
            actions.append(SendMessage(same, attempt.gather()))
        if self.me in attempt.ready:
            actions.append(SendMessage(others, attempt.ready[self.me]))
        return actions

    def _failed(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        """A frozen attempt cannot end any more; only a higher number ends it for everyone."""
        if not attempt.planned:
            return self._reopen(reason, now_ns)
        self._give_up(now_ns)
        if self.view is not None:
            return self._open(True, reason, now_ns)
        return [Report(f"gives up view {attempt.number}: {reason}")]

    def _stalled(self, attempt: Attempt, now_ns: int) -> Actions:
        waits_for = attempt.waits_for
        is_dispensable = not attempt.planned or not waits_for & attempt.members
        if attempt.snapshot is None and waits_for and is_dispensable:
            return self._go_on_without(attempt, waits_for, now_ns)
        silent = silent_in(attempt, is_member=self.view is not None or attempt.only_newcomers)
        names = ", ".join(sorted(m.peer_id for m in waits_for or silent)) or "all alike"
        reason = f"view {attempt.number} had no answer from {names}"
        if attempt.planned and self._are_newcomers_links(silent):
            self._doubt(silent, now_ns)
            if attempt.snapshot is None:
                return [Report(reason), *self._accuse(attempt, silent, now_ns)]
        if attempt.planned:
            report = Report(f"gives up: {reason}")
            return [report, *self._held_up(attempt, silent, reason, now_ns)]
        self._suspects |= set(silent)
        self._distrust_members(set(silent) & set(attempt.opened))
        if attempt.snapshot is None and silent:
            return [Report(reason), *self._accuse(attempt, silent, now_ns)]
        if self.view is None:
            return self._stalled_outside(attempt, silent, reason, now_ns)
        return self._reopen(reason, now_ns)

    def _stalled_outside(
        self, attempt: Attempt, silent: list[Member], reason: str, now_ns: int
    ) -> Actions:
        """Those that found a run try again, without who has said what it knows and then no Ready;
        others leave it to the members."""
        if attempt.only_newcomers and attempt.snapshot is not None:
            self._carried |= set(silent)
            return self._reopen(reason, now_ns)
        self._give_up(now_ns)
        self.frozen = False
        return [Report(f"gives up: {reason}")]

    def _go_on_without(self, attempt: Attempt, silent: set[Member], now_ns: int) -> Actions:
        attempt.absent |= silent
        for member in silent - attempt.members:
            self._newcomers.was_silent(member.peer_id, now_ns)
        names = ", ".join(sorted(member.peer_id for member in silent))
        report = Report(f"goes on without {names}: silent during Gather({attempt.number})")
        return [report, *self._knowledge_grew(attempt, now_ns)]


def _says_the_same(theirs: Ready, mine: Ready) -> bool:
    return (theirs.plan_digest, theirs.members_digest) == (mine.plan_digest, mine.members_digest)
