"""Where peers of two views meet: which of them go over to the other view, and on what proof."""

from collections.abc import Sequence

import msgspec

from p2p_dtfm.core.consensus.actions import Action, Actions, Report, SendMessage, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.overlay.grid import hosts_of
from p2p_dtfm.core.consensus.parts.activity import Activity
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.suspicion import Suspicion
from p2p_dtfm.core.consensus.views.reminders import reminded_of
from p2p_dtfm.core.consensus.views.view_precedence import (
    Side,
    gone_on,
    is_shown_by_most,
    outranks,
    own_side,
    shows_end,
    side_of,
)
from p2p_dtfm.core.membership.newcomers import FREE_AGAIN_NS
from p2p_dtfm.core.messages.agreement_messages import KnownView, Reminder, Standing
from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS

FIRM_MEMBERS = 3
"""A view that trains and has at least this many members never yields to another swarm of the run
with which it has nothing in common. One member's acquaintance does not outweigh the others."""
PROVES_NOTHING = "it proves nothing of that view"
FOREIGN_TOLD_NS = 600 * SECOND_NS
TOLD_AT_ONCE = 16
"""How many peers outside the view are told of it at a time, in turns."""
TOLD_BY_ALL_EVERY = 64
"""In a large view only the members that would speak for a peer outside tell it of the view. Once in
this many times all do: those members may not know of that peer."""


class Meeting:
    """Nobody gives up its view on a word that is not signed and proven."""

    def __init__(
        self,
        state: AgreementState,
        activity: Activity,
        outsiders: Outsiders,
        suspicion: Suspicion,
    ) -> None:
        self._state = state
        self._activity = activity
        self._outsiders = outsiders
        self._suspicion = suspicion
        self._show_end: tuple[int, set[Member]] = (0, set())
        """The number of an attempt, and who has shown in it that the run is complete."""
        self._left_for_few_ns: int | None = None
        """When this peer, as a newcomer, last left an attempt since a few that gathered there had
        gone on."""

    def receive_as_member(self, message: Standing, now_ns: int) -> Verdict:
        """A Standing comes to a member: where the other view counts more, this peer goes over to
        it."""
        state, view = self._state, self._state.view
        assert view is not None
        if message.view == view.id or state.me not in view.members:
            return refused("it is of the present view")
        if state.me in message.members:
            proof = message.certificate
            return self._activity.missed(message.sender, message.view, proof, now_ns)
        if message.sender in view.members:
            return self._hear_from_fellow(view, message, now_ns)
        return self._compare(view, message, now_ns)

    def _compare(self, view: View, message: Standing, now_ns: int) -> Verdict:
        """Compare this peer's view with one of which none of its fellows speaks."""
        views = self._state.others.views
        common = views.newest_common((message.view, *message.ancestors))
        if common is None:
            return self._compare_with_foreigners(view, message, now_ns)
        theirs = self._side_of(message, common)
        if theirs is None:
            return refused(PROVES_NOTHING)
        mine = own_side(self._outsiders.standing_of(view), common)
        if not (theirs.support or mine.support) and not self._knows_signer(message):
            # nobody of the common view is left in either: anybody may name it
            return self._tell_of_foreigners(message, now_ns)
        if self._goes_by(common, theirs, mine):
            views.leaves(common)
            return self._goes_over(view, message)
        return self._stays(message, now_ns)

    def _compare_with_foreigners(self, view: View, message: Standing, now_ns: int) -> Verdict:
        """Compare this peer's view with one that has nothing in common with it, as far as this peer
        knows."""
        if (forgotten := self._reminded_of(message)) is not None:
            return self._compare_as_reminded(view, message, forgotten, now_ns)
        if not self._knows_signer(message):
            return self._tell_of_foreigners(message, now_ns)
        theirs = self._side_of(message, None)
        if theirs is None:
            return refused(PROVES_NOTHING)
        mine = own_side(self._outsiders.standing_of(view), None)
        if self._follows_foreigners(view, message, (theirs, mine), now_ns):
            self._state.others.views.leaves(None)
            return self._goes_over(view, message)
        told = self._tell_of_foreigners(message, now_ns).actions
        return self._stays(message, now_ns, told, self._reminder_for(message))

    def _compare_as_reminded(
        self, view: View, message: Standing, common: KnownView, now_ns: int
    ) -> Verdict:
        """Compare the two views by `common`: this peer was in that view before it lost its disk,
        and the others come from it."""
        theirs = self._side_of(message, common)
        if theirs is None:
            return refused(PROVES_NOTHING)
        mine = own_side(self._outsiders.standing_of(view), common)
        if theirs.support and self._goes_by(common, theirs, mine):
            self._state.others.views.goes_back(common)
            return self._goes_over(view, message)
        self._state.others.views.recalls(common)  # so the others find that they are to go over
        return self._stays(message, now_ns)

    def _reminded_of(self, message: Standing) -> KnownView | None:
        state, reminder = self._state, message.reminder
        if reminder is None:
            return None
        return reminded_of(reminder, state.me, state.others.views, state.settings.verify)

    def _reminder_for(self, message: Standing) -> Reminder | None:
        others = self._state.others
        return others.reminders.of(message.sender.peer_id, others.views)

    def _goes_by(self, common: KnownView, theirs: Side, mine: Side) -> bool:
        """Whether to go over to the other side. A peer that has trained to the end goes nowhere:
        whoever trains on from before can come to nothing that it lacks."""
        if self._state.ends_here:
            return False
        return outranks(theirs, mine) and not self._stays_where_told(common, theirs, mine)

    def _goes_over(self, view: View, message: Standing) -> Verdict:
        reason = f"view {message.view} of {message.sender.peer_id} counts"
        trained, they_wait = isinstance(view.plan, Plan), not message.has_plan
        rejoins = self._outsiders.rejoin(reason, trained, may_be_needed=they_wait)
        return Verdict(rejoins, reason)

    def _stays(
        self,
        message: Standing,
        now_ns: int,
        told: Sequence[Action] = (),
        reminder: Reminder | None = None,
    ) -> Verdict:
        answer = self._outsiders.answer(message.sender, now_ns, reminder)
        return Verdict([*told, *answer], "the present view counts no less")

    def _knows_signer(self, message: Standing) -> bool:
        """Whether a peer that this one knows is a member of that view, and has signed so. Before
        that this peer looks at no other signature: there may be a thousand."""
        state = self._state
        names = [it.peer_id for it in message.members if state.others.familiar.holds(it.peer_id)]
        return bool(names and signers(message.certificate, state.settings.verify, names))

    def _follows_foreigners(
        self, view: View, message: Standing, sides: tuple[Side, Side], now_ns: int
    ) -> bool:
        """Whether to go over to a view that has nothing in common with this peer's; `sides`: theirs
        and its own. This peer knows somebody there. Where its user told it to go, it goes, unless
        they were told to come here."""
        if self._state.ends_here:
            return False
        theirs, mine = sides
        is_firm = len(view.members) >= FIRM_MEMBERS
        if is_firm and (mine.has_plan or len(theirs.support) < len(view.members)):
            return False
        given = self._state.others.familiar.given
        was_told = bool(theirs.support & given) and not mine.support & given
        if was_told and not set(message.follows) & set(view.member_ids):
            return theirs.has_plan or not mine.has_plan
        # who has the lost layers is of this swarm, and may train on elsewhere
        return not self._waits_for_layers(now_ns) and outranks(theirs, mine)

    def _waits_for_layers(self, now_ns: int) -> bool:
        """Whether this peer waits for lost layers, and not yet long enough to go back to an older
        state."""
        present, patience_ns = self._state.present, self._state.timing.lost_layers_ns
        return present.lost is not None and not present.has_waited(patience_ns, now_ns)

    def _stays_where_told(self, common: KnownView, theirs: Side, mine: Side) -> bool:
        """Whether this peer's user sent it from the others to somebody that was never among
        them."""
        given = self._state.others.familiar.given - common.peer_ids
        return bool(mine.signed & given) and not theirs.signed & given

    def _hear_from_fellow(self, view: View, message: Standing, now_ns: int) -> Verdict:
        """A member of this peer's own view is in another one, without this peer."""
        state, attempt = self._state, self._state.attempt
        waiting = (state.next_view, state.agreed.dropped)
        agreed = {waits.id for waits in waiting if waits is not None}
        awaited = attempt is not None and attempt.outcome.view_id == message.view
        awaited |= message.view in agreed and message.step <= state.step + STEPS_AHEAD_LIMIT
        if awaited or message.view.number < view.id.number:
            # a leaver that helped to agree on it learns of it by Active
            return refused("the view is older than the present one, or is waited for")
        said = signers(message.certificate, state.settings.verify, view.member_ids)
        went = said & set(view.members)
        if message.sender not in went:
            return refused("its sender has not signed that view")
        views = state.others.views
        theirs = self._side_of(message, views.find(view.id))
        if 2 * len(went) < len(view.members):
            views.of_fellows.note(theirs)
            return self._go_on_without(message, "less than half of the members went there", now_ns)
        if 2 * len(went) == len(view.members) and not self._half_counts(view, theirs):
            views.of_fellows.note(theirs)
            reason = "half of the members went there, and theirs counts no more"
            return self._go_on_without(message, reason, now_ns)
        reason = f"view {message.view} has succeeded {view.id} without this peer"
        they_wait = not message.has_plan
        return Verdict(self._outsiders.rejoin(reason, may_be_needed=they_wait), reason)

    def _go_on_without(self, message: Standing, reason: str, now_ns: int) -> Verdict:
        """Open an attempt without the sender. If it shows that fewer are left here, this peer goes
        there, too (`FellowsViews`).

        Silence does not show that the sender has gone. If it holds no stage nothing waits for it,
        and it is heard, since it says again and again where it is.
        """
        gone = f"it is in view {message.view}, without this peer"
        return Verdict(self._suspicion.hold_up({message.sender.peer_id: gone}, now_ns), reason)

    def _half_counts(self, view: View, theirs: Side | None) -> bool:
        common = self._state.others.views.find(view.id)
        mine = own_side(self._outsiders.standing_of(view), common)
        return theirs is not None and outranks(theirs, mine)

    def _side_of(self, message: Standing, common: KnownView | None) -> Side | None:
        settings, given = self._state.settings, self._state.others.familiar.given
        views = self._state.others.views
        # a view that this peer agreed on and never took over shows nobody gone: newcomers in it
        # may be more than members, and have never been with anybody
        known = (it for it in message.farewells if not views.has_gone_by(it.view))
        message = msgspec.structs.replace(message, farewells=tuple(known))
        return side_of(message, common, settings.workload.min_members, settings.verify, given)

    def _tell_of_foreigners(self, message: Standing, now_ns: int) -> Verdict:
        """Tell the user now and then: by itself nothing brings the two swarms together."""
        others, reason = self._state.others, "the two views have nothing in common"
        told_ns = others.foreign_told_ns
        if told_ns is not None and now_ns - told_ns < FOREIGN_TOLD_NS:
            return refused(reason)
        others.foreign_told_ns = now_ns
        report = Report(
            f"{message.sender.peer_id} trains the same run in a swarm with which this one has "
            "nothing in common; each goes on. To bring the two together, start the peers of "
            "one again with --initial-peers and an address of the other"
        )
        return Verdict([report], reason)

    def receive_as_newcomer(self, message: Standing, now_ns: int) -> Verdict:
        """Newcomers never make a view of their own while there is one."""
        state, agreed = self._state, self._state.agreed
        if not self._is_proven_standing(message):
            return refused("its members have not all signed, or it knows none of them")
        state.joining.view_heard_ns = now_ns
        waiting = agreed.view
        if waiting is not None and message.view.number >= waiting.id.number:
            if message.view == waiting.id:
                return refused("it is the view that this peer waits for")
            if not _had_agreed(message.sender, waiting):
                return refused("its sender has not agreed on the view that this peer waits for")
            # nobody took it over: the members went another way, or the sender's life then has ended
            agreed.view = None
        if not state.joining.wants_view or state.record is None or agreed.view is not None:
            return refused("it asks for no view now")
        attempt = state.attempt
        if attempt is not None and not attempt.only_newcomers:
            return self._hear_while_members_gather(attempt, message, now_ns)
        told = self._asks(state.record, message.sender, now_ns)
        return Verdict(told, "there is a view: it asks to be let in")

    def _asks(self, record: Signed, member: Member, now_ns: int) -> Actions:
        """Ask to be let in; the attempt in which this newcomer took part keeps it from that no
        more."""
        if self._state.attempt is not None:
            self._state.stop_attempt(now_ns)
        request = self._outsiders.join_request(record)
        return self._outsiders.tell(member.peer_id, request, now_ns)

    def _is_left_behind(self, attempt: Attempt, message: Standing, now_ns: int) -> bool:
        """Whether this newcomer is in an attempt that members have left, and of which nobody tells
        it any more.

        The word of most members shows it, or that of some of many. Where the others are lost, one
        member may be left alone; but a liar may be alone, too. So the word of a few counts only as
        rarely as a newcomer may give up a view for nothing.
        """
        went = gone_on(message, attempt.number, attempt.members)
        if is_shown_by_most(went, attempt.members):
            return True
        left_ns = self._left_for_few_ns
        if not went or (left_ns is not None and now_ns - left_ns < FREE_AGAIN_NS):
            return False
        self._left_for_few_ns = now_ns
        return True

    def _hear_while_members_gather(
        self, attempt: Attempt, message: Standing, now_ns: int
    ) -> Verdict:
        """A Standing comes while members gather with this newcomer.

        As the last step commits, members give a planned attempt up and open no other; one that
        gathered with this newcomer shows it that. After a failure members may have gone on without
        it.
        """
        state, terms = self._state, self._state.settings.terms
        if state.record is not None and self._is_left_behind(attempt, message, now_ns):
            why = "members have gone on without it"
            report = Report(f"gives up view {attempt.number}: {why}")
            return Verdict([report, *self._asks(state.record, message.sender, now_ns)], why)
        if message.sender not in attempt.universe:
            return refused("members gather with it")
        if not shows_end(message, terms.total_steps, state.settings.verify):
            return refused("members gather with it, and steps are left")
        if not self._is_shown_by_most(attempt, message.sender):
            return refused("few of the members that gather with it show that the run is complete")
        state.stop_attempt(now_ns)
        report = Report(f"gives up view {attempt.number}: the run is complete")
        return Verdict([report], "all steps are committed: no view would take over")

    def _is_shown_by_most(self, attempt: Attempt, sender: Member) -> bool:
        """Whether most that gather have shown the end, `sender` now among them. One alone could
        show it with its own Prepared of the last step: the newcomer does not know who has a stage
        there."""
        number, said = self._show_end
        said = {*said, sender} if number == attempt.number else {sender}
        self._show_end = attempt.number, said
        return is_shown_by_most(said, attempt.members)

    def _is_proven_standing(self, message: Standing) -> bool:
        state = self._state
        if not state.others.familiar.is_empty and not self._knows_signer(message):
            return False
        said = signers(message.certificate, state.settings.verify)
        return message.sender in message.members and set(message.members) <= said

    def _hosted(self, view: View, outside: list[str]) -> list[str]:
        """The peers outside that this member tells: of many members a few tell each, since the
        proof of a view grows with them."""
        grid, me = self._state.grid_of(view), self._state.me.peer_id
        return [it for it in outside if me in hosts_of(it, None, grid)]

    def meet(self, now_ns: int) -> Actions:
        """Tell peers outside the view of it now and then."""
        state, view = self._state, self._state.view_in_force
        if view is None or now_ns - state.present.met_ns < state.timing.meet_ns:
            return []
        state.present.met_ns = now_ns
        members = set(view.member_ids)
        outside = [peer_id for peer_id in state.others.familiar.all if peer_id not in members]
        if state.is_wide(view) and state.prng.below(TOLD_BY_ALL_EVERY):
            outside = self._hosted(view, outside)
        to = state.others.familiar.next_of(outside, TOLD_AT_ONCE)
        return [SendMessage(to, self._outsiders.standing_of(view))] if to else []


def _had_agreed(sender: Member, view: View) -> bool:
    """Whether `sender` had agreed to the view, in this life or in one before."""
    agreed = view.snapshot.contributors
    return any(it.peer_id == sender.peer_id and it.life <= sender.life for it in agreed)
