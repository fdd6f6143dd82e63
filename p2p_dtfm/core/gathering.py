"""Attempts at a view: opening, Gather, evidence, Ready, and what happens when one fails."""

from p2p_dtfm.core.actions import (
    Actions,
    ComputePlan,
    Halt,
    Report,
    SendMessage,
    StopStep,
    ViewAgreed,
)
from p2p_dtfm.core.agreement_messages import (
    Accusation,
    Contribution,
    Gather,
    Ready,
    open_contribution,
    sign_contribution,
)
from p2p_dtfm.core.agreement_state import MEMBERS_LIMIT
from p2p_dtfm.core.attempt import Attempt
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import GENESIS, Member, Snapshot, ViewId
from p2p_dtfm.core.takeover import Takeover
from p2p_dtfm.core.view import View

ROUNDS_LIMIT = 64
"""Rounds of Gather that may each start the deadline anew."""


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
        mine = Ready(self.me, attempt.view_id, plan.digest())
        attempt.ready[self.me] = mine
        self._last_ready = mine
        return [SendMessage(attempt.others, mine), *self._check_ready(now_ns)]

    def holds_up(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that a member does not do its part of the step: it stays until the takeover,
        however many attempts that takes, and though the member answers."""
        if self.view is not None and not self._outside:
            self._stuck |= {m for m in self.view.members if m.peer_id == peer_id and m != self.me}
        return self.suspect(peer_id, reason, now_ns)

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
        new = {Accusation(self.me, member) for member in members} - attempt.accusations
        attempt.accusations |= new
        return self._knowledge_grew(attempt, now_ns) if new else []

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
        self._highest_number = max(self._highest_number, number)
        if self._replan_reason:
            self._replan_number = number
        if now_ns - self._agreed_ns >= self._timing.sync_ns // 2:
            self._refuse_unsynced(now_ns)  # some other member may have given up waiting
        self._dropped = self.next_view = None
        self._self_synced = self._drop_next = False
        self._synced = set()
        self._reopen_ns = None
        actions: Actions = []
        if planned and self.view is None:
            self.frozen = False  # a newcomer has nothing under way that an attempt could freeze
        if not planned and not self.frozen:
            self.frozen = True
            self.inventory.freeze(self.ledger)
            if self.view is not None:
                actions.append(StopStep())
        attempt = Attempt(
            self.me, number, planned, base, self._workload.layer_count, now_ns, sent_ns=now_ns
        )
        self._attempt = attempt
        inventory = self.inventory
        mine = Contribution(
            member=self.me,
            number=number,
            record=self._record,
            present=self._present_view(),
            step=self.step,
            held=dict(inventory.held),
            joiners=self._newcomers.records,
            lineages=inventory.lineages(),
            saved=inventory.saved,
            pending=inventory.pending(self.view.id) if self.view and not planned else None,
            retained=inventory.retained,
            accepts_loss=self._accepts_loss,
        )
        attempt.add(sign_contribution(mine, self._signer), mine, self._open_record)
        accused = self._suspects | self._stuck
        attempt.accusations = {Accusation(self.me, member) for member in accused}
        attempt.accusations |= self._carried
        self._carried = set()
        return actions + (self._knowledge_grew(attempt, now_ns) if grew else [])

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
        self._attempt = None
        self._failures += 1
        if self._failures == 1:
            return self._open(False, reason, now_ns)
        limit_ns = self._timing.backoff_limit_ns
        delay_ns = min(limit_ns, self._timing.backoff_ns << min(self._failures - 2, 16))
        self._reopen_ns = now_ns + delay_ns // 2 + delay_ns * self._prng.below(1024) // 2048
        return [Report(f"will try again: {reason}")]

    def _receive_gather(self, message: Gather, now_ns: int) -> Actions:
        contributions = self._open_contributions(message)
        attempt = self._attempt
        if attempt is None or message.number != attempt.number:
            if attempt is None and self._repeats_last(message):
                assert self._last_ready is not None
                return [SendMessage((message.sender.peer_id,), self._last_ready)]
            opened = [contribution for _, contribution in contributions.values()]
            if not self._may_enter(message, opened):
                return self._stays_out(message, opened, now_ns)
            actions = self._enter(message.number, message.planned, message.base, now_ns)
            attempt = self._attempt
            assert attempt is not None
            attempt.heard_ns[message.sender] = now_ns
        else:
            actions = []
            if (message.planned, message.base) != (attempt.planned, attempt.base):
                return []
        actions += self._merge(attempt, message, contributions, now_ns)
        sender = attempt.opened.get(message.sender)
        if sender is not None and sender.present is not None:
            self._view_heard_ns = now_ns  # its members are only slow to agree on the next
        return actions

    def _merge(
        self,
        attempt: Attempt,
        message: Gather,
        contributions: dict[Member, tuple[Signed, Contribution]],
        now_ns: int,
    ) -> Actions:
        held = attempt.digests.get(message.sender, (0, ""))
        if message.round >= held[0]:
            attempt.digests[message.sender] = (message.round, message.digest)
        if attempt.snapshot is not None:
            moved_on = message.round > held[0] and message.digest != attempt.snapshot.knowledge
            waited_for = message.sender in attempt.snapshot.contributors
            if moved_on and waited_for and message.sender not in attempt.ready:
                self._refuse_accused(set(message.accusations) - attempt.accusations, now_ns)
                return self._failed(attempt, f"{message.sender.peer_id} knows more", now_ns)
            return []
        grew = attempt.round == 0
        for member, (signed, contribution) in contributions.items():
            if member not in attempt.known and self._is_welcome(contribution, attempt):
                attempt.add(signed, contribution, self._open_record)
                grew = True
        grew |= attempt.learn(message)
        if grew:
            return self._knowledge_grew(attempt, now_ns, own=False)
        return self._check_settled(attempt, now_ns)

    def _repeats_last(self, message: Gather) -> bool:
        """The sender still gathers what this peer has agreed to: its Ready must have got lost."""
        last = self._last_ready
        if last is None or last.view.number != message.number:
            return False
        return self.view is None or self.view.id.number < message.number

    def _open_contributions(self, message: Gather) -> dict[Member, tuple[Signed, Contribution]]:
        if len(message.contributions) > MEMBERS_LIMIT or len(message.absent) > MEMBERS_LIMIT:
            raise PeerFault("Gather with too many contributions", message.sender.peer_id)
        if len(message.accusations) > MEMBERS_LIMIT**2:
            raise PeerFault("Gather with too many accusations", message.sender.peer_id)
        attempt = self._attempt
        held = {} if attempt is None else {s: attempt.opened[m] for m, s in attempt.known.items()}
        contributions = {}
        for signed in message.contributions:
            contribution = held.get(signed) or self._open_contribution(signed, message.number)
            contributions[contribution.member] = (signed, contribution)
        return contributions

    def _open_contribution(self, signed: Signed, number: int) -> Contribution:
        contribution = open_contribution(signed, self._verify)
        owners = {signed.peer_id, contribution.member.peer_id, contribution.record.peer_id}
        if len(owners) > 1:
            raise PeerFault("a contribution that mixes several peers", signed.peer_id)
        if contribution.number != number:
            raise PeerFault("a contribution to another view", signed.peer_id)
        if self._open_record(contribution.record).life != contribution.member.life:
            raise PeerFault("a contribution with a record of another life", signed.peer_id)
        return contribution

    def _may_enter(self, message: Gather, parts: list[Contribution]) -> bool:
        passed = max(self._readied_number, self._given_up_number)
        if self._record is None or message.number <= passed:
            return False
        attempt = self._attempt
        if attempt is not None and message.number < attempt.number:
            return False
        present = [part.present for part in parts if part.present is not None]
        namers = [part for part in parts if part.present is not None or not present]
        joiners = [self._open_record(signed) for part in namers for signed in part.joiners]
        asked = any(Member(r.peer_id, r.life) == self.me for r in joiners)
        counted = [item for item in present if self.me in item.members]
        if self.view is None and message.planned and counted:
            return False  # where the base counts this peer in already, it must take that over first
        if self.view is None and self.next_view is not None:
            return message.planned and message.base == self.next_view.snapshot.previous
        if self.view is None:
            known = asked or any(part.member == self.me for part in parts)
            return self._wants_view and known
        if message.planned:
            vouched = self._vouched is not None
            return message.base == self.view.id and not self.frozen and not vouched
        if message.number <= self.view.id.number:
            return False
        succeeds = any(item.view.number > self.view.id.number for item in counted)
        return bool(counted) and (message.sender in self.view.members or succeeds)

    def _stays_out(self, message: Gather, parts: list[Contribution], now_ns: int) -> Actions:
        """Not for this peer: tell the sender what it does not know."""
        to, view, attempt = (message.sender.peer_id,), self.view, self._attempt
        if view is None:
            if any(part.present is not None for part in parts):
                self._view_heard_ns = now_ns
            return []
        if message.number == view.id.number and message.sender in view.snapshot.contributors:
            return [] if self.frozen else [SendMessage(to, self._active)]
        if message.sender not in view.members:
            return self._answer_outsider(message.sender, now_ns)
        if message.number <= view.id.number:
            return [] if self.frozen else [SendMessage(to, self._active)]
        if message.planned:
            return []
        if attempt is not None and not attempt.planned:
            return [SendMessage(to, attempt.gather())] if message.number < attempt.number else []
        own = [part for part in parts if part.member == message.sender]
        if self.frozen or not own or own[0].present is None or own[0].present.view != view.id:
            return []
        # A failure, under a number that this peer has passed: unplanned outranks planned.
        return self._open(False, f"{message.sender.peer_id} reports a failure", now_ns)

    def _is_welcome(self, contribution: Contribution, attempt: Attempt) -> bool:
        if not attempt.planned or contribution.present is None:
            return True
        return contribution.present.view == attempt.base

    def _knowledge_grew(self, attempt: Attempt, now_ns: int, own: bool = True) -> Actions:
        """Tell it, but no more than is needed where no message gets lost.

        Everyone sends its contribution and its `own` evidence to all, and says when it knows all;
        `_resend` repairs.
        """
        attempt.round += 1
        if attempt.round <= ROUNDS_LIMIT:
            attempt.progress_ns = now_ns
        attempt.digests[self.me] = (attempt.round, attempt.digest)
        others = attempt.others
        actions: Actions = []
        new = tuple(peer_id for peer_id in others if peer_id not in attempt.told)
        if new:
            attempt.told.update(new)
            actions.append(SendMessage(new, attempt.gather()))
        if len(new) < len(others) and (own or not attempt.waits_for):
            told = tuple(peer_id for peer_id in others if peer_id not in new)
            actions.append(SendMessage(told, attempt.gather(contributions=False)))
        return [*actions, *self._check_settled(attempt, now_ns)]

    def _check_settled(self, attempt: Attempt, now_ns: int) -> Actions:
        if attempt.snapshot is not None or attempt.waits_for:
            return []
        if self.me not in attempt.participants:
            return self._excluded(attempt, now_ns)
        if not attempt.settled or (attempt.planned and attempt.only_newcomers):
            return []  # newcomers alone never make a planned view
        snapshot = attempt.freeze(self._run_digest, self._workload, self._open_record)
        attempt.progress_ns = now_ns
        for member in attempt.kept_out:
            self._newcomers.refuse(member.peer_id, now_ns)
        if snapshot.lost_layers:
            names = ", ".join(str(layer) for layer in snapshot.lost_layers)
            reason = f"no member holds layers {names} any more; waits for a peer that does"
            return self.plan_computed(snapshot, NoPlan(reason), now_ns)
        return [ComputePlan(snapshot)]

    def _excluded(self, attempt: Attempt, now_ns: int) -> Actions:
        if self.view is not None and not attempt.planned:
            return []  # the others will say that they have gone on, or the attempt stalls
        self._give_up(now_ns)
        if self.view is None:
            self.frozen = False
        return [Report(f"was not heard in time for view {attempt.number}; asks again")]

    def _receive_ready(self, message: Ready, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or message.view.number != attempt.number:
            return []
        if message.sender not in attempt.ready:
            attempt.progress_ns = now_ns
        attempt.ready[message.sender] = message
        return self._check_ready(now_ns)

    def _check_ready(self, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or attempt.snapshot is None or attempt.plan is None:
            return []
        mine = attempt.ready[self.me]
        answers = [attempt.ready.get(member) for member in attempt.snapshot.contributors]
        for theirs in answers:
            if theirs is None or theirs.view != mine.view:
                continue
            if theirs.plan_digest != mine.plan_digest:
                reason = (
                    f"{theirs.sender.peer_id} planned snapshot {mine.view.snapshot[:12]} as "
                    f"{theirs.plan_digest[:12]}, this peer as {mine.plan_digest[:12]}"
                )
                return [Halt(reason, attempt.snapshot)]
        if not attempt.taken_over_elsewhere:
            if None in answers:
                return []
            if any(theirs is not None and theirs.view != mine.view for theirs in answers):
                return self._failed(attempt, "members know different things", now_ns)
        view = View(attempt.snapshot, attempt.plan)
        if not attempt.planned:
            return [ViewAgreed(view), *self._take_over(view, now_ns)]
        self._attempt = None
        self.next_view, self._agreed_ns = view, now_ns
        self._synced = set()
        self._self_synced = False
        new = self.view is None
        if new:
            self.held = {}
        return [ViewAgreed(view, discard=new)]

    def _resend(self, attempt: Attempt, now_ns: int) -> Actions:
        attempt.sent_ns = now_ns
        others = attempt.others
        same = attempt.same_as(others)
        behind = tuple(peer_id for peer_id in others if peer_id not in same)
        attempt.told.update(behind)
        actions: Actions = []
        if behind:
            actions.append(SendMessage(behind, attempt.gather()))
        if same:
            actions.append(SendMessage(same, attempt.gather(contributions=False)))
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
        if attempt.snapshot is None and waits_for:
            members = {m for p in attempt.opened.values() if p.present for m in p.present.members}
            if not attempt.planned or not waits_for & members:
                return self._go_on_without(attempt, waits_for, now_ns)
        due = attempt.snapshot.contributors if attempt.snapshot else attempt.participants
        mine = attempt.digests[self.me][1]
        silent = [
            member
            for member in due
            if member != self.me
            and attempt.heard_ns.get(member, -1) < attempt.progress_ns
            and member not in attempt.ready
            and (attempt.snapshot or Accusation(self.me, member) not in attempt.accusations)
            and attempt.digests.get(member, (0, ""))[1] != (mine if not attempt.snapshot else "")
        ]
        names = ", ".join(sorted(m.peer_id for m in waits_for or silent)) or "all alike"
        reason = f"view {attempt.number} had no answer from {names}"
        if attempt.planned and attempt.snapshot is None and self._are_newcomers_links(silent):
            self._refuse_accused({Accusation(self.me, member) for member in silent}, now_ns)
            return [Report(reason), *self._accuse(attempt, silent, now_ns)]
        if attempt.planned:
            report = Report(f"gives up: {reason}")
            if attempt.snapshot is not None:
                return [report, *self._failed(attempt, reason, now_ns)]
            self._give_up(now_ns)
            return [report]
        if attempt.snapshot is None and silent:
            self._suspects |= set(silent)
            return [Report(reason), *self._accuse(attempt, silent, now_ns)]
        self._suspects |= set(silent)
        if self.view is None:
            self._give_up(now_ns)
            self.frozen = False
            return [Report(f"gives up: {reason}")]
        return self._reopen(reason, now_ns)

    def _refuse_accused(self, accusations: set[Accusation], now_ns: int) -> None:
        """Newcomers with a link in doubt must not be in the next attempt, should this one fail."""
        if self.view is not None:
            members = set(self.view.members)
            doubted = {link for link in accusations if not {link.by, link.of} <= members}
            self._carried |= doubted
            for member in {end for link in doubted for end in (link.by, link.of)} - members:
                self._newcomers.refuse(member.peer_id, now_ns)

    def _are_newcomers_links(self, silent: list[Member]) -> bool:
        """Evidence that keeps a newcomer out, and cannot cost a member its place."""
        view = self.view
        return bool(silent) and (view is None or not set(silent) & set(view.members))

    def _go_on_without(self, attempt: Attempt, silent: set[Member], now_ns: int) -> Actions:
        attempt.absent |= silent
        for member in silent:
            self._newcomers.forget(member.peer_id)
        names = ", ".join(sorted(member.peer_id for member in silent))
        report = Report(f"goes on without {names}: silent during Gather({attempt.number})")
        return [report, *self._knowledge_grew(attempt, now_ns)]
