"""What arrives of a view's members along its overlay, or because this peer asked for it: it is read
as the Synced and Active of each."""

from collections.abc import Sequence

from p2p_dtfm.core.consensus.actions import Actions, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.activity import Activity
from p2p_dtfm.core.consensus.parts.syncing import Syncing
from p2p_dtfm.core.consensus.parts.wide.telling import Telling, ViewNews
from p2p_dtfm.core.messages.agreement_messages import Active, Synced, Tidings
from p2p_dtfm.core.messages.statements import is_stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View


class TidingsReception:
    """A peer that passes something on has looked at it: a forgery in it is the fault of the
    sender."""

    def __init__(
        self, state: AgreementState, telling: Telling, syncing: Syncing, activity: Activity
    ) -> None:
        self._state = state
        self._telling = telling
        self._syncing = syncing
        self._activity = activity

    def receive(self, message: Tidings, now_ns: int) -> Verdict:
        """Raises `PeerFault`."""
        contributors = self._activity.contributors_of(message.view)
        if message.sender not in contributors:
            return refused("it is of a view to which this peer and its sender have not agreed")
        news = self._telling.news_of(message.view)
        synced = self._new_synced(message, news, contributors)
        active = self._new_active(message, news, contributors)
        news.synced |= {item.sender: item for item in synced}
        news.active |= {item.sender: item for item in active}
        self._syncing.note_synced(message.view, news.synced)
        actions = self._heard_active(active, now_ns)
        view = self._find(message.view)
        if view is not None:
            actions += self._telling.hear(view, message)
        return Verdict(actions, "it is noted, and passed on")

    def _find(self, named: ViewId) -> View | None:
        views = (self._state.view, self._state.next_view)
        return next((view for view in views if view is not None and view.id == named), None)

    def _new_synced(
        self, message: Tidings, news: ViewNews, contributors: frozenset[Member]
    ) -> list[Synced]:
        found = [
            Synced(member, message.view, signature)
            for member, signature in message.synced
            if member not in news.synced and member in contributors
        ]
        self._require_stated(found, message)
        return found

    def _new_active(
        self, message: Tidings, news: ViewNews, contributors: frozenset[Member]
    ) -> list[Active]:
        found = [
            Active(member, message.view, said.step, said.lineage, signature=signature)
            for said in message.active
            for member, signature in said.said
            if member not in news.active and member in contributors
        ]
        self._require_stated(found, message)
        return found

    def _require_stated(self, said: Sequence[Synced | Active], message: Tidings) -> None:
        if not all(is_stated(item, self._state.settings.verify) for item in said):
            raise PeerFault("passes on a forged statement", message.sender.peer_id)

    def _heard_active(self, active: list[Active], now_ns: int) -> Actions:
        """Note all; then the last one does what any of them would."""
        if not active:
            return []
        self._activity.note_all(active)
        if self._state.is_newcomer:
            return self._activity.receive_as_newcomer(active[-1], now_ns).actions
        return self._activity.receive_as_member(active[-1], now_ns).actions
