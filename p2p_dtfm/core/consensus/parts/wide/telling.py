"""Who is synced for a view, and who is active in it.

In a swarm of many this is told along the view's overlay. In a small one it is given to whoever
asks, since its maker may have told it to all others but not to that one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2p_dtfm.core.consensus.actions import BATCH_NS, Actions, PassOnSoon, SendMessage
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.wide import (
    ASKED_AT_ONCE,
    CameFrom,
    Item,
    Whence,
    Wide,
    fullest,
    whence,
)
from p2p_dtfm.core.consensus.overlay.grid import hosts_of
from p2p_dtfm.core.messages.agreement_messages import Active, ActiveSet, Synced, Tidings
from p2p_dtfm.core.messages.message_bounds import READY_SETS_LIMIT
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

VIEWS_KEPT = 4


@dataclass
class ViewNews:
    """What this peer has heard of a view, and how far it has passed that on."""

    wide: Wide = field(default_factory=Wide)
    synced: dict[Member, Synced] = field(default_factory=dict)
    active: dict[Member, Active] = field(default_factory=dict)
    asked_ns: int = 0


class Telling:
    """In views with few members all tell all, and ask others for what does not come."""

    def __init__(self, state: AgreementState) -> None:
        self._state = state
        self._views: dict[ViewId, ViewNews] = {}

    def news_of(self, view: ViewId) -> ViewNews:
        """What is known of a view; it is kept for the newest few views."""
        if view not in self._views:
            while len(self._views) >= VIEWS_KEPT:
                del self._views[min(self._views)]
            self._views[view] = ViewNews()
        return self._views[view]

    def say(self, view: View, said: Synced | Active) -> Actions:
        """Say this peer's own Synced or Active to all that have agreed to the view, or to its
        neighbours."""
        state, news = self._state, self.news_of(view.id)
        if isinstance(said, Synced):
            news.synced[state.me] = said
        else:
            news.active[state.me] = said
        if not state.is_wide(view):
            return [SendMessage(state.others_of(view), said)]
        self._note(news, lambda _: CameFrom.OUTSIDE)
        return self._flush(view, news)

    def hear(self, view: View, message: Tidings) -> Actions:
        """Pass on soon what is new in a message; the caller has added that to the news."""
        state, news = self._state, self.news_of(view.id)
        if not state.is_wide(view):
            news.active |= state.present.active_members.get(view.id, {})
            return self._answer(view, news, message)
        news.wide.giver = message.sender.peer_id
        is_new = self._note(news, whence(state.grid_of(view), state.me.peer_id))
        news.wide.giver = ""
        actions = self._answer(view, news, message)
        if is_new and not news.wide.told.is_due:
            news.wide.told.is_due = True
            actions.append(PassOnSoon(BATCH_NS))
        return actions

    def pass_on(self) -> Actions:
        """It is time to pass on what waits."""
        state, actions = self._state, Actions()
        for view in (state.view, state.next_view):
            news = self._views.get(view.id) if view is not None else None
            if view is not None and news is not None and news.wide.told.is_due:
                actions += self._flush(view, news)
        return actions

    def ask(self, view: View, lacking: Iterable[Member], now_ns: int) -> Actions:
        """Ask for what has been lost on its way, other neighbours each time. In a small view the
        callers also ask the makers, which are left out here."""
        state, news = self._state, self.news_of(view.id)
        wants = tuple(sorted(member.peer_id for member in lacking))
        if not wants or now_ns - news.asked_ns < state.timing.resend_ns:
            return []
        news.asked_ns = now_ns
        news.wide.repairs += 1
        is_wide = state.is_wide(view)
        to = [it for it in self._near(view, news) if is_wide or it not in wants]
        begin = news.wide.repairs * ASKED_AT_ONCE
        chosen = tuple(to[(begin + n) % len(to)] for n in range(min(ASKED_AT_ONCE, len(to))))
        own = [s for s in (news.synced.get(state.me), news.active.get(state.me)) if s is not None]
        return [SendMessage(chosen, _tidings(state.me, view.id, own, wants))] if chosen else []

    def _note(self, news: ViewNews, came_from: Whence) -> bool:
        before, me = len(news.wide.news), self._state.me.peer_id
        news.wide.note("synced", news.synced.values(), came_from, me)
        news.wide.note("active", news.active.values(), came_from, me)
        return any(it.came_from is not CameFrom.ROW for it in news.wide.news[before:])

    def _near(self, view: View, news: ViewNews) -> Sequence[str]:
        if not self._state.is_wide(view):
            return [it for it in self._state.others_of(view) if it not in self._lost]
        grid, me, lost = self._state.grid_of(view), self._state.me.peer_id, self._lost
        if me in grid.places:
            return [*grid.across(me, lost), *grid.row_mates(me, lost)]
        return hosts_of(me, None, grid)

    @property
    def _lost(self) -> set[str]:
        return {member.peer_id for member in self._state.doubts.suspects}

    def _leaves(self, view: View) -> list[str]:
        """Peers that have agreed to the view and leave with it, and for which this peer speaks."""
        grid, me = self._state.grid_of(view), self._state.me.peer_id
        if len(view.snapshot.contributors) <= len(grid.places) or me not in grid.places:
            return []
        names = (member.peer_id for member in view.snapshot.contributors)
        return [it for it in names if it not in grid.places and hosts_of(it, None, grid)[0] == me]

    def _flush(self, view: View, news: ViewNews) -> Actions:
        wide, grid, lost = news.wide, self._state.grid_of(view), self._lost
        me, actions = self._state.me.peer_id, Actions()
        wide.told.is_due = False
        if me in grid.places:
            actions += self._tell(view, grid.row_mates(me, lost), wide.not_from_row())
            actions += self._tell(view, grid.across(me, lost), wide.from_outside())
            others = self._leaves(view)
        else:
            others = list(hosts_of(me, None, grid)[:1])
        for leaf in others:
            actions += self._tell(view, (leaf,), wide.for_leaf(leaf))
        wide.told.row_at = wide.told.across_at = len(wide.news)
        return actions

    def _tell(self, view: View, to: tuple[str, ...], items: list[Item]) -> Actions:
        said = [item for item in items if isinstance(item, Synced | Active)]
        return [SendMessage(to, _tidings(self._state.me, view.id, said))] if to and said else []

    def _answer(self, view: View, news: ViewNews, message: Tidings) -> Actions:
        wants = set(message.wants)
        said: list[Synced | Active] = [s for m, s in news.active.items() if m.peer_id in wants]
        said += [s for m, s in news.synced.items() if m.peer_id in wants]
        to = (message.sender.peer_id,)
        return [SendMessage(to, _tidings(self._state.me, view.id, said))] if said else []


def _tidings(
    me: Member, view: ViewId, said: Iterable[Synced | Active], wants: tuple[str, ...] = ()
) -> Tidings:
    synced, active = [], dict[tuple[int, str], list[tuple[Member, bytes]]]()
    for item in said:
        if isinstance(item, Synced):
            synced.append((item.sender, item.signature))
        else:
            key = item.step, item.lineage
            active.setdefault(key, []).append((item.sender, item.signature))
    kept = fullest(active.values(), READY_SETS_LIMIT)
    sets = tuple(ActiveSet(*key, tuple(by)) for key, by in active.items() if by in kept)
    return Tidings(me, view, tuple(synced), sets, wants)
