"""A member that opens one planned view after the other keeps nobody out for long."""

from p2p_dtfm.core.consensus.actions import SECOND_NS, ViewAgreed
from p2p_dtfm.core.membership.replacers import (
    REMEMBERED_NS,
    WEIGHT_AFTERWARDS,
    WEIGHT_LIMIT,
    WEIGHT_WHILE_GATHERING,
    Replacers,
)
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage, Gather
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.hash_training import Tensor
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import are_together, lives, swarm, trains_on

NAMES = ["a", "b", "c", "d"]
LIAR = "d"


class Replaces(SimulatedPeer):
    """Opens another one whenever one is agreed on."""

    lies = False

    def _agreed(self, action: ViewAgreed) -> None:
        super()._agreed(action)
        if self.lies and self.name == LIAR and action.view.snapshot.planned:
            self.later(SECOND_NS // 10, self.replace)

    def replace(self) -> None:
        if self.view is not None and not self.agreement.frozen:
            gathering = self.agreement._machines.gathering
            self.do(gathering.open(True, "because", self.now_ns))


class ReplacesAttempts(Replaces):
    """Also while all gather."""

    at = 0

    def receive(self, sender: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        super().receive(sender, message)
        is_planned = isinstance(message, Gather) and message.planned
        if self.lies and self.name == LIAR and is_planned and self.world.now_ns > self.at:
            self.at = self.world.now_ns + SECOND_NS // 10
            self.replace()


def lets_in(peer_type: type[Replaces]) -> None:
    class Liar(peer_type):  # type: ignore[valid-type,misc]
        pass

    world = swarm(NAMES, peer_type=Liar)
    before = lives(world, NAMES[:3])
    Liar.lies = True
    world.add_peer("e")
    world.peers["e"].agreement.wants_view()
    world.run_until(lambda: are_together(world, ["a", "b", "c", "e"]), limit_s=60)
    trains_on(world, ["a", "b", "c", "e"])
    assert lives(world, NAMES[:3]) == before


def test_who_replaces_each_view_that_is_agreed_on_is_not_followed_for_ever() -> None:
    lets_in(Replaces)


def test_who_begins_anew_while_all_gather_is_not_followed_for_ever() -> None:
    lets_in(ReplacesAttempts)


def test_over_slow_lines_nobody_is_found_though_views_replace_one_another() -> None:
    """A second each way, some words lost, and all ask for other plans again and again."""
    world = swarm(NAMES)
    world.network.delay_ns = (SECOND_NS // 2, SECOND_NS)
    world.network.loss = 0.05
    before, spent = lives(world, NAMES), set[tuple[str, str]]()

    def ask(name: str, every_s: int) -> None:
        peer = world.peers[name]
        peer.do(peer.agreement.request_replan("for the test", peer.now_ns))
        for other in world.peers.values():
            for member in other.agreement._state.members:
                if other.agreement._state.doubts.replacers.is_spent(member):
                    spent.add((other.name, member.peer_id))
        world.after(every_s * SECOND_NS, lambda: ask(name, every_s))

    for name, every_s in zip(NAMES, (5, 6, 7, 9), strict=True):
        ask(name, every_s)
    world.run_to(world.now_ns + 240 * SECOND_NS)
    assert not spent and lives(world, NAMES) == before


def test_three_times_are_enough_where_all_had_agreed_and_a_takeover_ends_the_count() -> None:
    seen, member = Replacers(), Member("d", 1)
    for at_ns in range(2):
        seen.replaces(member, WEIGHT_AFTERWARDS, at_ns)
    assert not seen.is_spent(member)
    seen.replaces(member, WEIGHT_AFTERWARDS, REMEMBERED_NS + 1)
    assert not seen.is_spent(member), "of so long ago nothing counts"
    for at_ns in range(2):
        seen.replaces(member, WEIGHT_AFTERWARDS, REMEMBERED_NS + 1 + at_ns)
    assert seen.is_spent(member) and not seen.is_spent(Member("a", 1))
    seen.takes_over()
    assert not seen.is_spent(member)
    for _ in range(WEIGHT_LIMIT):
        assert not seen.is_spent(member)
        seen.replaces(member, WEIGHT_WHILE_GATHERING, 0)
    assert seen.is_spent(member)
