"""A Gather of a peer whose word counts for nothing costs next to nothing, and nothing of it is
kept. What members have said in it counts as ever."""

import msgspec
import pytest

from p2p_dtfm.core.consensus import opened_records
from p2p_dtfm.core.consensus.opened_records import NEWCOMER_RECORD_BYTES
from p2p_dtfm.core.messages.agreement_messages import JoinRequest, PresentView
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Link, sign_record
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.builders import record
from tests.core.liars import EVIL, contribution, evil_record, gather, say, swarm, trains_on, view_of

NAMES = ["a", "b", "c"]
INVENTED = [Member(f"invented{number:03}", 1) for number in range(200)]


def _counted(world: AgreementWorld, name: str) -> list[str]:
    """The peers whose signatures this one looks at from now on."""
    looked_at: list[str] = []

    def counts(peer_id: str, payload: bytes, signature: bytes) -> bool:
        looked_at.append(peer_id)
        return verify(peer_id, payload, signature)

    world.peers[name].agreement._state.settings.verify = counts
    return looked_at


def _number(world: AgreementWorld, planned: bool) -> int:
    return view_of(world, "a").id.number // 2 * 2 + (2 if planned else 3)


def _of_member(world: AgreementWorld, name: str, number: int, *joiners: Member) -> Signed:
    """What a member says for an attempt of which the others have not heard."""
    view = view_of(world, name)
    plan = view.plan if isinstance(view.plan, Plan) else None
    present = PresentView(view.id, view.members, plan)
    me = world.peers[name].agreement.me
    own = world.peers[name].agreement._state.record
    return contribution(number, present, me, record=own, joiners=joiners)


@pytest.mark.parametrize("planned", [True, False])
def test_what_strangers_say_of_strangers_is_not_even_opened(planned: bool) -> None:
    world = swarm(NAMES)
    view, number = view_of(world, "a"), _number(world, planned)
    state, looked_at = world.peers["a"].agreement._state, _counted(world, "a")
    invented = [contribution(number, None, member) for member in (EVIL, *INVENTED)]
    records = tuple(evil_record(member) for member in INVENTED[:100])
    say(world, EVIL.peer_id, "a", gather(number, view.id, *invented, newcomers=records))
    assert not looked_at
    assert all(state.others.opened_records.find(signed) is None for signed in records)
    trains_on(world, NAMES)


def test_of_what_is_passed_on_the_word_of_members_is_opened_and_of_whom_they_name() -> None:
    world = swarm(NAMES)
    view, number = view_of(world, "a"), _number(world, True)
    named = Member("newcomer", 1)
    by_member = _of_member(world, "b", number, named)
    parts = [contribution(number, None, member) for member in (named, *INVENTED)]
    looked_at = _counted(world, "a")
    message = gather(number, view.id, *parts, by_member, sender=named)
    say(world, named.peer_id, "a", msgspec.structs.replace(message, newcomers=(evil_record(),)))
    attempt = world.peers["a"].agreement._state.attempt
    assert attempt is not None and attempt.number == number
    assert {member.peer_id for member in attempt.known} == {"a", "b", named.peer_id}
    assert not attempt.set_aside.parked
    assert set(looked_at) <= {*NAMES, named.peer_id}


def test_who_passes_on_a_forgery_under_a_members_name_is_blamed_at_once() -> None:
    world = swarm(NAMES)
    view, number = view_of(world, "a"), _number(world, True)
    good, looked_at = _of_member(world, "b", number), _counted(world, "a")
    forged = [msgspec.structs.replace(good, signature=bytes([n]) * 8) for n in range(100)]
    for parts in (forged, [good] * 100):
        looked_at.clear()
        _, fault = say(world, EVIL.peer_id, "a", gather(number, view.id, *parts))
        assert fault is not None and len(looked_at) < 4
    trains_on(world, NAMES)


def _large_record(member: Member, links: int) -> Signed:
    """A record whose links have short names, so that its bytes hold as many as possible."""
    named = {f"{number:x}": Link(1, 1) for number in range(links)}
    return sign_record(
        msgspec.structs.replace(record(member.peer_id, life=member.life), links=named),
        sign_for(member.peer_id),
    )


def test_a_newcomer_has_links_to_members_and_few_others() -> None:
    world = swarm(NAMES)
    view, number = view_of(world, "a"), _number(world, True)
    many = _large_record(EVIL, 400)
    assert len(many.payload) < NEWCOMER_RECORD_BYTES
    _, fault = say(world, EVIL.peer_id, "a", JoinRequest(many, None, 0))
    assert fault is not None and "links" in fault.cause
    parts = _of_member(world, "b", number, EVIL), contribution(number, record=many)
    for message in (
        gather(number, view.id, *parts, sender=Member("b", 1)),
        gather(number, view.id, sender=Member("b", 1), newcomers=(many,)),
    ):
        _, fault = say(world, "b", "a", message)
        assert fault is not None and "links" in fault.cause
    assert world.peers["a"].agreement._state.others.opened_records.find(many) is None


def test_opened_records_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is on what records take when opened: one of short links takes twenty times its
    bytes."""
    monkeypatch.setattr(opened_records, "OPENED_LIMIT_BYTES", 200_000)
    opened = swarm(NAMES).peers["a"].agreement._state.others.opened_records
    before = len(opened)
    for member in INVENTED:
        opened.open(_large_record(member, 20))
        assert opened.held_bytes <= 200_000
    assert 4 < len(opened) < before + len(INVENTED)
