"""Who says that it has taken the next view over is shown who was not ready for it, and not as often
as it likes."""

import pytest

from p2p_dtfm.core.consensus.actions import Actions, SendMessage
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage, Synced, Tidings
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import active, say, swarm

NAMES = ["a", "b", "c", "d"]
VICTIM, LIAR, NEWCOMER = "a", "d", "z"


class Unsynced(SimulatedPeer):
    """Nobody hears that the newcomer is synced, so the agreed view waits."""

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        if self.name != NEWCOMER or not isinstance(message, Synced | Tidings):
            super().send(receiver, message)


class NeverReady(SimulatedPeer):
    """The liar alone says in no step that it is ready."""

    def start(self) -> None:
        super().start()
        if self.name == LIAR:
            self.agreement.vouch = lambda: None  # type: ignore[method-assign]


def agreed_with_newcomer(world: AgreementWorld) -> View:
    world.add_peer(NEWCOMER).agreement.wants_view()
    heard = world.peers[VICTIM].agreement

    def is_agreed() -> bool:
        view = heard.next_view
        return view is not None and NEWCOMER in view.member_ids

    world.run_until(is_agreed)
    assert heard.next_view is not None
    return heard.next_view


def shown_in(actions: Actions) -> list[SignedPrepared]:
    sent = (it.message for it in actions if isinstance(it, SendMessage))
    return [it for it in sent if isinstance(it, SignedPrepared)]


@pytest.mark.parametrize(("peer_type", "shown"), [(Unsynced, 0), (NeverReady, 1)])
def test_who_says_often_that_it_has_taken_over_is_not_shown_all_each_time(
    peer_type: type[SimulatedPeer], shown: int
) -> None:
    """Each Active of a few bytes was answered with the Prepared of all that were not ready."""
    world = swarm(NAMES, peer_type=peer_type)
    world.liars = frozenset({LIAR})
    view, heard = agreed_with_newcomer(world), world.peers[VICTIM].agreement
    step = heard.step
    world.run_until(lambda: heard.step >= step + 3)
    assert heard.next_view is view
    liar = next(it for it in view.members if it.peer_id == LIAR)
    said, count = active(view.id, liar, heard.step), 0
    for _ in range(100):
        count += len(shown_in(say(world, LIAR, VICTIM, said)[0]))
    assert count == shown
