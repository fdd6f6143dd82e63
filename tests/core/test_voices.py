"""Whose voice counts of the members that are gone, and on what proof."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.core.consensus.views.voices import voices_of
from p2p_dtfm.core.messages.agreement_messages import KnownView, Ready, Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import FAREWELLS_LIMIT, require_bounded
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.liars import RUN, say, self_made_view, swarm, view_of
from tests.core.liars import standing as standing_of

FOUNDER = "f"


def view(number: int, members: str, signed: str = "") -> Certificate:
    """A view of these members, signed by them or by those given."""
    named = tuple(Member(name, 1) for name in members)
    made, said = ViewId(number, f"{number}" * 8), members_digest(named)
    makers = [Member(name, 1) for name in signed or members]
    ready = [stated(Ready(m, made, "e" * 64, said), sign_for(m.peer_id)) for m in makers]
    return certified(made, named, ready)


def standing(now: Certificate, *farewells: Certificate) -> Standing:
    ancestors = tuple(it.view for it in farewells)
    return Standing(now.members[0], now, True, 9, RUN, ancestors, farewells=farewells)


def voices(now: Certificate, *farewells: Certificate) -> dict[str, int]:
    said = frozenset(member.peer_id for member, _ in now.ready)
    return voices_of(standing(now, *farewells), said, verify)


def test_who_left_counts_for_those_whom_it_left_behind() -> None:
    assert voices(view(14, "cd"), view(8, "cd", "cdf")) == {"c": 14, "d": 14, FOUNDER: 8}


def test_who_died_counts_for_those_with_whom_it_was_last() -> None:
    assert voices(view(14, "cd"), view(6, "cdf"))[FOUNDER] == 6


def test_a_voice_can_pass_from_hand_to_hand() -> None:
    later, earlier = view(12, "de", "cde"), view(8, "cd", "cdf")
    assert voices(view(14, "de"), later, earlier) == {"d": 14, "e": 14, "c": 12, FOUNDER: 8}
    assert FOUNDER not in voices(view(14, "de"), earlier), "d alone is half of those it left"


def test_it_counts_for_no_smaller_part_of_those_it_was_last_with() -> None:
    assert FOUNDER not in voices(view(14, "c"), view(6, "cdf"))


def test_it_counts_by_signatures_and_for_a_line_alone() -> None:
    left = view(8, "cd", "cdf")
    forged = tuple((m, b"x" * 64 if m.peer_id == FOUNDER else s) for m, s in left.ready)
    assert FOUNDER not in voices(view(14, "cd"), msgspec.structs.replace(left, ready=forged))
    told = msgspec.structs.replace(standing(view(14, "cd"), left), ancestors=())
    assert FOUNDER not in voices_of(told, frozenset("cd"), verify)
    named = msgspec.structs.replace(left, members=(Member("c", 1), Member("g", 1)))
    assert FOUNDER not in voices(view(14, "cg"), named), "it left c and d behind"


def test_no_more_farewells_are_heard_than_anybody_keeps() -> None:
    many = [view(number, "cd", "cdf") for number in range(2, 4 + 2 * FAREWELLS_LIMIT, 2)]
    told = stated(standing(view(40, "cd"), *many), sign_for("c"))
    with pytest.raises(PeerFault):
        require_bounded(told, "c")


@pytest.mark.parametrize("is_agreed_on", [True, False])
def test_newcomers_of_a_failed_attempt_speak_for_nobody(is_agreed_on: bool) -> None:
    """The attempt named more newcomers than members, and the members had signed it. A peer that
    knows nothing of it goes by signatures, and by most of those who signed it last."""
    world = swarm(["a", "b"])
    present, newcomers = view_of(world, "a").id, [Member(f"n{number}", 1) for number in range(3)]
    named = (Member("a", 1), Member("b", 1), *newcomers)
    failed = self_made_view(named, present.number + 2, named)
    own = self_made_view(tuple(newcomers), present.number + 3, tuple(newcomers))
    own = msgspec.structs.replace(own, view=ViewId(own.view.number, "d" * 64))
    own = resigned(own)
    views = world.peers["a"].agreement._state.others.views
    if is_agreed_on:
        views._readied[failed.view] = KnownView(failed.view, named, "e" * 64)
    told = standing_of(own, 10**6, newcomers[0], (failed.view, present))
    told = stated(msgspec.structs.replace(told, farewells=(failed,)), sign_for("n0"))
    actions, _ = say(world, "n0", "a", told)
    went_over = any(isinstance(action, Rejoin) for action in actions)
    assert went_over is not is_agreed_on


def resigned(certificate: Certificate) -> Certificate:
    said = members_digest(certificate.members)
    ready = [
        stated(Ready(m, certificate.view, "e" * 64, said), sign_for(m.peer_id))
        for m in certificate.members
    ]
    return certified(certificate.view, certificate.members, ready)
