"""What arrives in a Gather: whose word counts in an attempt, and who may make this peer enter one.

A contribution counts if its contributor is a member of a view that this peer knows or has proof of,
or a newcomer that such a member names. Nobody else is ever waited for.
"""

from collections.abc import Iterable

from p2p_dtfm.core.consensus.actions import Actions, Report, SendMessage
from p2p_dtfm.core.consensus.attempt import Attempt
from p2p_dtfm.core.consensus.gathering import Gathering
from p2p_dtfm.core.consensus.patience import patience_ns
from p2p_dtfm.core.consensus.silence import silent_in
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Charge,
    Contribution,
    Gather,
    Ready,
    open_contribution,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import CERTIFICATES_LIMIT, require_bounded_contribution
from p2p_dtfm.core.messages.statements import is_charge, signers, stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member

NUMBERS_AHEAD_LIMIT = 1 << 16
"""A view's number may be so much above the highest that is known."""
Contributions = dict[Member, tuple[Signed, Contribution]]


class GatherReception(Gathering):
    """Judges claims before they become knowledge."""

    def _receive_gather(self, message: Gather, now_ns: int) -> Actions:
        if message.planned != (message.number % 2 == 0):
            raise PeerFault("a view with a number of the wrong parity", message.sender.peer_id)
        contributions = self._open_contributions(message)
        for signed in message.newcomers:
            self._open_record(signed)  # before anything is changed: a fault must not leave half
        opened = [contribution for _, contribution in contributions.values()]
        self._learn_certificates(message)
        missed = self._hear_of_agreement(message.sender, message.certificates, now_ns)
        if missed:
            return missed  # from where that leads it answers when it is asked again
        attempt = self._attempt
        if attempt is None or message.number != attempt.number:
            lost = self._lost_ready(message)
            if lost is not None:
                return [SendMessage((message.sender.peer_id,), lost)]
            if not self._may_enter(message, opened):
                return self._stays_out(message, opened, now_ns)
            self._side_with_who_opens(now_ns)
            self._note_opener(message, opened, now_ns)
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

    def _side_with_who_opens(self, now_ns: int) -> None:
        """Somebody gives up an attempt and opens another one: who has kept this peer waiting for
        half of what it may is at fault for it, too. Else it is one word against another."""
        attempt = self._attempt
        founds = self.view is None and attempt is not None and attempt.only_newcomers
        if attempt is None or attempt.planned or (self.view is None and not founds):
            return
        patience = patience_ns(attempt, self._timing, self.view is not None)
        if 2 * (now_ns - attempt.progress_ns) >= patience:
            silent = silent_in(attempt, is_member=True)
            self._distrust_members(silent)
            self._carried |= set(silent) if founds else set()

    def _note_opener(self, message: Gather, parts: list[Contribution], now_ns: int) -> None:
        """Whoever stops steps again and again, and accuses nobody, is itself in doubt."""
        trains = self.view is not None and isinstance(self.view.plan, Plan)
        if not trains or message.planned or message.accusations or self.frozen:
            return
        makers = {part.member for part in parts} - {message.sender} or {message.sender}
        if len(makers) == 1:  # who passes it on has entered on the word of another one
            self._distrust_members(self._accusers.stops_steps(makers, now_ns))

    # proof ----------------------------------------------------------------------------------------

    def _learn_certificates(self, message: Gather) -> None:
        """A newcomer takes the first view that it hears of on its members' word, then no other."""
        attempt = self._attempt
        unsettled = attempt is None or attempt.only_newcomers or message.number > attempt.number
        takes_side = self.view is None and unsettled and message.certificates
        before = self._known.forget_certified() if takes_side else {}
        for certificate in message.certificates:
            self._learn_certificate(certificate, message, unsettled)
        self._known.unless_news(before)

    def _learn_certificate(
        self, certificate: Certificate, message: Gather, unsettled: bool
    ) -> None:
        if self._known.find(certificate.view) is not None:
            return
        present = self.view.id if self.view is not None else GENESIS
        learnt = self._known.learn(certificate, present, self._verify)
        if self.view is None and not learnt and not message.planned:
            learnt = self._known.learn_earlier(certificate, self._verify)
        if self.view is None and unsettled and not learnt:
            based = certificate.view == message.base
            if based if message.planned else message.sender in certificate.members:
                self._known.trust(certificate, self._verify, self.familiar)

    def _hear_of_agreement(
        self, sender: Member, certificates: Iterable[Certificate | None], now_ns: int
    ) -> Actions:
        """Others have taken over what this peer waits for, or has gone on from: all said Ready.

        A member that went on, to an attempt of which the others know more, would be in a view that
        they have left, and some would not know theirs: what they gather would never be the same.
        It does not go back on the word of one whose own Ready it lacked: who keeps it from the
        others, and then shows it, would hold them up again and again. Where it was lost on its way,
        some of the others show the certificate as well.
        """
        for certificate in certificates:
            attempt = self._said_ready.find(certificate.view) if certificate is not None else None
            if certificate is None or attempt is None:
                continue
            is_present = attempt is self._attempt
            if is_present or self._may_go_back_to(attempt, sender):
                attempt.take_ready(certificate, self._verify)
                if is_present or attempt.is_agreed:
                    actions = self._end_of(attempt, is_present, now_ns)
                    if actions:
                        return actions
        return []

    def _end_of(self, attempt: Attempt, is_present: bool, now_ns: int) -> Actions:
        if is_present:
            return self._check_ready(now_ns)
        is_awaited = self._attempt is not None
        if is_awaited:
            self._give_up(now_ns)
        self._attempt = attempt
        report = Report(f"missed the takeover of view {attempt.view_id}")
        actions = [report, *self._check_ready(now_ns)]
        if is_awaited and self._attempt is None:
            self._reopen_ns = now_ns  # the others wait for an answer
        return actions

    def _may_go_back_to(self, attempt: Attempt, sender: Member) -> bool:
        """Not from one in which it has said Ready as well: that may be the view by now."""
        if not attempt.has_said_ready(sender):
            return False
        view, present = self.view, self._attempt
        if view is None or attempt.planned or attempt.number <= view.id.number:
            return False
        return present is None or (not present.planned and self.me not in present.ready)

    def _keep_certificates(self, attempt: Attempt, message: Gather) -> None:
        """To pass them on, if all members of the view have signed."""
        for certificate in message.certificates:
            full = len(attempt.certificates) >= CERTIFICATES_LIMIT
            if certificate.view in attempt.certificates or full:
                continue
            is_known = self._known.find(certificate.view) is not None
            if is_known and set(certificate.members) <= signers(certificate, self._verify):
                attempt.certificates[certificate.view] = certificate

    def _counts(self, part: Contribution, attempt: Attempt) -> bool:
        """Whether a contribution is one of those that all must have."""
        if part.present is None:
            if attempt.only_newcomers:
                return self.view is None
            return part.member in attempt.universe or part.member in attempt.named_newcomers
        if not self._known.is_proven(part):
            return False
        if attempt.planned and part.present.view != attempt.base:
            return False
        anchor = self.view.id.number if self.view is not None else 0
        is_named = part.member in attempt.universe or part.member in attempt.members
        return is_named or part.present.view.number > anchor

    def _admit(self, attempt: Attempt, contributions: Contributions) -> bool:
        """Add those that count, and those that count now because of them; True if any did."""
        waiting = [*attempt.parked.values(), *contributions.values()]
        waiting.sort(key=lambda item: (item[1].present is None, item[1].member))
        grew, again = False, True
        while again:
            again = False
            for signed, part in waiting:
                if part.member not in attempt.known and self._counts(part, attempt):
                    attempt.add(signed, part)
                    attempt.parked.pop(part.member, None)
                    grew = again = True
        for signed, part in waiting:
            if part.member not in attempt.known:
                attempt.park(signed, part)
        return grew

    # merging --------------------------------------------------------------------------------------

    def _merge(
        self, attempt: Attempt, message: Gather, contributions: Contributions, now_ns: int
    ) -> Actions:
        if attempt.snapshot is not None:
            return self._hear_while_ready(attempt, message, now_ns)
        grew = attempt.round == 0
        grew |= self._admit(attempt, contributions)
        self._keep_certificates(attempt, message)
        if message.sender in attempt.universe:
            self._note_digest(attempt, message)
            grew |= self._learn_evidence(attempt, message, now_ns)
            self._learn_newcomers(attempt, message)
        actions: Actions = []
        liars = self._contradicted(attempt, contributions)
        if liars and self._charge(attempt, liars):
            grew = True
            self._doubt(liars, now_ns)
        for liar in liars:
            grew |= liar not in attempt.contradicted
            attempt.contradicted.setdefault(liar, contributions[liar][0])
        if grew:
            return [*actions, *self._knowledge_grew(attempt, now_ns, own=bool(liars))]
        return self._check_settled(attempt, now_ns)

    def _note_digest(self, attempt: Attempt, message: Gather) -> int:
        """Keeps the newest; returns the round of the one before."""
        held = attempt.digests.get(message.sender, (0, ""))
        if message.round >= held[0]:
            attempt.digests[message.sender] = (message.round, message.digest)
        return held[0]

    def _hear_while_ready(self, attempt: Attempt, message: Gather, now_ns: int) -> Actions:
        assert attempt.snapshot is not None
        if message.sender not in attempt.snapshot.contributors:
            return []
        moved_on = message.round > self._note_digest(attempt, message)
        moved_on &= message.digest != attempt.snapshot.knowledge
        if not moved_on or message.sender in attempt.ready:
            return []
        news = [item for item in message.accusations if self._is_news(attempt, item)]
        self._refuse_accused({item.accusation for item in news}, now_ns)
        return self._failed(attempt, f"{message.sender.peer_id} knows more", now_ns)

    def _is_news(self, attempt: Attempt, item: Charge) -> bool:
        by = item.accusation.by
        if item.accusation in attempt.charges or by not in attempt.universe or by == self.me:
            return False
        return is_charge(item, self._run_digest, attempt.number, self._verify)

    def _learn_evidence(self, attempt: Attempt, message: Gather, now_ns: int) -> bool:
        grew = False
        for item in message.accusations:
            if item.accusation.of in attempt.universe and self._is_news(attempt, item):
                attempt.charges[item.accusation] = item
                grew = True
        attempt.learn_absent(message.sender, message.absent)
        return self._believe_absent(attempt, now_ns) or grew

    def _believe_absent(self, attempt: Attempt, now_ns: int) -> bool:
        """Nobody is given up on one peer's word before this peer has waited half as long itself."""
        waited_ns, members = now_ns - attempt.began_ns, attempt.members

        def has_waited(member: Member) -> bool:
            timing = self._timing
            limit_ns = timing.gather_ns if member in members else timing.newcomer_ns
            return waited_ns >= limit_ns // 2

        return attempt.believe_absent(has_waited)

    def _learn_newcomers(self, attempt: Attempt, message: Gather) -> None:
        """Records of named newcomers, to pass them on."""
        for signed in message.newcomers:
            record = self._open_record(signed)
            member = Member(record.peer_id, record.life)
            if member in attempt.universe:
                attempt.newcomers.setdefault(member, signed)

    def _contradicted(self, attempt: Attempt, contributions: Contributions) -> list[Member]:
        """Contributors that have signed two different contributions to this attempt."""
        return [
            member
            for member, (signed, _) in contributions.items()
            if member in attempt.known
            and member != self.me
            and attempt.known[member].payload != signed.payload
        ]

    def _lost_ready(self, message: Gather) -> Ready | None:
        """The sender still gathers what this peer has agreed to: its Ready must have got lost."""
        last = self._said_ready.last
        if self._attempt is not None or last is None or last.view.number != message.number:
            return None
        return last if self.view is None or self.view.id.number < message.number else None

    def _open_contributions(self, message: Gather) -> Contributions:
        attempt = self._attempt
        held = {} if attempt is None else {s: attempt.opened[m] for m, s in attempt.known.items()}
        contributions = {}
        for signed in message.contributions:
            contribution = held.get(signed) or self._open_contribution(signed, message.number)
            if signed not in held or contribution.member not in contributions:
                contributions[contribution.member] = (signed, contribution)  # of two the news
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
        require_bounded_contribution(contribution, self._workload.layer_count)
        return contribution

    # entering -------------------------------------------------------------------------------------

    def _may_enter(self, message: Gather, parts: list[Contribution]) -> bool:
        passed = max(self._readied_number, self._given_up_number)
        if self._record is None or message.number <= passed:
            return False
        attempt = self._attempt
        if attempt is not None and message.number < attempt.number:
            return False
        proven = [part for part in parts if self._known.is_proven(part)]
        views = [part.present.view.number for part in proven if part.present is not None]
        if message.number > max([self._highest_number, *views]) + NUMBERS_AHEAD_LIMIT:
            return False
        counted = [it for it in proven if it.present is not None and self.me in it.present.members]
        if self.view is None:
            return self._newcomer_may_enter(message, parts, proven, bool(counted))
        is_fellow = message.sender in self.view.members
        if message.planned:
            opened = is_fellow or any(part.member in self.view.members for part in proven)
            free = not self.frozen and self._vouched is None
            return opened and free and message.base == self.view.id
        if message.number <= self.view.id.number:
            return False
        succeeds = any(
            part.present is not None
            and part.present.view.number > self.view.id.number
            and message.sender in part.present.members
            for part in counted
        )
        return bool(counted) and (is_fellow or succeeds)

    def _newcomer_may_enter(
        self,
        message: Gather,
        parts: list[Contribution],
        proven: list[Contribution],
        is_counted: bool,
    ) -> bool:
        if message.planned and is_counted:
            return False  # where the base counts this peer in already, it must take that over first
        if self.next_view is not None:
            previous = self.next_view.snapshot.previous
            return message.planned and bool(proven) and message.base == previous
        asked = any(self.me in part.joiners for part in self._namers(parts, proven))
        return self._wants_view and (asked or any(part.member == self.me for part in parts))

    def _namers(self, parts: list[Contribution], proven: list[Contribution]) -> list[Contribution]:
        """Whose word lets a newcomer in: members'. Newcomers' alone where no member is among them,
        and one that it knows, if it knows anybody."""
        if any(part.present is not None for part in parts):
            return proven
        knows = self.familiar.any_of(part.member.peer_id for part in parts)
        return parts if knows or self.familiar.is_empty else []

    def _stays_out(self, message: Gather, parts: list[Contribution], now_ns: int) -> Actions:
        """Not for this peer: tell the sender what it does not know."""
        to, view, attempt = (message.sender.peer_id,), self.view, self._attempt
        if view is None:
            if any(self._known.is_proven(part) for part in parts):
                self._view_heard_ns = now_ns
            return []
        if message.number == view.id.number and message.sender in view.snapshot.contributors:
            return [] if self.frozen else [SendMessage(to, self._active_with_proof())]
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

    def _active_with_proof(self) -> Active:
        """For who still gathers for the present view: it lacks some Ready."""
        assert self.view is not None
        said = self._active
        whole = Active(
            said.sender, said.view, said.step, said.lineage, certificate=self.view.certificate
        )
        return stated(whole, self._signer)
