"""What one message, one stranger or one lying member says never ends a swarm, nor splits it."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import (
    SECOND_NS,
    ComputePlan,
    Disagreed,
    Left,
    Rejoin,
    SendMessage,
    StopStep,
)
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.whole_knowledge import whole_knowledge
from p2p_dtfm.core.consensus.views.view_precedence import Side, outranks
from p2p_dtfm.core.membership.newcomers import WAITING_LIMIT
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Charge,
    Contribution,
    Gather,
    Heartbeat,
    JoinRequest,
    PresentView,
    Ready,
    Standing,
    Synced,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.canonical import decode, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from tests.core.liars import (
    EVIL,
    active,
    are_together,
    contribution,
    evil_record,
    gather,
    lives,
    say,
    self_made_view,
    standing,
    swarm,
    trains_on,
    view_of,
)

NAMES = ["a", "b", "c"]
FOUR = [*NAMES, "d"]


def test_a_strangers_standing_moves_nobody() -> None:
    world = swarm(NAMES)
    view, before = view_of(world, "a"), lives(world, NAMES)
    others = tuple(member for member in view.members if member.peer_id != "a")
    claims = [
        standing(self_made_view((EVIL,), 10**6), 10**9),
        standing(self_made_view((EVIL,), 10**6), 10**9, ancestors=(view.id,)),
        standing(self_made_view((EVIL, *others), 10**6), 10**9, ancestors=(view.id,)),
        msgspec.structs.replace(standing(self_made_view((EVIL,), 10**6), 9), signature=b""),
    ]
    for claim in claims:
        for name in NAMES:
            actions, _ = say(world, "evil", name, claim)
            assert not [it for it in actions if isinstance(it, Rejoin | Left)]
    trains_on(world, NAMES)
    assert lives(world, NAMES) == before and view_of(world, "a").id == view.id


def test_a_members_word_alone_moves_nobody() -> None:
    """A member says that it is in another view, with all others but the member that it tells."""
    world = swarm(FOUR)
    view, before = view_of(world, "a"), lives(world, FOUR)
    liar = next(member for member in view.members if member.peer_id == "d")
    rest = tuple(member for member in view.members if member.peer_id != "a")
    forged = self_made_view(rest, view.id.number + 2, (liar,))
    actions, _ = say(world, "d", "a", standing(forged, 10**9, liar, (view.id,)))
    assert not [it for it in actions if isinstance(it, Rejoin | Left)]
    world.run_to(world.now_ns + 10 * SECOND_NS)
    trains_on(world, NAMES, within_s=20)
    assert lives(world, NAMES) == before[:3], "three go on as three"


@pytest.mark.parametrize("ahead", [2**64 - 2, 2**53, 2**53 - 2, 1 << 17, 3])
def test_a_number_out_of_bounds_is_nobodys_next_view(ahead: int) -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    for sender in (EVIL, next(member for member in view.members if member.peer_id == "c")):
        for name in ("a", "b"):
            say(world, sender.peer_id, name, gather(ahead, view.id, sender=sender))
            wrong_kind = gather(ahead, view.id, sender=sender, planned=ahead % 2 == 1)
            _, fault = say(world, sender.peer_id, name, wrong_kind)
            assert fault is not None
    trains_on(world, NAMES)
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=30)
    assert view_of(world, "a").id.number < view.id.number + 20


def test_a_strangers_contribution_is_not_waited_for() -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    fake = PresentView(ViewId(view.id.number + 1, "f" * 64), (*view.members, EVIL), None)
    true = PresentView(view.id, (*view.members, EVIL), None)
    for number in (view.id.number + 1, view.id.number + 2, view.id.number + 3):
        base = view.id if number % 2 == 0 else GENESIS
        for present in (fake, true, None):
            message = gather(number, base, contribution(number, present))
            for name in NAMES:
                say(world, "evil", name, message)
    assert not any(world.peers[name].agreement.attempting for name in NAMES)
    trains_on(world, NAMES, within_s=0)
    assert view_of(world, "a").id == view.id


def test_ten_forged_active_do_not_stop_the_commits() -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    fellow = next(member for member in view.members if member.peer_id == "c")
    for sender in (EVIL, fellow):
        for name in ("a", "b"):
            for number in range(100):
                forged = ViewId(10**9 + number, "f" * 64)
                say(world, sender.peer_id, name, active(forged, sender))
    trains_on(world, NAMES, within_s=0)
    assert view_of(world, "a").id == view.id


class PlansOtherwise(SimulatedPeer):
    """A peer that takes part honestly, then says Ready with a plan of its own."""

    liars: frozenset[str] = frozenset()

    def _plan_later(self, action: ComputePlan) -> None:
        if self.name not in self.liars:
            return super()._plan_later(action)

        def planned() -> None:
            plan = NoPlan("I say so")
            self.do(self.agreement.plan_computed(action.snapshot, plan, self.now_ns))

        self.later(1, planned)

    def do(self, actions: list) -> None:  # type: ignore[type-arg]
        kept = [it for it in actions if not isinstance(it, Disagreed)]
        if len(kept) < len(actions):
            self.say("DISAGREES")
        super().do(kept)


def test_a_newcomer_with_another_plan_is_left_out() -> None:
    class Liar(PlansOtherwise):
        liars = frozenset({"liar"})

    world = swarm(NAMES, peer_type=Liar)
    before = lives(world, NAMES)
    for name in ("liar", "d"):
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=30)
    trains_on(world, FOUR)
    assert lives(world, NAMES) == before and "liar" not in view_of(world, "a").member_ids


def test_a_member_with_another_plan_is_left_out() -> None:
    class Liar(PlansOtherwise):
        liars: frozenset[str] = frozenset()

    world = swarm(FOUR, peer_type=Liar)
    before = lives(world, NAMES)
    Liar.liars = frozenset({"d"})
    world.peers["a"].do(world.peers["a"].agreement.request_replan("for the test", 0))
    world.run_until(lambda: "d" not in view_of(world, "a").member_ids, limit_s=30)
    trains_on(world, NAMES)
    assert lives(world, NAMES) == before, "the three go on as three"


def test_requests_are_small_few_and_ones_own() -> None:
    world = swarm(NAMES)
    fat = evil_record(addresses=tuple(f"/ip4/1.2.3.4/tcp/{n}/" + "x" * 200 for n in range(17)))
    assert say(world, "evil", "a", JoinRequest(fat))[1] is not None
    long_name = evil_record(links={"x" * 65: record_link()})
    assert say(world, "evil", "a", JoinRequest(long_name))[1] is not None
    assert say(world, "other", "a", JoinRequest(evil_record()))[1] is not None, "for itself only"
    for number in range(WAITING_LIMIT + 20):
        member = Member(f"sybil{number}", 1)
        say(world, member.peer_id, "a", JoinRequest(evil_record(member)))
    assert len(world.peers["a"].agreement.joiners) <= WAITING_LIMIT
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=60)
    trains_on(world, FOUR)


def record_link() -> Link:
    return Link(1, 1)


@pytest.mark.parametrize("who", [["b", "c", "d"], ["b"]])
def test_who_accuses_again_and_again_goes_itself(who: list[str]) -> None:
    world = swarm(["a", "b", "c", "d"])
    honest = ["a", "b", "c"]
    liar = world.peers["d"]
    targets = [{"b": "a", "c": "b", "d": "c"}[name] for name in who]
    steps = world.invariants.furthest
    for _ in range(12):
        world.run_to(world.now_ns + 4 * SECOND_NS)
        for name in targets:
            if liar.view is not None:
                liar.do(liar.agreement.suspect(name, "I say so", liar.now_ns))
    assert lives(world, ["b", "c"]) == [1, 1], "who is accused by one keeps its place"
    assert world.invariants.furthest >= steps + 15, "and they train"
    trains_on(world, honest, within_s=20)


def test_one_peers_word_for_silence_is_not_enough() -> None:
    """A member calls another one absent before anybody can have heard that other member."""
    world = swarm(FOUR)
    view = view_of(world, "a")
    number = view.id.number + 1
    number += number % 2 == 0
    liar = next(member for member in view.members if member.peer_id == "d")
    victim = next(member for member in view.members if member.peer_id == "b")
    present = PresentView(view.id, view.members, view.plan)  # type: ignore[arg-type]
    said = contribution(number, present, liar)
    for name in ("a", "c"):
        say(world, "d", name, gather(number, GENESIS, said, sender=liar, absent=(victim,)))
    for name in ("a", "c"):
        attempt = world.peers[name].agreement._state.attempt
        assert attempt is not None and victim in attempt.waits_for
    world.run_until(lambda: view_of(world, "a").id != view.id, limit_s=30)
    assert "b" in view_of(world, "a").member_ids


class IsNeverSynced(SimulatedTraining):
    def check_synced(self) -> None:
        if self.peer.name != "stuck":
            super().check_synced()


class HoldsOthersUp(SimulatedPeer):
    """A newcomer that answers and beats, and never has the states."""

    training_type = IsNeverSynced


def test_a_newcomer_that_is_never_synced_holds_nobody_up() -> None:
    world = swarm(NAMES, peer_type=HoldsOthersUp)
    world.add_peer("stuck")
    world.peers["stuck"].agreement.wants_view()
    world.run_until(lambda: world.peers["a"].agreement.next_view is not None)
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=20)
    assert "stuck" not in view_of(world, "a").member_ids


def test_a_silent_newcomer_holds_a_gather_up_for_two_seconds() -> None:
    world = swarm(NAMES)
    began_ns = world.now_ns
    say(world, "evil", "a", JoinRequest(evil_record()))
    world.run_until(lambda: world.peers["a"].agreement.attempting, limit_s=5)
    world.run_until(lambda: not world.peers["a"].agreement.attempting, limit_s=5)
    assert world.now_ns - began_ns < 4 * SECOND_NS
    trains_on(world, NAMES)


def test_a_newcomer_that_contradicts_itself_is_refused() -> None:
    world = swarm(NAMES)
    say(world, "evil", "a", JoinRequest(evil_record()))
    world.run_until(lambda: world.peers["a"].agreement.attempting, limit_s=5)
    attempt = world.peers["a"].agreement._state.attempt
    assert attempt is not None
    number, base = attempt.number, attempt.base
    world.run_to(world.now_ns + SECOND_NS // 2)
    for step, name in enumerate(NAMES):
        part = contribution(number, None, step=step)
        say(world, "evil", name, gather(number, base, part))
    world.run_until(lambda: not world.peers["a"].agreement.attempting, limit_s=5)
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=10)
    assert world.peers["a"].agreement._state.others.newcomers.is_refused(
        "evil", world.peers["a"].now_ns
    )


def test_a_bad_record_in_a_members_gather_changes_nothing() -> None:
    """Otherwise the attempt would be entered, and the step would never be told to stop."""
    world = swarm(NAMES)
    agreement = world.peers["a"].agreement
    view = view_of(world, "a")
    fellow = next(member for member in view.members if member.peer_id == "c")
    other = world.peers["c"].agreement
    actions = other.repeat_step("lost", world.peers["c"].now_ns)
    sent = [it.message for it in actions if isinstance(it, SendMessage)]
    message = next(it for it in sent if isinstance(it, Gather) and it.sender == fellow)
    bad = Signed("evil", "record", b"no record", b"")
    with pytest.raises(PeerFault):
        agreement.receive(
            "c", msgspec.structs.replace(message, newcomers=(bad,)), world.peers["a"].now_ns
        )
    assert not agreement.attempting and not agreement.frozen
    actions = agreement.receive("c", message, world.peers["a"].now_ns)
    assert agreement.attempting and any(isinstance(it, StopStep) for it in actions)


def test_what_a_higher_life_begins_is_done_even_if_the_rest_is_wrong() -> None:
    world = swarm(NAMES)
    agreement = world.peers["a"].agreement
    number = view_of(world, "a").id.number
    is_odd = (number + 1) % 2 == 1  # a view of an odd number is not a planned one
    wrong = Gather(Member("c", 9), number + 1, is_odd, GENESIS, 1, (), (), "")
    actions = agreement.receive("c", wrong, world.peers["a"].now_ns)
    assert agreement.attempting and any(isinstance(it, StopStep) for it in actions)


def test_ready_and_synced_count_only_as_signed_by_their_makers() -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    fellow = next(member for member in view.members if member.peer_id == "c")
    for message in (Ready(fellow, view.id, "", ""), Synced(fellow, view.id)):
        forged = stated(message, sign_for("evil"))
        _, fault = say(world, "c", "a", forged)
        assert fault is not None and "forged" in fault.cause
        _, fault = say(world, "evil", "a", stated(message, sign_for("c")))
        assert fault is not None and "speaks for another peer" in fault.cause


def test_a_heartbeat_tells_a_stranger_where_the_swarm_stands() -> None:
    """The heartbeat does nothing else: the gate decides what the stranger may learn."""
    world = swarm(NAMES)
    actions, fault = say(world, "evil", "a", Heartbeat(EVIL, 1))
    assert fault is None
    sent = [it for it in actions if isinstance(it, SendMessage) and it.to == ("evil",)]
    assert any(isinstance(it.message, Standing) for it in sent)
    trains_on(world, NAMES)


def test_joiners_are_named_and_their_records_travel_once() -> None:
    world = swarm(NAMES)
    sent: list[Gather] = []
    original = world.send

    def send(sender: str, receiver: str, message: object) -> None:
        if isinstance(message, Gather):
            sent.append(message)
        original(sender, receiver, message)  # type: ignore[arg-type]

    world.send = send  # type: ignore[method-assign,assignment]
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: are_together(world, FOUR), limit_s=30)
    parts = [decode(it.payload, Contribution) for message in sent for it in message.contributions]
    assert any(Member("d", 1) in part.joiners for part in parts)
    assert any(it.peer_id == "d" for message in sent for it in message.newcomers)


def test_a_large_gather_goes_in_parts_that_come_to_the_same() -> None:
    attempt = Attempt(Member("a", 1), 3, False, GENESIS, 4)
    for number in range(12):
        member = Member(f"p{number:02}", 1)
        signed = Signed(member.peer_id, "contribution", bytes(100 * 1024), b"")
        attempt.add(signed, decode(contribution(3, None, member).payload, Contribution))
    attempt.digests[attempt.me] = (1, attempt.digest)
    parts = whole_knowledge(attempt, proofs=False)
    assert len(parts) > 2 and {part.digest for part in parts} == {attempt.digest}
    assert [it for part in parts for it in part.contributions] == list(attempt.known.values())
    assert all(len(encode_for_wire(part)) < 640 * 1024 for part in parts)


def test_however_many_newcomers_members_name_each_message_may_be_heard() -> None:
    """The 160 strangers that are named had each asked another member. All who gathered took one
    another for faulty, and nobody joined."""
    attempt = Attempt(Member("a", 1), 4, True, GENESIS, 4)
    mine = contribution(4, None)
    attempt.add(mine, decode(mine.payload, Contribution))
    for number in range(160):
        member = Member(f"n{number:03}", 1)
        attempt.passed_on.newcomers[member] = evil_record(member)
    attempt.digests[attempt.me] = (1, attempt.digest)
    parts = whole_knowledge(attempt, proofs=True)
    for part in parts:
        require_bounded(part, "a")
    told = [it for part in parts for it in part.newcomers]
    assert told == list(attempt.passed_on.newcomers.values())
    assert sum(len(part.contributions) for part in parts) == 1
    large = dict.fromkeys(attempt.passed_on.newcomers, Signed("n", "record", bytes(16_000), b""))
    attempt.passed_on.newcomers = large
    sizes = [len(encode_for_wire(part)) for part in whole_knowledge(attempt, proofs=True)]
    assert max(sizes) < 256 * 1024


def test_newcomers_that_accuse_everybody_leave_what_members_say_to_be_heard() -> None:
    """Seventy newcomers that were named accused all others, and no member that gathered was
    heard."""
    me, other = Member("a", 1), Member("b", 1)
    attempt = Attempt(me, 4, True, GENESIS, 4)
    mine = contribution(4, None, me)
    attempt.add(mine, decode(mine.payload, Contribution))
    attempt._cache["members"] = ((len(attempt.opened), 0), {me, other})
    newcomers = [Member(f"0{number:03}", 1) for number in range(70)]
    for by in (*newcomers, me, other):
        for of in newcomers:
            item = Accusation(by, of)
            attempt.charges[item] = Charge(item, bytes(64))
    attempt.digests[me] = (1, attempt.digest)
    told = attempt.gather()
    require_bounded(told, "a")
    assert {it.accusation.by for it in told.accusations[:70]} == {me}
    assert {it.accusation.by for it in told.accusations[70:140]} == {other}


def test_two_sides_are_weighed_by_who_signed_last() -> None:
    """Five were in a view, and four of them went on. Their signatures under the old view count no
    more for it."""
    old = Side(True, frozenset("abcde"), 1_000, ViewId(1, "x"))
    new = Side(True, frozenset("abcd"), 10, ViewId(3, "y"))
    assert outranks(new, old) and not outranks(old, new)
    alone = Side(True, frozenset("e"), 10**6, ViewId(5, "z"))
    assert outranks(new, alone), "length decides only between equals"
    longer = Side(True, frozenset("ab"), 20, ViewId(3, "y"))
    shorter = Side(True, frozenset("cd"), 10, ViewId(5, "z"))
    assert outranks(longer, shorter) and not outranks(shorter, longer)
