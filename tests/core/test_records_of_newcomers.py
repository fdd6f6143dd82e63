"""A newcomer's record that one peer lets in is let in by all to whom it is passed on."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.messages.agreement_messages import JoinRequest, PresentView
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import Link, sign_record
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD, record
from tests.core.liars import (
    contribution,
    evil_record,
    gather,
    one_pipeline,
    say,
    swarm,
    view_of,
)


@pytest.mark.parametrize("links", [96, 140, 200])
def test_members_of_many_let_in_no_record_that_other_newcomers_refuse(links: int) -> None:
    """Newcomers know nothing of the view, and took the member that passed such a record on for
    faulty: none of them came in."""
    world = AgreementWorld(1, WORKLOAD, record("template"), one_pipeline)
    member = world.add_peer("m")
    world.add_peer("other")
    world.found("m")
    world.run_to(2 * SECOND_NS)
    view = member.agreement.view
    assert view is not None
    named = tuple(Member(f"p{n:03}", 1) for n in range(200))
    object.__setattr__(view, "members", named)
    said = record("n", links={it.peer_id: Link(1, 1) for it in named[:links]})
    signed = sign_record(said, sign_for("n"))

    def lets_in(name: str) -> bool:
        try:
            world.peers[name].agreement._state.open_newcomer(signed)
        except PeerFault:
            return False
        return True

    assert lets_in("m") == lets_in("other") == (links <= 128)


def test_a_record_that_came_with_a_word_of_a_view_is_no_larger_for_that() -> None:
    """Who says that it is in a view may have a large record, and it was remembered as opened. So
    whoever had been a member asked to be let in with it, and no bound was looked at any more."""
    world = swarm(["m", "n"])
    view, was = view_of(world, "m"), world.peers["n"].agreement.me
    world.crash("n", lose_disk=False)
    world.run_until(lambda: [*view_of(world, "m").member_ids] == ["m"], limit_s=60)
    back = Member("n", was.life + 1)
    large = evil_record(back, links={f"p{n:03}": Link(1, 1) for n in range(200)})
    number = view_of(world, "m").id.number + 10
    present = PresentView(view.id, view.members, None)
    part = contribution(number, present, back, record=large)
    say(world, "n", "m", gather(number, view.id, part, sender=back))
    _, fault = say(world, "n", "m", JoinRequest(large))
    assert fault is not None and fault.cause == "a newcomer's record with 200 links"
