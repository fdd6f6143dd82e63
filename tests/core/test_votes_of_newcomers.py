"""Keys cost nothing, so strangers that ask to be let in may be more than the members. What most
members say counts, and no word of a newcomer costs a member its place."""

from collections.abc import Callable

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import LAN, SECOND_NS, Actions, Disagreed
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.membership.eligibility import without_newcomers_in_doubt
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    AgreementMessage,
    Contribution,
    Gather,
    PresentView,
    Ready,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.statements import certified, charge, members_digest, stated
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD
from tests.core.liars import (
    RUN,
    are_together,
    contribution,
    gather,
    lives,
    say,
    swarm,
    trains_on,
)

NAMES = ["a", "b", "c"]
STRANGERS = [f"s{number}" for number in range(5)]
A, B, C = (Member(name, 1) for name in NAMES)
Lie = Callable[[AgreementMessage], AgreementMessage | None]
IN_TIME_S = 45


def accuses_a_member(said: AgreementMessage) -> AgreementMessage | None:
    if not isinstance(said, Gather):
        return said
    item = charge(Accusation(said.sender, A), RUN, said.number, sign_for(said.sender.peer_id))
    return msgspec.structs.replace(said, accusations=(*said.accusations, item))


def plans_otherwise(said: AgreementMessage) -> AgreementMessage | None:
    return _otherwise(said, {"plan_digest": "d" * 64})


def agrees_on_another_view(said: AgreementMessage) -> AgreementMessage | None:
    number = said.view.number if isinstance(said, Ready) else 0
    return _otherwise(said, {"view": ViewId(number, "f" * 64)})


def _otherwise(said: AgreementMessage, changes: dict[str, object]) -> AgreementMessage:
    if not isinstance(said, Ready):
        return said
    return stated(msgspec.structs.replace(said, **changes), sign_for(said.sender.peer_id))


def says_no_ready(said: AgreementMessage) -> AgreementMessage | None:
    return None if isinstance(said, Ready) else said


def knows_something_else(said: AgreementMessage) -> AgreementMessage | None:
    return msgspec.structs.replace(said, digest="f" * 64) if isinstance(said, Gather) else said


class Stranger(SimulatedPeer):
    """A peer that is a stranger where its name says so; all others are honest."""

    lie: Lie

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        told = type(self).lie(message) if self.name in STRANGERS else message
        if told is not None:
            super().send(receiver, told)

    def do(self, actions: Actions) -> None:
        is_honest = self.name not in STRANGERS
        super().do([it for it in actions if is_honest or not isinstance(it, Disagreed)])


@pytest.mark.parametrize(
    "lie",
    [
        accuses_a_member,
        plans_otherwise,
        agrees_on_another_view,
        says_no_ready,
        knows_something_else,
    ],
    ids=lambda it: it.__name__,
)
def test_however_many_strangers_lie_members_stay_and_others_come_in(lie: Lie) -> None:
    strange = type("Stranger", (Stranger,), {"lie": staticmethod(lie)})
    world = swarm(NAMES, peer_type=strange, timing=LAN)
    world.liars = frozenset(STRANGERS)
    for name in (*STRANGERS, "f"):
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
        world.ask_to_join(name, "b")
    world.run_until(lambda: are_together(world, [*NAMES, "f"]), limit_s=IN_TIME_S)
    assert lives(world, NAMES) == [1, 1, 1], "no member had to come back"
    trains_on(world, NAMES)
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert lives(world, NAMES) == [1, 1, 1]


class ShutsOut(SimulatedPeer):
    """A member that accuses all newcomers, each time."""

    def receive(self, sender: str, message: AgreementMessage) -> None:  # type: ignore[override]
        super().receive(sender, message)
        attempt = self.agreement._state.attempt
        if self.name == "a" and attempt is not None and attempt.snapshot is None:
            new = sorted(it for it in attempt.universe if it.peer_id not in NAMES)
            self.do(self.agreement._machines.gathering.accuse(attempt, new, self.now_ns))


def test_a_member_that_accuses_all_newcomers_keeps_them_out_for_a_while_only() -> None:
    """Most members say that this member has accused others in vain before."""
    world = swarm(NAMES, peer_type=ShutsOut, timing=LAN)
    world.liars = frozenset({"a"})
    for name in ("f", "g"):
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
        world.ask_to_join(name, "b")
    world.run_until(lambda: are_together(world, ["b", "c", "f", "g"]), limit_s=90)
    assert lives(world, ["b", "c"]) == [1, 1]


def test_a_newcomer_in_doubt_with_a_member_goes_and_the_member_stays() -> None:
    x, y = Member("x", 1), Member("y", 1)
    view = PresentView(ViewId(2, "e" * 64), (A, B), None)
    parts = {it: _part(it, view if it in (A, B) else None) for it in (A, B, x, y)}
    links = {Accusation(x, A), Accusation(A, y), Accusation(A, B)}
    staying, left = without_newcomers_in_doubt(parts, links)
    assert staying.keys() == {A, B} and left == links
    assert without_newcomers_in_doubt(parts, {Accusation(x, y)})[0].keys() == parts.keys()
    for member in (A, B):
        parts[member] = msgspec.structs.replace(parts[member], accusers=("a",))
    staying, left = without_newcomers_in_doubt(parts, links)
    assert staying.keys() == {A, B, y} and left == links - {Accusation(A, y)}


def test_no_member_is_silent_in_a_planned_attempt_by_the_word_of_others() -> None:
    """The member may have promised in its Prepared to wait for an earlier view, and must not
    answer."""
    view = PresentView(ViewId(2, "e" * 64), (A, B, C), None)
    strangers = [Member(name, 1) for name in STRANGERS]
    attempt = Attempt(A, 4, True, view.view, WORKLOAD.layer_count)
    for member in (A, B, *strangers):
        there = view if member in view.members else None
        named = tuple(strangers) if member == B else ()
        signed = contribution(4, there, member, joiners=named)
        attempt.add(signed, decode(signed.payload, Contribution))
    for stranger in strangers:
        attempt.learn_absent(stranger, [C])
    assert not attempt.believe_absent(lambda _: True) and attempt.waits_for == {C}


def test_who_has_answered_in_two_lives_has_one_word() -> None:
    again, x = Member("s0", 2), Member("x", 1)
    view = PresentView(ViewId(2, "e" * 64), (A, B), None)
    attempt = Attempt(A, 4, True, view.view, WORKLOAD.layer_count)
    for member in (A, B, Member("s0", 1), again):
        there = view if member in view.members else None
        named = (Member("s0", 1), again, x) if member == B else ()
        signed = contribution(4, there, member, joiners=named)
        attempt.add(signed, decode(signed.payload, Contribution))
        attempt.learn_absent(member, [x] if member.peer_id == "s0" else [])
    assert x in attempt.universe and not attempt.believe_absent(lambda _: False)


def _part(member: Member, present: PresentView | None) -> Contribution:
    return decode(contribution(4, present, member).payload, Contribution)


def _all_but_strangers_are_ready(world: AgreementWorld) -> Attempt:
    """Members gather with all strangers, say Ready, and wait for theirs in vain."""
    world.rejoins = False
    for name in STRANGERS:
        world.add_peer(name)
    for name in STRANGERS:
        say(world, name, "a", world.peers[name].agreement.wants_view())

    def are_ready() -> bool:
        attempts = [world.peers[name].agreement._state.attempt for name in NAMES]
        return all(it is not None and it.me in it.ready for it in attempts)

    world.run_until(are_ready)
    attempt = world.peers["a"].agreement._state.attempt
    assert attempt is not None and attempt.snapshot is not None
    return attempt


@pytest.mark.parametrize("shows_later", [False, True])
def test_a_view_that_strangers_never_agreed_to_stops_no_steps(shows_later: bool) -> None:
    """Members had said Ready to it. By that a stranger, which had said none and was in no view,
    had all members stop their steps; so had most of the strangers with a later view of their
    own."""
    silent = type("Stranger", (Stranger,), {"lie": staticmethod(says_no_ready)})
    world = swarm(NAMES, peer_type=silent)
    world.liars = frozenset(STRANGERS)
    attempt = _all_but_strangers_are_ready(world)
    snapshot, plan, view = attempt.snapshot, attempt.plan, attempt.outcome.view_id
    assert snapshot is not None and isinstance(plan, Plan) and view is not None
    members, number = snapshot.members, view.number + 3
    strangers = [it for it in members if it.peer_id in STRANGERS]
    certificates: tuple[Certificate, ...] = ()
    if shows_later:
        assert 2 * len(strangers) > len(members)
        view = ViewId(view.number + 1, "f" * 64)
        said = Ready(A, view, plan.digest(), members_digest(members))
        ready = [msgspec.structs.replace(said, sender=it) for it in strangers]
        signed = [stated(it, sign_for(it.sender.peer_id)) for it in ready]
        certificates = (certified(view, members, signed),)  # type: ignore[arg-type]
    present = PresentView(view, members, plan)
    said_by = contribution(number, present, strangers[0], step=3)
    message = gather(number, GENESIS, said_by, sender=strangers[0], certificates=certificates)
    for name in NAMES:
        _, fault = say(world, strangers[0].peer_id, name, message)
        assert fault is None and not world.peers[name].agreement.frozen
    trains_on(world, NAMES, within_s=30)
