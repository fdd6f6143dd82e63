"""An agreed planned view until its takeover: who has the states that its place needs."""

from collections.abc import Iterable, Mapping

from p2p_dtfm.core.consensus.actions import Actions, Report, SendMessage, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.wide.telling import Telling
from p2p_dtfm.core.cost_model.links.swarm_links import UNKNOWN_BYTES_PER_S, SwarmLinks
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.liveness.lateness import PATIENT_ABOVE, of_many_ns
from p2p_dtfm.core.messages.agreement_messages import Heartbeat, Synced
from p2p_dtfm.core.messages.message_bounds import NEWCOMERS_LIMIT
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

TRANSFERS_LIMIT = 4
DEADLINES_LIMIT = 6
"""A newcomer that makes progress may take `TRANSFERS_LIMIT` transfers of its states and
`DEADLINES_LIMIT` deadlines. Each time that it was refused doubles the transfers: a link may be
slower than was measured."""
SLOWER_LIMIT = 4
"""A step under way counts as at most this many usual ones: the wait for states must end though a
step stands still."""
SLOWEST_BYTES_PER_S = 250_000
"""A newcomer that claims a thinner link than this keeps others from a view for no longer."""
STEPS_AHEAD = 2
"""States are offered between two steps: this many steps may have to pass first."""


class Syncing:
    """Each member says Synced; one that never gets there must not keep the others."""

    def __init__(self, state: AgreementState, telling: Telling) -> None:
        self._state = state
        self._telling = telling

    def synced(self, view: ViewId) -> Actions:
        """This peer has, or follows, what its place in the agreed view needs."""
        state = self._state
        if state.next_view is None or state.next_view.id != view or state.agreed.self_synced:
            return []
        state.agreed.self_synced = True
        state.agreed.synced.add(state.me)
        return self._synced_message(state.next_view)

    @property
    def ready_for(self) -> ViewId | None:
        """The next view, if all its members are synced and it is not to be dropped."""
        state, view = self._state, self._state.next_view
        if view is None or state.agreed.is_doomed or not self._all_synced(view):
            return None
        return view.id

    def vouch(self) -> ViewId | None:
        """The same for this peer's Prepared, and a promise: the view stays until the step
        commits."""
        view = self.ready_for
        if view is not None:
            self._state.agreed.vouched = view
        return view

    def receive(self, message: Synced) -> Verdict:
        state, next_view = self._state, self._state.next_view
        if next_view is not None and message.view == next_view.id:
            if message.sender not in next_view.members:
                return refused("its sender is no member of the next view")
            state.agreed.synced.add(message.sender)
            self._telling.news_of(next_view.id).synced[message.sender] = message
            return Verdict([], "it is noted")
        view = state.view_in_force
        if view is None or message.view != view.id:
            return refused("it is of another view, or a failure is dealt with")
        if message.sender not in view.snapshot.contributors:
            return refused("its sender has not agreed to the present view")
        answer = SendMessage((message.sender.peer_id,), state.present.said_active)
        return Verdict([answer], "it has not taken over yet: this peer's Active has got lost")

    def resend(self, now_ns: int) -> Actions:
        """Say Synced again, which may have got lost, and ask for what others have said. A newcomer
        may have missed who is active in the view already."""
        state, agreed = self._state, self._state.agreed
        is_due = now_ns - agreed.synced_sent_ns >= state.timing.resend_ns
        if agreed.view is None or not agreed.self_synced or not is_due:
            return []
        agreed.synced_sent_ns = now_ns
        members, view = set(agreed.view.members), agreed.view
        told = [] if state.is_wide(view) else self._synced_message(view)
        active = state.present.active_members.get(view.id, {})
        lacking = members - agreed.synced
        if state.is_newcomer and not lacking:
            lacking = members - active.keys()
        return told + self._telling.ask(view, lacking, now_ns)

    def note_synced(self, view: ViewId, members: Iterable[Member]) -> None:
        """Note who is synced for a view, as told along the overlay."""
        agreed = self._state.agreed
        if agreed.view is not None and agreed.view.id == view:
            agreed.synced |= set(members) & set(agreed.view.members)

    def give_up_unsynced(self, now_ns: int) -> Actions:
        """Give up a view that some peer keeps waiting: one that never gets its states, though it
        lives, must not keep others from joining."""
        state = self._state
        view = state.next_view
        patience = 2 if state.is_newcomer else 1  # a newcomer leaves it to the members
        if view is None or state.agreed.is_doomed:
            return []
        hold_up = self._stuck_newcomers(now_ns) or self._idle_members(now_ns)
        if not self._takes_too_long(now_ns, patience) and not hold_up:
            return []
        unsynced = ", ".join(m.peer_id for m in view.members if m not in state.agreed.synced)
        self.refuse_unsynced(now_ns, 1)
        reason = f"gives up view {view.id}, which waits for the states of {unsynced or 'nobody'}"
        state.agreed.doom(reason)
        return [Report(reason)] if unsynced else []

    def refuse_unsynced(self, now_ns: int, haste: int) -> None:
        """Refuse newcomers that did not get their states in time, and doubt members that hold the
        view up again. `haste` divides the time that they have."""
        state = self._state
        due = self._takes_too_long(now_ns, 1, haste)
        newcomers = self._unsynced_newcomers if due else self._stuck_newcomers(now_ns, haste)
        for member in newcomers:
            state.others.newcomers.refuse(member.peer_id, now_ns)
        if state.next_view is not None:
            idle, number = self._idle_members(now_ns, haste), state.next_view.id.number
            again = state.doubts.accusers.holds_up(idle, number, now_ns)
            state.doubts.suspects |= again
            state.distrust_members(again)

    def _idle_members(self, now_ns: int, haste: int = 1) -> list[Member]:
        """Members of both views that need no new states for the next, and do not say that they have
        them: there is nothing that they could wait for."""
        state, view, next_view = self._state, self._state.view, self._state.next_view
        deadline_ns = self._sync_ns + self._until_offered_ns(now_ns)
        is_due = (now_ns - state.agreed.agreed_ns) * haste >= deadline_ns
        if view is None or next_view is None or not is_due or state.me not in view.members:
            return []
        idle = []
        for member in sorted(set(view.members) & set(next_view.members) - state.agreed.synced):
            has = set(view.layers_of(member.peer_id)) | view.guarded_by(member.peer_id)
            needs = set(next_view.layers_of(member.peer_id)) | next_view.guarded_by(member.peer_id)
            if member != state.me and needs <= has:
                idle.append(member)
        return idle

    @property
    def _unsynced_newcomers(self) -> list[Member]:
        """Newcomers that are to join, and keep the members of the present view from taking over the
        next."""
        state = self._state
        if state.is_newcomer or state.next_view is None:
            return []
        new = set(state.next_view.members) - set(state.members)
        return sorted(new - state.agreed.synced)

    def _stuck_newcomers(self, now_ns: int, haste: int = 1) -> list[Member]:
        """Unsynced newcomers that get no more states, or take many times as long as their links
        need."""
        state, agreed, sync_ns = self._state, self._state.agreed, self._sync_ns
        stuck = []
        for member in self._unsynced_newcomers:
            needs_ns = self._transfer_ns(member)
            grown_ns = agreed.given.grown_ns(member.peer_id)
            patience = TRANSFERS_LIMIT << state.others.newcomers.refusals(member.peer_id)
            offered_ns = self._until_offered_ns(now_ns)
            longest_ns = DEADLINES_LIMIT * sync_ns + offered_ns + patience * needs_ns
            deadline_ns = sync_ns
            if grown_ns is None:  # it has not even begun: for that it takes no fast link
                since_ns, deadline_ns = agreed.agreed_ns, sync_ns + offered_ns
            else:
                since_ns, deadline_ns = grown_ns, deadline_ns + needs_ns
            no_progress = (now_ns - since_ns) * haste >= deadline_ns
            if no_progress or (now_ns - agreed.agreed_ns) * haste >= longest_ns:
                stuck.append(member)
        return stuck

    @property
    def _sync_ns(self) -> int:
        """How long a newcomer may take without getting more states. It is longer among many, and
        where this peer itself runs late among them."""
        state, view = self._state, self._state.next_view
        fellows = len(view.members) if view is not None else 0
        if fellows <= PATIENT_ABOVE:
            return state.timing.newcomer_sync_ns
        patience_ns = of_many_ns(fellows, state.timing.newcomer_sync_ns)
        return state.attempts.lateness.stretched_ns(patience_ns, fellows)

    def _takes_too_long(self, now_ns: int, patience: int, haste: int = 1) -> bool:
        """Whether the agreed view has taken `patience` times as long as it may. It may take
        `sync_ns`, what the states of large models need over the links that there are, and the steps
        between which they are offered. `haste` divides all of that."""
        state, view = self._state, self._state.next_view
        waited_ns, sync_ns = (now_ns - state.agreed.agreed_ns) * haste, state.timing.sync_ns
        if view is None or waited_ns < patience * sync_ns:
            return waited_ns >= patience * sync_ns
        unsynced = set(view.members) - state.agreed.synced
        takes_ns = max((self._transfer_ns(it) for it in unsynced), default=0)
        return waited_ns >= patience * (sync_ns + self._until_offered_ns(now_ns) + takes_ns)

    def _until_offered_ns(self, now_ns: int) -> int:
        """How long it may take until states are offered: by the plan, or by what steps take, since
        machines may be slower than they were. A newcomer knows only the plan that is to come."""
        state, plan, present = self._state, self._state.plan, self._state.present
        if state.is_newcomer:
            coming = state.next_view.plan if state.next_view is not None else None
            return STEPS_AHEAD * coming.predicted_step_ns if isinstance(coming, Plan) else 0
        if plan is None:
            return 0
        takes_ns = max(plan.predicted_step_ns, present.step_ns)
        under_way_ns = min(present.under_way_ns(now_ns), SLOWER_LIMIT * takes_ns)
        return STEPS_AHEAD * max(takes_ns, under_way_ns)

    def _transfer_ns(self, newcomer: Member) -> int:
        """How long the states of a newcomer's layers take on their way to it, by what members
        measured. It is at most `sync_ns`, or what large states take at `SLOWEST_BYTES_PER_S` if
        that is longer."""
        state = self._state
        view = state.next_view
        assert view is not None
        size = view.state_bytes_of(newcomer.peer_id)
        if not size:
            return 0
        snapshot, members = view.snapshot, {member.peer_id for member in state.members}
        takes = snapshot.record(newcomer.peer_id)
        rates = [
            SwarmLinks((giver, takes)).flow(giver, takes)[0]
            for giver in snapshot.records
            if giver.peer_id in members and giver.link_to(newcomer.peer_id) is not None
        ]
        needs_ns = duration_ns(size, max(1, max(rates, default=UNKNOWN_BYTES_PER_S)))
        return min(needs_ns, max(state.timing.sync_ns, duration_ns(size, SLOWEST_BYTES_PER_S)))

    def gives(self, given: Mapping[str, int], now_ns: int) -> None:
        """How many bytes this peer has given to each peer that `needy` names since the next view
        was agreed on."""
        self._state.agreed.given.note(self._state.me, given, now_ns)

    @property
    def needy(self) -> tuple[str, ...]:
        """Newcomers that are to join with the next view, and have not said that they have their
        states: as many as a heartbeat may name."""
        return tuple(member.peer_id for member in self._unsynced_newcomers[:NEWCOMERS_LIMIT])

    def note_progress(self, message: Heartbeat, now_ns: int) -> None:
        """A newcomer makes progress by the word of those that give to it. Its own word counts only
        where there is nothing to give: where training begins each makes the first states by
        itself."""
        state, next_view = self._state, self._state.next_view
        if state.is_newcomer or next_view is None:
            return
        given, sender = state.agreed.given, message.sender
        if sender in state.members and message.gives:
            joining = {member.peer_id for member in self._unsynced_newcomers}
            named = {it: size for it, size in message.gives.items() if it in joining}
            given.note(sender, named, now_ns)
        elif sender in next_view.members and next_view.snapshot.step == 0:
            given.note(sender, {sender.peer_id: message.progress}, now_ns)

    def _synced_message(self, view: View) -> Actions:
        state = self._state
        return self._telling.say(view, stated(Synced(state.me, view.id), state.settings.sign))

    def _all_synced(self, view: View) -> bool:
        return all(member in self._state.agreed.synced for member in view.members)
