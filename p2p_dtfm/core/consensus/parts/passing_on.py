"""Passes on a Prepared that one peer lacks, and this one has.

A liar that tells its own Prepared to all but one peer would otherwise have that peer wait, and all
others wait for it.
"""

from p2p_dtfm.core.audit.draw import COLLUDERS_DIVISOR
from p2p_dtfm.core.consensus.actions import Actions, SendMessage
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Heartbeat
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.contradictions import stated
from p2p_dtfm.core.units import SECOND_NS

PASSED_ON_AFTER_NS = SECOND_NS
"""A peer must say for so long that it lacks a Prepared, which may just be on its way to it. As much
time passes before it is told again."""
NAMED_STEPS = 16
"""For this many steps after a peer last named a maker, it is told that maker's next Prepared at
once. A peer that names the maker no more may get them from it again. In a large view each neighbour
would otherwise tell it to the end of the view."""
_Step = tuple[ViewId, int]
_Pair = tuple[str, str]
"""The peer that lacks a Prepared, and the maker of that Prepared."""


class PassingOn:
    """Passes on Prepared of the step that was committed here last: no peer with a stage is further
    behind."""

    def __init__(self, state: AgreementState) -> None:
        self._state = state
        self._in_view: ViewId | None = None
        self._lacking: dict[_Pair, tuple[_Step, int, int]] = {}
        """Of each pair: the step, since when the Prepared is lacked or was told last, and how often
        it was told."""
        self._untold: dict[_Pair, int] = {}
        """Pairs of this view, with the step in which they were named last. The peer is told the
        next ones at once, or the Prepared would be as late in each step."""

    def heard(self, message: Heartbeat, now_ns: int) -> Actions:
        """Pass on what the sender says that it lacks."""
        work, view = message.work, self._state.view_in_force
        if work is None or view is None or message.sender not in view.members:
            return []
        self._begin(view.id)
        peer_id, at, actions = message.sender.peer_id, (work.view, work.step), Actions()
        lacked = {lack.peer_id for lack in work.lacks if lack.kind is Kind.PREPARED}
        if not lacked:
            return actions
        for signed in self._state.present.newest_commit:
            if signed.peer_id not in lacked or _step_of(signed) != at:
                continue
            times = self._times_due((peer_id, signed.peer_id), at, now_ns)
            actions += self._pass_on(peer_id, signed, times) if times else []
        return actions

    def committed(self) -> Actions:
        """A step is committed here; with it the next view may have been taken over."""
        view, actions = self._state.view_in_force, Actions()
        if view is None or not self._untold:
            return actions
        for signed in self._state.present.newest_commit:
            of_view, step = _step_of(signed)
            for pair in sorted(self._untold) if of_view == self._in_view else ():
                if step - self._untold[pair] > NAMED_STEPS:
                    del self._untold[pair]
                elif pair[1] == signed.peer_id and pair[0] in view.member_ids:
                    actions += self._pass_on(pair[0], signed)
        return actions

    def _begin(self, view: ViewId) -> None:
        if view != self._in_view:
            self._in_view, self._lacking, self._untold = view, {}, {}

    def _times_due(self, pair: _Pair, at: _Step, now_ns: int) -> int:
        """How often the pair has been named for long enough in this step; 0: not now."""
        known, since_ns, times = self._lacking.get(pair, (None, 0, 0))
        if known != at:
            self._lacking[pair] = at, now_ns, 0
            return 0
        if now_ns - since_ns < PASSED_ON_AFTER_NS:
            return 0
        self._lacking[pair] = at, now_ns, times + 1
        of_same = sum(1 for peer_id, _ in self._untold if peer_id == pair[0])
        if pair in self._untold or of_same < LACKS_LIMIT:  # each that lacks some fills its own room
            self._untold[pair] = at[1]
        return times + 1

    def _pass_on(self, peer_id: str, signed: Signed, times: int = 0) -> Actions:
        """Pass the Prepared on, if it is this peer's turn.

        In a small view only some members do so, more than there may be colluders, and others each
        time. In a view of many those do that hear the Heartbeat. Members that have said Prepared of
        the step themselves come first. One that came with the next view has not got it, nor may a
        spare have it that skipped the step.
        """
        state, view = self._state, self._state.view
        assert view is not None
        told: Actions = [SendMessage((peer_id,), SignedPrepared(signed))]
        if state.is_wide(view):
            return told
        others = set(view.member_ids) - {peer_id, signed.peer_id}
        signers, at = {it.peer_id for it in state.present.newest_commit}, _step_of(signed)[1]

        def turn(it: str) -> tuple[bool, str]:
            drawn = digest_bytes(f"{at} {times} {peer_id} {signed.peer_id} {it}".encode())
            return it not in signers, drawn

        chosen = sorted(others, key=turn)[: 1 + len(others) // COLLUDERS_DIVISOR]
        return told if state.me.peer_id in chosen else []


def _step_of(signed: Signed) -> _Step:
    prepared = stated(signed)
    return prepared.view, prepared.step
