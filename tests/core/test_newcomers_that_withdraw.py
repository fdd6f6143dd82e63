"""A newcomer that is agreed on and then does not come makes the others agree anew. Once that costs
it nothing, since its message may be lost or its machine down. A newcomer that does so again must
wait, with all members alike. When nobody refused such a newcomer, one word in each cycle kept out
all others, a better plan and leaving members. Said to one member alone, that word made this member
seem to hold up the view that the others still waited for."""

from collections.abc import Callable

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, ViewAgreed
from p2p_dtfm.core.consensus.attempts.whole_knowledge import whole_knowledge
from p2p_dtfm.core.membership.newcomers import Newcomers
from p2p_dtfm.core.messages.agreement_messages import Gather
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import are_together, lives, one_pipeline, say, swarm, trains_on

NAMES = ["a", "b", "c", "d"]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
IN_TIME_S = 60
QUICKLY_S = 12


class Withdraws(SimulatedPeer):
    """A newcomer that comes until it is agreed on, then tells one member that it awaits nothing."""

    victims = ("a",)
    times = 1 << 40
    count = 0

    def _agreed(self, action: ViewAgreed) -> None:
        if self.count >= self.times:
            super()._agreed(action)
        elif action.view.snapshot.planned:
            self.count += 1
            self.later(SECOND_NS // 4, self.withdraw)

    def withdraw(self) -> None:
        self.agreement._state.agreed.drop()
        victim = self.victims[self.count % len(self.victims)]
        self.world.send(self.name, victim, self.agreement.wants_view())


class WithdrawsInTurn(Withdraws):
    victims = tuple(NAMES)


class StartsAgain(WithdrawsInTurn):
    def withdraw(self) -> None:
        self.restart()
        super().withdraw()


class StartsAgainWhileAllGather(SimulatedPeer):
    """A newcomer whose next life asks as soon as it has contributed to an attempt."""

    restarts = 0

    def send(self, receiver: str, message: object) -> None:
        is_new = isinstance(message, Gather) and message.number != self.gathered_number
        super().send(receiver, message)  # type: ignore[arg-type]
        if is_new:
            self.later(SECOND_NS // 20, self.ask_in_next_life)

    def ask_in_next_life(self) -> None:
        self.restarts += 1
        self.restart()
        victim = NAMES[self.restarts % len(NAMES)]
        self.world.send(self.name, victim, self.agreement.wants_view())


WAYS = [Withdraws, WithdrawsInTurn, StartsAgain, StartsAgainWhileAllGather]


def of_who_stays(snapshot: Snapshot) -> Plan | NoPlan:
    stay = tuple(record for record in snapshot.records if record.intent is Intent.TRAIN)
    found = one_pipeline(msgspec.structs.replace(snapshot, records=stay))
    assert isinstance(found, Plan)
    leavers = tuple(it.peer_id for it in snapshot.records if it not in stay)
    return msgspec.structs.replace(found, spares=tuple(sorted((*found.spares, *leavers))))


def joined_by(peer_type: type[SimulatedPeer], seed: int = 1) -> AgreementWorld:
    world = swarm(NAMES, seed)
    world.planner = of_who_stays
    world.peer_type = peer_type
    world.add_peer("n").agreement.wants_view()
    world.peer_type = SimulatedPeer
    return world


def agreed_on(world: AgreementWorld) -> Callable[[], bool]:
    """All members have agreed on a view with the newcomer in it."""

    def is_agreed() -> bool:
        views = [world.peers[name].agreement.next_view for name in NAMES]
        return all(view is not None and "n" in view.member_ids for view in views)

    return is_agreed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("peer_type", WAYS)
def test_it_does_not_keep_others_out(peer_type: type[SimulatedPeer], seed: int) -> None:
    world = joined_by(peer_type, seed)
    world.run_to(world.now_ns + 5 * SECOND_NS)
    world.add_peer("e").agreement.wants_view()
    world.run_until(lambda: are_together(world, [*NAMES, "e"]), limit_s=IN_TIME_S)
    trains_on(world, [*NAMES, "e"])
    assert lives(world, NAMES) == [1] * len(NAMES)


@pytest.mark.parametrize("peer_type", WAYS)
def test_it_keeps_nobody_from_leaving(peer_type: type[SimulatedPeer]) -> None:
    world = joined_by(peer_type)
    world.run_to(world.now_ns + 5 * SECOND_NS)
    world.leave("d")
    world.run_until(lambda: world.peers["d"].left, limit_s=IN_TIME_S)
    trains_on(world, NAMES[:3])
    assert lives(world, NAMES[:3]) == [1] * 3


@pytest.mark.parametrize("peer_type", WAYS)
def test_it_comes_ever_more_rarely(peer_type: type[SimulatedPeer]) -> None:
    """Most of each minute is left to the others."""
    world, agreed = joined_by(peer_type), set()

    def look() -> bool:
        for name in NAMES:
            attempt = world.peers[name].agreement._state.attempt
            agreed.update({attempt.number} if attempt is not None else ())
        return False

    until_ns = world.now_ns + 100 * SECOND_NS
    world.run_until(lambda: look() or world.now_ns >= until_ns, limit_s=101)
    assert len(agreed) <= 20


class WithdrawsAtOne(SimulatedPeer):
    """A newcomer that withdraws at one member; to the others it says that it waits and has its
    states."""

    def _agreed(self, action: ViewAgreed) -> None:
        super()._agreed(action)
        said = msgspec.structs.replace(self.agreement.wants_view(), awaits=None)
        self.later(SECOND_NS // 4, lambda: self.world.send(self.name, "a", said))

    def _ask_to_join(self) -> None:
        if self.agreement.next_view is None and not self.agreement.attempting:
            self.send("b", self.agreement.wants_view())


@pytest.mark.parametrize("computes_for_ns", [SECOND_NS // 2, 2], ids=["slow", "fast"])
@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_told_alone_is_not_left_as_one_that_keeps_all_from_the_next_view(
    seed: int, computes_for_ns: int
) -> None:
    """That member had refused the newcomer for longer, so nothing was opened. Where steps are
    short, the others have often just said Ready for the view that this member has given up."""
    world = joined_by(WithdrawsAtOne, seed)
    world.compute_ns = (1, computes_for_ns)
    a = world.peers["a"].agreement
    for time_ns in (0, 20, 60, 120):
        a._state.others.newcomers.refuse("n", world.peers["a"].now_ns + time_ns * SECOND_NS)
    world.run_until(agreed_on(world))
    world.run_until(lambda: a.next_view is None, limit_s=5)
    given_up = world.peers["b"].agreement.next_view
    assert given_up is not None

    def wait_no_more() -> bool:
        return all(it.agreement.next_view is not given_up for it in members_of(world))

    world.run_until(wait_no_more, limit_s=6)
    world.run_to(world.now_ns + 60 * SECOND_NS)
    trains_on(world, NAMES)
    assert are_together(world, NAMES) and lives(world, NAMES) == [1] * len(NAMES)


def test_who_has_vouched_hears_that_another_member_waits_no_more() -> None:
    """The member keeps its word, and gives it for no further step."""
    world = joined_by(WithdrawsAtOne)
    a, b = world.peers["a"].agreement, world.peers["b"]
    world.run_until(agreed_on(world))
    world.run_until(lambda: a.attempting, limit_s=10)
    attempt, agreed = a._state.attempt, b.agreement._state.agreed
    assert attempt is not None and agreed.view is not None and not b.agreement.attempting
    agreed.synced = set(agreed.view.members)
    assert b.agreement.vouch() == agreed.view.id
    for part in whole_knowledge(attempt, proofs=False):
        say(world, "a", "b", part)
    assert not b.agreement.attempting and agreed.view is not None
    assert b.agreement.vouch() is None
    world.run_until(lambda: agreed.view is None, limit_s=5)


def members_of(world: AgreementWorld) -> list[SimulatedPeer]:
    return [world.peers[name] for name in NAMES]


def test_all_members_refuse_it_for_as_long() -> None:
    world = joined_by(Withdraws)
    counts = set()
    for _ in range(100):
        world.run_to(world.now_ns + SECOND_NS)
        refusals = [it.agreement._state.others.newcomers.refusals("n") for it in members_of(world)]
        counts.add(tuple(refusals))
    assert (1, 1, 1, 1) in counts and (2, 2, 2, 2) in counts
    assert all(max(count) - min(count) <= 1 for count in counts)


# who is honest --------------------------------------------------------------------------------


class GivesUpOnce(Withdraws):
    """A newcomer that gives up once, because it never heard that all have said Ready."""

    times = 1


class Honest(SimulatedPeer):
    """An honest newcomer, which follows what it hears."""


@pytest.mark.parametrize("seed", range(3))
def test_who_has_not_heard_of_the_agreement_is_let_in_soon(seed: int) -> None:
    world = joined_by(GivesUpOnce, seed)
    world.run_until(agreed_on(world))
    world.run_until(lambda: are_together(world, [*NAMES, "n"]), limit_s=QUICKLY_S)
    trains_on(world, [*NAMES, "n"])


@pytest.mark.parametrize("seed", range(3))
def test_what_it_asked_before_it_was_agreed_on_gives_up_nothing(seed: int) -> None:
    """Each call goes its own way. That word came last, five seconds late where its answer was slow.
    The others then gave up the view for which the newcomer waited with them."""
    world = joined_by(Honest, seed)
    late = world.peers["n"].agreement.wants_view()
    world.run_until(agreed_on(world))
    agreed = world.peers["a"].agreement.next_view
    assert agreed is not None and late.awaits is None
    for name in NAMES:
        say(world, "n", name, late)
    world.run_until(lambda: are_together(world, [*NAMES, "n"]), limit_s=QUICKLY_S)
    found = world.peers["a"].agreement.view
    assert found is not None and found.id == agreed.id
    assert not any("gives up" in line for line in world.story)


@pytest.mark.parametrize("seed", range(3))
def test_who_starts_again_is_let_in_soon(seed: int) -> None:
    world = joined_by(Honest, seed)
    world.run_until(agreed_on(world))
    world.crash("n", lose_disk=True)
    world.run_to(world.now_ns + SECOND_NS)
    world.restart("n")
    world.run_until(lambda: are_together(world, [*NAMES, "n"]), limit_s=QUICKLY_S)
    trains_on(world, [*NAMES, "n"])


def test_a_wait_that_begins_anew_is_no_longer_one() -> None:
    """Two may tell of one affair: the member that found it out, and then all members, once they
    know."""
    newcomers = Newcomers()
    newcomers.refuse("n", 0)
    newcomers.refuse("n", SECOND_NS)
    assert newcomers.refusals("n") == 1
    assert newcomers.is_refused("n", 10 * SECOND_NS)
    assert not newcomers.is_refused("n", 11 * SECOND_NS)
    newcomers.refuse("n", 11 * SECOND_NS)
    assert newcomers.refusals("n") == 2 and newcomers.is_refused("n", 30 * SECOND_NS)
