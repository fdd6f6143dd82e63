"""What newcomers say that they have passed raises the next attempt's number by little, however
often they say it. Each word counted from where the one before had left the number. Newcomers may
make 1,024 requests to one member in 26 seconds; the others then refused that member's number as far
too high. The member refused all of theirs. Nobody could join any more, and a failure cut the member
off."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.membership.newcomers import NUMBERS_PASSED_LIMIT
from p2p_dtfm.core.messages.agreement_messages import JoinRequest
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.liars import are_together, evil_record, lives, say, swarm, trains_on, view_of

NAMES = ["a", "b", "c", "d"]
REQUESTS, KEYS = 1200, 20


def flooded() -> AgreementWorld:
    world = swarm(NAMES)
    for number in range(REQUESTS):
        evil = Member(f"evil-{number % KEYS}", 1)
        _, fault = say(world, evil.peer_id, "a", JoinRequest(evil_record(evil), passed=1 << 40))
        assert fault is None
    return world


def test_an_honest_newcomer_is_let_in_beside_them() -> None:
    world = flooded()
    promises = world.peers["a"].agreement._state.promises
    assert promises.highest_number <= view_of(world, "a").id.number + NUMBERS_PASSED_LIMIT
    world.add_peer("e")
    world.peers["e"].agreement.wants_view()
    for member in ("a", "b"):
        world.ask_to_join("e", member)
    world.run_until(lambda: are_together(world, [*NAMES, "e"]), limit_s=60)
    trains_on(world, [*NAMES, "e"])


def test_a_failure_does_not_cut_off_who_was_asked() -> None:
    world, rest = flooded(), ["a", "b", "c"]
    world.crash("d", lose_disk=True)

    def goes_on() -> bool:
        return are_together(world, rest) and "d" not in view_of(world, "a").member_ids

    world.run_until(goes_on, limit_s=60)
    trains_on(world, rest)
    assert lives(world, rest) == [1, 1, 1]


def test_who_has_passed_many_numbers_gets_in_after_some_attempts() -> None:
    """A newcomer that was kept waiting for long says the truth, and each attempt brings it
    nearer."""
    world = swarm(NAMES)
    world.add_peer("e")
    agreement = world.peers["e"].agreement
    agreement.wants_view()
    agreement._state.promises.given_up_number = 3 * NUMBERS_PASSED_LIMIT
    for _ in range(12):
        world.ask_to_join("e", "a")
        until_ns = world.now_ns + 15 * SECOND_NS
        world.run_until(lambda until_ns=until_ns: world.now_ns >= until_ns, limit_s=20)
        if are_together(world, [*NAMES, "e"]):
            return
    pytest.fail("it was not let in")
