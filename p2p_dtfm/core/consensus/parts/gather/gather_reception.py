"""What arrives in a Gather: whose word counts in an attempt, and what a peer answers that takes no
part.

A contribution counts if its contributor is a member of a view that this peer knows or has proof of,
or a newcomer that such a member names. Nobody else is ever waited for.
"""

from p2p_dtfm.core.consensus.actions import Actions, SendMessage, TakeSides, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.patience import patience_ns
from p2p_dtfm.core.consensus.attempts.silence import silent_in
from p2p_dtfm.core.consensus.parts.gather.entry_verdict import entry_verdict, possible_openers
from p2p_dtfm.core.consensus.parts.gather.far_senders import (
    NOBODY_OPENED,
    gather_worth_reading,
    is_near,
    refusal_of_far,
)
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.proofs import Proofs
from p2p_dtfm.core.membership.newcomers import FOUNDING_LIMIT, most_waiting
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Charge,
    Contribution,
    Gather,
    Ready,
    Spread,
    open_contribution,
    passed,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded_part, require_of_run
from p2p_dtfm.core.messages.outlines import OUTLINE, open_outline
from p2p_dtfm.core.messages.statements import is_charge, stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.contradictions import shows_contradiction
from p2p_dtfm.core.recovery.view import View

Contributions = dict[Member, tuple[Signed, Contribution]]


class GatherReception:
    """Judges claims before they become knowledge."""

    def __init__(
        self, state: AgreementState, gathering: Gathering, proofs: Proofs, outsiders: Outsiders
    ) -> None:
        self._state = state
        self._gathering = gathering
        self._proofs = proofs
        self._outsiders = outsiders

    def receive(self, message: Gather, now_ns: int) -> Verdict:
        """Raises `PeerFault`."""
        state = self._state
        if message.planned != (message.number % 2 == 0):
            raise PeerFault("a view with a number of the wrong parity", message.sender.peer_id)
        if is_near(state, message.sender.peer_id):
            return self._receive_whole(message, now_ns)
        refusal = refusal_of_far(state, message)
        kept = None if refusal else self._worth_reading(message)
        if kept is None:
            return self.answer_far(message, refusal, now_ns)
        return self._receive_whole(kept, now_ns)

    def _receive_whole(self, message: Gather, now_ns: int) -> Verdict:
        state = self._state
        contributions = self._open_contributions(message)
        for signed in message.newcomers:
            state.open_newcomer(signed)  # before anything is changed: a fault must not leave half
        self._proofs.learn(message)
        missed = self._proofs.hear_of_agreement(message.sender, message.certificates, now_ns)
        if missed:  # this peer answers from where that leads, when it is asked again
            return Verdict(missed, "it shows that all have said Ready to a view")
        attempt = state.attempt
        if attempt is None or message.number != attempt.number:
            return self._receive_of_another(message, contributions, now_ns)
        if (message.planned, message.base) != (attempt.planned, attempt.base):
            return refused("it is of another attempt with the same number")
        return self._merge(attempt, message, contributions, now_ns)

    def _receive_of_another(
        self, message: Gather, contributions: Contributions, now_ns: int
    ) -> Verdict:
        """A Gather of an attempt in which this peer takes no part so far."""
        lost, opened = self._lost_ready(message), [part for _, part in contributions.values()]
        if lost is not None:
            answer = SendMessage((message.sender.peer_id,), lost)
            return Verdict([answer], "has said Ready to it: that must have got lost")
        found = entry_verdict(self._state, message, opened)
        if found.calls_off:  # or this peer would vouch anew with each step, and hardly ever enter
            self._state.agreed.doom(f"{message.sender.peer_id} does not wait for it any more")
        if not found.enters:
            said = self._answer_without(message, opened, now_ns)
            return Verdict(said, f"takes no part: {found.reason}")
        self._side_with_who_opens(now_ns)
        self._note_opener(message, opened, now_ns)
        number, planned, base = message.number, message.planned, message.base
        attempt, actions = self._gathering.enter(number, planned, base, now_ns)
        attempt.clock.heard_ns[message.sender] = now_ns
        merged = self._merge(attempt, message, contributions, now_ns)
        return Verdict(actions + merged.actions, f"takes part: {found.reason}")

    def _side_with_who_opens(self, now_ns: int) -> None:
        """Somebody gives up an attempt and opens another one. Whoever has kept this peer waiting
        for half of its patience is at fault for this peer, too. Else it is one word against
        another."""
        state = self._state
        attempt = state.attempt
        if attempt is None or attempt.planned:
            return
        founds = state.is_newcomer and attempt.only_newcomers
        if state.is_newcomer and not founds:
            return
        if 2 * (now_ns - attempt.clock.progress_ns) >= self.patience_ns(attempt):
            silent = silent_in(attempt, is_member=True)
            state.distrust_members(silent)
            state.doubts.carried |= set(silent) if founds else set()

    def patience_ns(self, attempt: Attempt) -> int:
        """For how long an attempt may stand still."""
        state, lateness = self._state, self._state.attempts.lateness
        number = state.view_id.number
        return patience_ns(attempt, state.timing, not state.is_newcomer, lateness, number)

    def _note_opener(self, message: Gather, parts: list[Contribution], now_ns: int) -> None:
        """A member that stops steps again and again, and accuses no member, is itself in doubt,
        unless it shows why."""
        state, members = self._state, frozenset(self._state.members)
        if state.plan is None or message.planned or state.frozen:
            return
        if any(self._doubts_link(item, message.number, members) for item in message.accusations):
            return
        makers = possible_openers(state, message, parts)
        if any(self._has_reason(part) for part in parts if part.member in makers):
            return
        if len(makers) == 1:  # others that pass it on have entered on another's word
            state.distrust_members(state.doubts.accusers.stops_steps(makers, now_ns))

    def _has_reason(self, part: Contribution) -> bool:
        """Whether the opener shows a reason: it was told what cannot be so, by a peer that has to
        go for it."""
        state = self._state
        is_here = part.present is not None and part.present.view == state.view_id
        if not is_here or state.plan is None:
            return False
        return shows_contradiction(part, state.plan, state.settings.terms)

    def _doubts_link(self, item: Charge, number: int, members: frozenset[Member]) -> bool:
        """Whether the charge may cost a member its place: a member accuses another one, and has
        signed it."""
        by, of, settings = item.accusation.by, item.accusation.of, self._state.settings
        if by == of or not members >= {by, of}:
            return False
        return is_charge(item, settings.run_digest, number, settings.verify)

    # merging --------------------------------------------------------------------------------------

    def _merge(
        self, attempt: Attempt, message: Gather, contributions: Contributions, now_ns: int
    ) -> Verdict:
        if attempt.snapshot is None:
            merged = self._merge_knowledge(attempt, message, contributions, now_ns)
        else:
            merged = self._hear_while_ready(attempt, message, contributions, now_ns)
        sender = attempt.opened.get(message.sender)
        if sender is not None and sender.present is not None:
            # there is a view, whose members are only slow to agree on the next
            self._state.joining.view_heard_ns = now_ns
        return merged

    def _merge_knowledge(
        self, attempt: Attempt, message: Gather, contributions: Contributions, now_ns: int
    ) -> Verdict:
        gathering = self._gathering
        grew = attempt.round == 0
        sides: Actions = []
        grew |= self._admit(attempt, contributions)
        self._proofs.keep(attempt, message)
        if message.sender in attempt.universe:
            self._note_digest(attempt, message)
            if self._learn_charges(attempt, message):
                grew, sides = True, [TakeSides()]
            grew |= self._learn_absent(attempt, message, now_ns)
            self._learn_newcomers(attempt, message)
        liars = self._contradicted(attempt, contributions)
        if liars and gathering.charge(attempt, liars):
            grew = True
            self._state.doubt_newcomers(liars, now_ns)
            self._state.distrust_members(liars)
        for liar in liars:
            grew |= liar not in attempt.set_aside.contradicted
            attempt.set_aside.contradicted.setdefault(liar, contributions[liar][0])
        if grew:
            told = gathering.knowledge_grew(attempt, now_ns, own=bool(liars))
            return Verdict(sides + told, "it adds to what this peer knows")
        return Verdict(gathering.check_settled(attempt, now_ns), "it says what its sender knows")

    def _counts(self, part: Contribution, attempt: Attempt) -> bool:
        """Whether a contribution is one of those that all must have."""
        state = self._state
        if part.present is None:
            if attempt.only_newcomers:
                return state.is_newcomer
            return part.member in attempt.universe or part.member in attempt.named_newcomers
        views, there = state.others.views, part.present.view
        if not views.is_proven(part) or (attempt.planned and there != attempt.base):
            return False
        if not state.is_newcomer and not views.counts_for_all(there, state.view_id):
            return False
        is_later = part.present.view.number > state.view_id.number
        return part.member in attempt.universe or part.member in attempt.members or is_later

    def _admit(self, attempt: Attempt, contributions: Contributions) -> bool:
        """Add those that count, and those that count now because of them; True if any did."""
        waiting = [*attempt.set_aside.parked.values(), *contributions.values()]
        waiting.sort(key=lambda item: (item[1].present is None, item[1].member))
        grew, again = False, True
        while again:
            again = False
            for signed, part in waiting:
                if part.member not in attempt.known and self._counts(part, attempt):
                    attempt.add(signed, part)
                    attempt.set_aside.parked.pop(part.member, None)
                    grew = again = True
        for signed, part in waiting:
            if part.member not in attempt.known:
                attempt.park(signed, part)
        return grew

    def _note_digest(self, attempt: Attempt, message: Gather) -> int:
        """Keep the newest digest of the sender; return the round of the one before."""
        held = attempt.digests.get(message.sender, (0, ""))
        if message.round >= held[0]:
            attempt.digests[message.sender] = (message.round, message.digest)
        return held[0]

    def _hear_while_ready(
        self, attempt: Attempt, message: Gather, contributions: Contributions, now_ns: int
    ) -> Verdict:
        assert attempt.snapshot is not None
        if message.sender not in attempt.snapshot.contributors:
            return refused("the knowledge is frozen, without what its sender knows")
        if attempt.wide is not None and not self._state.attempts.spread_giver:
            # a sender that spoke with each before it knew of many still does: that tells nothing
            return refused("the knowledge is frozen, and its sender speaks along the overlay since")
        moved_on = message.round > self._note_digest(attempt, message)
        moved_on &= message.digest not in ("", attempt.snapshot.knowledge)
        if not moved_on or message.sender in attempt.ready:
            return refused("the knowledge is frozen, and it brings nothing new")
        news = [item for item in message.accusations if self._is_news(attempt, item)]
        heard = {member: attempt.opened[member] for member in attempt.participants}
        self._state.doubt_links(heard, [item.accusation for item in news], now_ns)
        reason = f"{message.sender.peer_id} knows more"
        if attempt.wide is not None and attempt.wide.hasty:  # so far nobody has said what it knows
            return Verdict(self._gathering.failed(attempt, reason, now_ns), reason)
        late = self._late_makers(attempt, contributions, news) or {message.sender}
        return Verdict(self._gathering.held_up(attempt, late, reason, now_ns, True), reason)

    def _late_makers(
        self, attempt: Attempt, contributions: Contributions, news: list[Charge]
    ) -> set[Member]:
        """Makers of what comes after all have said that they know the same. If there are none, the
        sender only says that it knows something else, and could say so for ever."""
        found = set(self._contradicted(attempt, contributions))
        for member, (_, part) in contributions.items():
            if member not in attempt.known and self._counts(part, attempt):
                found.add(member)
        for by, of in ((it.accusation.by, it.accusation.of) for it in news):
            accused = attempt.opened.get(of)
            if by == of or accused is None or of in found:
                continue
            # a newcomer may lie to one member alone, which finds it out, and come with another key
            found.add(of if attempt.planned and accused.present is None else by)
        return found

    def _is_news(self, attempt: Attempt, item: Charge) -> bool:
        state = self._state
        by = item.accusation.by
        if item.accusation in attempt.charges or by not in attempt.universe or by == state.me:
            return False
        return is_charge(item, state.settings.run_digest, attempt.number, state.settings.verify)

    def _learn_charges(self, attempt: Attempt, message: Gather) -> bool:
        before = len(attempt.charges)
        for item in message.accusations:
            if item.accusation.of in attempt.universe and self._is_news(attempt, item):
                attempt.charges[item.accusation] = item
        return len(attempt.charges) > before

    def _learn_absent(self, attempt: Attempt, message: Gather, now_ns: int) -> bool:
        attempt.learn_absent(message.sender, message.absent)
        return self.believe_absent(attempt, now_ns)

    def believe_absent(self, attempt: Attempt, now_ns: int) -> bool:
        """Nobody is absent on one peer's word before this peer has waited half the time itself."""
        waited_ns, members = now_ns - attempt.clock.began_ns, attempt.members

        def has_waited(member: Member) -> bool:
            timing = self._state.timing
            limit_ns = timing.gather_ns if member in members else timing.newcomer_ns
            return waited_ns >= limit_ns // 2

        return attempt.believe_absent(has_waited)

    def _learn_newcomers(self, attempt: Attempt, message: Gather) -> None:
        """Records of named newcomers, to pass them on."""
        for signed in message.newcomers:
            record = self._state.open_record(signed)
            member = Member(record.peer_id, record.life)
            if member in attempt.universe:
                attempt.passed_on.newcomers.setdefault(member, signed)

    def _contradicted(self, attempt: Attempt, contributions: Contributions) -> list[Member]:
        """Contributors that have signed two different contributions to this attempt."""
        return [
            member
            for member, (signed, _) in contributions.items()
            if member in attempt.known
            and member != self._state.me
            and attempt.known[member].payload != signed.payload
        ]

    # opening --------------------------------------------------------------------------------------

    def _open_contributions(self, message: Gather) -> Contributions:
        attempt = self._state.attempt
        known = {} if attempt is None or attempt.wide is not None else attempt.known
        held = {s: attempt.opened[m] for m, s in known.items()} if attempt is not None else {}
        contributions = {}
        for signed in message.contributions:
            contribution = held.get(signed) or self._open_contribution(signed, message.number)
            if signed not in held or contribution.member not in contributions:
                contributions[contribution.member] = (signed, contribution)  # of two the new
        return contributions

    def _open_contribution(self, signed: Signed, number: int) -> Contribution:
        state = self._state
        contribution = self._filled(signed)
        owners = {signed.peer_id, contribution.member.peer_id, contribution.record.peer_id}
        if len(owners) > 1:
            raise PeerFault("a contribution that mixes several peers", signed.peer_id)
        if contribution.number != number:
            raise PeerFault("a contribution to another view", signed.peer_id)
        opens = state.open_record if contribution.present is not None else state.open_newcomer
        if opens(contribution.record).life != contribution.member.life:
            raise PeerFault("a contribution with a record of another life", signed.peer_id)
        if signed.kind != OUTLINE:  # an outline's bounds were checked when it was opened
            require_bounded_part(contribution, signed.peer_id)
        require_of_run(contribution, state.settings.workload)
        _require_few_joiners(contribution)
        return contribution

    def _filled(self, signed: Signed) -> Contribution:
        """The contribution; an outline gets what it names, which the peer that passes it on has
        sent along."""
        verify = self._state.settings.verify
        if signed.kind != OUTLINE:
            return open_contribution(signed, verify)
        filled = self._state.others.bodies.filled(open_outline(signed, verify))
        if filled is None:
            raise PeerFault("an outline that names what nobody has sent", signed.peer_id)
        return filled

    # staying out ----------------------------------------------------------------------------------

    def _worth_reading(self, message: Gather) -> Gather | None:
        def named_by(signed: Signed) -> tuple[Member, ...]:
            part = self._open_contribution(signed, message.number)
            return part.joiners + (part.present.members if part.present is not None else ())

        return gather_worth_reading(self._state, message, named_by)

    def answer_far(self, message: Gather | Spread, refusal: str, now_ns: int) -> Verdict:
        """Answer a far sender; nothing in its message is opened."""
        lost = self._lost_ready(message)
        if lost is not None:
            answer: Actions = [SendMessage((message.sender.peer_id,), lost)]
        else:
            answer = self._answer_without(message, [], now_ns)
        return Verdict(answer, f"takes no part: {refusal or NOBODY_OPENED}")

    def _lost_ready(self, message: Gather | Spread) -> Ready | None:
        """This peer's Ready, if the sender still gathers what this peer has agreed to: it must have
        got lost."""
        state = self._state
        last = state.promises.said_ready.last
        if state.attempt is not None or last is None or last.view.number != message.number:
            return None
        return last if state.view_id.number < message.number else None

    def _answer_without(
        self, message: Gather | Spread, parts: list[Contribution], now_ns: int
    ) -> Actions:
        """The message is not for this peer: tell the sender what it does not know."""
        state, view = self._state, self._state.view
        if view is None:
            if any(state.others.views.is_proven(part) for part in parts):
                state.joining.view_heard_ns = now_ns
            return []
        to = (message.sender.peer_id,)
        if message.number == view.id.number and message.sender in view.snapshot.contributors:
            return [] if state.frozen else [SendMessage(to, self._active_with_proof(view))]
        if message.sender not in view.members:
            return self._outsiders.answer(message.sender, now_ns)
        if message.number <= view.id.number:
            return [] if state.frozen else [SendMessage(to, state.present.said_active)]
        return [] if message.planned else self._answer_failure(view, message, parts, now_ns)

    def _answer_failure(
        self, view: View, message: Gather | Spread, parts: list[Contribution], now_ns: int
    ) -> Actions:
        """A failure is reported under a number that this peer has passed: unplanned outranks
        planned. The reporter itself begins anew above that number. Anybody else that did so would
        be taken for the one that stops the steps."""
        state, attempt, to = self._state, self._state.attempt, (message.sender.peer_id,)
        if attempt is not None and not attempt.planned:
            if message.number < attempt.number:
                return [SendMessage(to, attempt.gather())]
            is_passed = isinstance(message, Gather) and not message.digest
            return self._gathering.begin_above(attempt, message, now_ns) if is_passed else []
        own = [part for part in parts if part.member == message.sender]
        if state.frozen or not own or own[0].present is None or own[0].present.view != view.id:
            return []
        under_way = attempt.number if attempt is not None else 0
        highest = max(state.promises.passed_number, message.number, under_way)
        return [SendMessage(to, passed(state.me, (highest + 1) | 1))]

    def _active_with_proof(self, view: View) -> Active:
        """This peer's Active with the certificate, for one that still gathers for the present view:
        it lacks some Ready."""
        said, proof = self._state.present.said_active, view.certificate
        whole = Active(said.sender, said.view, said.step, said.lineage, certificate=proof)
        return stated(whole, self._state.settings.sign)


def _require_few_joiners(contribution: Contribution) -> None:
    """Raises `PeerFault` for a contribution that names too many newcomers. One that names a
    thousand which do not exist has all that wait for these say more names than anybody accepts."""
    present, named = contribution.present, len(contribution.joiners)
    limit = FOUNDING_LIMIT if present is None else most_waiting(len(present.members))
    if named > limit:
        raise PeerFault(
            f"names {named} newcomers, of whom {limit} may wait", contribution.member.peer_id
        )
