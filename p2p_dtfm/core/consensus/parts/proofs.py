"""Certificates that others show: of views that they are in, and of those that this peer missed."""

from collections.abc import Iterable

from p2p_dtfm.core.consensus.actions import Actions, Report
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.messages.agreement_messages import Gather
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import CERTIFICATES_LIMIT
from p2p_dtfm.core.messages.statements import all_signed
from p2p_dtfm.core.protocol.snapshot import Member


class Proofs:
    """Of a view that it does not know, this peer believes nothing but what members have signed."""

    def __init__(self, state: AgreementState, gathering: Gathering) -> None:
        self._state = state
        self._gathering = gathering

    def learn(self, message: Gather) -> None:
        """A newcomer takes the first view that it hears of on its members' word, then no other."""
        state, views, verify = self._state, self._state.others.views, self._state.settings.verify
        attempt, is_newcomer = state.attempt, state.is_newcomer
        unsettled = attempt is None or attempt.only_newcomers or message.number > attempt.number
        takes_side = is_newcomer and unsettled and message.certificates
        before = views.forget_certified() if takes_side else {}
        for certificate in message.certificates:
            if views.find(certificate.view) is not None:
                if not views.is_agreed(certificate.view):
                    views.see_agreed(certificate, verify)
                continue
            learnt = views.learn(certificate, state.view_id, verify)
            if is_newcomer and not learnt:
                self._learn_as_newcomer(certificate, message, unsettled)
        views.unless_news(before)

    def _learn_as_newcomer(
        self, certificate: Certificate, message: Gather, unsettled: bool
    ) -> None:
        views, verify = self._state.others.views, self._state.settings.verify
        if not message.planned and views.learn_earlier(certificate, verify):
            return
        based = certificate.view == message.base
        is_theirs = based if message.planned else message.sender in certificate.members
        if unsettled and is_theirs:
            views.trust(certificate, verify, self._state.others.familiar)

    def keep(self, attempt: Attempt, message: Gather) -> None:
        """Keep the certificates whose views all members have signed, to pass them on."""
        state, kept = self._state, attempt.passed_on.certificates
        for certificate in message.certificates:
            if certificate.view in kept or len(kept) >= CERTIFICATES_LIMIT:
                continue
            is_known = state.others.views.find(certificate.view) is not None
            if is_known and all_signed(certificate, state.settings.verify):
                kept[certificate.view] = certificate

    def hear_of_agreement(
        self, sender: Member, certificates: Iterable[Certificate | None], now_ns: int
    ) -> Actions:
        """A certificate shows that all said Ready: others have taken over what this peer waits for,
        or has gone on from.

        A member that has gone on to another attempt would be in a view that the others have left,
        and some would not know theirs. What they gather would never be the same.

        This peer does not go back on the word of a sender whose own Ready it lacked. Such a sender
        could keep its Ready from the others, show it then, and so hold them up again and again. If
        that Ready got lost on its way, some of the others show the certificate as well.
        """
        state, said_ready = self._state, self._state.promises.said_ready
        for certificate in certificates:
            attempt = said_ready.find(certificate.view) if certificate is not None else None
            if certificate is None or attempt is None:
                continue
            is_present = attempt is state.attempt
            if is_present or self._may_go_back_to(attempt, sender):
                attempt.outcome.take_ready(certificate, state.settings.verify)
                if is_present or attempt.outcome.is_agreed:
                    actions = self._end_of(attempt, is_present, now_ns)
                    if actions:
                        return actions
        return []

    def _end_of(self, attempt: Attempt, is_present: bool, now_ns: int) -> Actions:
        state = self._state
        if is_present:
            return self._gathering.check_ready(now_ns)
        is_awaited = state.attempt is not None
        if is_awaited:
            state.give_up(now_ns)
        state.attempts.under_way = attempt
        report = Report(f"missed the takeover of view {attempt.outcome.view_id}")
        actions = [report, *self._gathering.check_ready(now_ns)]
        if is_awaited and state.attempt is None:
            state.attempts.reopen_ns = now_ns  # the others wait for an answer
        return actions

    def _may_go_back_to(self, attempt: Attempt, sender: Member) -> bool:
        """Whether this peer may go back to `attempt`. It does not leave an attempt in which it has
        said Ready as well: that may be the view by now."""
        if not attempt.outcome.has_said_ready(sender):
            return False
        state, present = self._state, self._state.attempt
        if state.is_newcomer or attempt.planned or attempt.number <= state.view_id.number:
            return False
        return present is None or (not present.planned and state.me not in present.ready)
