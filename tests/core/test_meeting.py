"""Swarms of one run that meet, and swarms that liars make up to be met."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, Rejoin, Report
from p2p_dtfm.core.consensus.agreement_state import MEMBERS_LIMIT
from p2p_dtfm.core.consensus.parts.outsiders import COMMIT_TOLD
from p2p_dtfm.core.consensus.views.known_views import KnownViews
from p2p_dtfm.core.gate.gate import Admitted, Gate, GateRefusal
from p2p_dtfm.core.gate.gate_table import Role
from p2p_dtfm.core.membership.familiar_peers import STRANGERS_LIMIT, FamiliarPeers
from p2p_dtfm.core.messages.agreement_messages import KnownView, PresentView, Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import (
    RUN,
    contribution,
    gather,
    lives,
    say,
    self_made_view,
    swarm,
    trains_on,
    view_of,
)

INVENTED = tuple(Member(f"key{number}", 1) for number in range(9))
FAR = 10**6


def invented_standing(*others: Member, follows: tuple[str, ...] = ()) -> Standing:
    """A view far ahead, of made-up keys that have all signed it."""
    members = tuple(sorted((*INVENTED, *others)))
    certificate = self_made_view(members, FAR, INVENTED)
    commit = tuple(
        sign_prepared(
            Prepared(certificate.view, FAR, m.peer_id, {}, 0.0, 0, 0.0, 0, None),
            sign_for(m.peer_id),
        )
        for m in INVENTED
    )
    said = Standing(INVENTED[0], certificate, True, FAR, RUN, (), commit, follows)
    return stated(said, sign_for(INVENTED[0].peer_id))


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_no_view_follows_keys_that_nobody_knows(names: list[str]) -> None:
    world = swarm(names)
    before = lives(world, names)
    claims = [
        invented_standing(),
        invented_standing(follows=tuple(names)),
        invented_standing(Member("friend", 1)),  # they only say that it is with them
    ]
    for name in names:
        world.peers[name].agreement.familiar.give(["friend"])
        for claim in claims:
            actions, _ = say(world, claim.sender.peer_id, name, claim)
            assert not [it for it in actions if isinstance(it, Rejoin)]
    trains_on(world, names)
    assert lives(world, names) == before


def test_of_another_swarm_the_user_is_told_now_and_then() -> None:
    world = swarm(["a", "b", "c"])
    claim = invented_standing()

    def reports() -> int:
        actions, _ = say(world, claim.sender.peer_id, "a", claim)
        return len([it for it in actions if isinstance(it, Report)])

    assert [reports(), reports()] == [1, 0]
    world.now_ns += 700 * SECOND_NS
    actions = world.peers["a"].agreement.receive(claim.sender.peer_id, claim, world.now_ns)
    assert [it for it in actions if isinstance(it, Report)]


def test_a_newcomer_is_let_in_by_those_it_knows_and_not_by_keys_that_somebody_made() -> None:
    world = swarm(["a", "b", "c"])
    world.add_peer("d")
    newcomer = world.peers["d"].agreement
    newcomer.familiar.meet(["a"])
    newcomer.wants_view()
    me, maker = newcomer.me, INVENTED[0]
    false = self_made_view(INVENTED, FAR, INVENTED)
    for present in (PresentView(false.view, INVENTED, None), None):
        for number, base in ((FAR + 1, GENESIS), (FAR + 2, false.view)):
            part = contribution(number, present, maker, joiners=(me,))
            message = gather(number, base, part, sender=maker, certificates=(false,))
            say(world, maker.peer_id, "d", message)
            assert not newcomer.attempting, (present, number)
    actions, _ = say(world, maker.peer_id, "d", invented_standing())
    assert not actions, "nor does it ask them"
    world.ask_to_join("d", "a")
    world.run_until(lambda: "d" in view_of(world, "a").member_ids, limit_s=30)


def test_a_strangers_certificate_takes_nothing_from_what_was_proven() -> None:
    world = swarm(["a", "b", "c"])
    view = view_of(world, "a").id
    world.add_peer("d")
    newcomer = world.peers["d"].agreement
    newcomer.familiar.meet(["a"])
    newcomer.wants_view()
    world.ask_to_join("d", "a")
    world.run_until(lambda: newcomer._state.others.views.find(view) is not None, limit_s=30)
    maker, false = INVENTED[0], self_made_view(INVENTED, FAR, INVENTED)
    for number, base in ((FAR + 1, GENESIS), (FAR + 2, false.view)):
        message = gather(number, base, sender=maker, certificates=(false,))
        say(world, maker.peer_id, "d", message)
        assert newcomer._state.others.views.find(view) is not None
        assert newcomer._state.others.views.find(false.view) is None


def apart(left: list[str], right: list[str]) -> AgreementWorld:
    """Two swarms of one run that were founded apart, and know nobody of each other."""
    world = swarm(left)
    world.familiar = {name: tuple(group) for group in (left, right) for name in group}
    for name in right:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.peers[right[0]].agreement.familiar.meet(right)
    for name in right[1:]:
        world.peers[name].agreement.familiar.meet(right)
        world.ask_to_join(name, right[0])
    world.found(right[0])
    world.run_until(lambda: set(right) <= set(view_of_any(world, right[0])), limit_s=60)
    return world


def view_of_any(world: AgreementWorld, name: str) -> tuple[str, ...]:
    view = world.peers[name].view
    return view.member_ids if view is not None else ()


def standing_of(world: AgreementWorld, name: str) -> Standing:
    standing = world.peers[name].agreement.standing
    assert standing is not None
    return standing


def told(world: AgreementWorld, sender: str, receiver: str) -> bool:
    """Whether the receiver gives up its view when it hears where the sender stands."""
    standing, now_ns = standing_of(world, sender), world.peers[receiver].now_ns
    actions = world.peers[receiver].agreement.receive(sender, standing, now_ns)
    return any(isinstance(action, Rejoin) for action in actions)


def test_a_small_swarm_goes_to_where_its_user_sent_it() -> None:
    world = apart(["a", "b", "c"], ["x"])
    assert not told(world, "a", "x"), "nobody knows anybody"
    world.peers["x"].agreement.familiar.give(["b"])
    assert not told(world, "x", "a")
    assert told(world, "a", "x")


def test_the_swarm_of_another_run_moves_nobody_and_is_not_told_of() -> None:
    """The other swarm's member was named as a way into the directory (`--run FILE --initial-peers
    ADDRESS`)."""
    world, other = swarm(["a", "b"]), swarm(["x", "y", "z"], run_digest="another run")
    trains_on(other, ["x", "y", "z"])
    for name in "ab":
        world.peers[name].agreement.familiar.give(["x", "y", "z"])
        actions, _ = say(world, "x", name, standing_of(other, "x"))
        assert actions == [], "neither goes there nor says that it trains the same run"


def test_a_newcomer_asks_no_swarm_of_another_run_to_be_let_in() -> None:
    world, other = swarm(["a"]), swarm(["x"], run_digest="another run")
    world.add_peer("n")
    newcomer = world.peers["n"].agreement
    newcomer.familiar.give(["x"])
    newcomer.wants_view()
    assert say(world, "x", "n", standing_of(other, "x"))[0] == []


def test_of_two_that_were_sent_to_one_another_one_goes() -> None:
    world = apart(["a"], ["x"])
    world.peers["x"].agreement.familiar.give(["a"])
    world.peers["a"].agreement.familiar.give(["x"])
    standings = {name: standing_of(world, name) for name in "ax"}
    goes = []
    for one, other in (("a", "x"), ("x", "a")):
        actions = world.peers[other].agreement.receive(one, standings[one], world.now_ns)
        goes.append(any(isinstance(action, Rejoin) for action in actions))
    assert goes == [True, False], "the one with fewer steps"


def test_who_remembers_the_other_side_goes_only_where_that_counts_for_more() -> None:
    world = apart(["a", "b", "c"], ["x"])
    world.peers["x"].agreement.familiar.meet(["a"])
    assert told(world, "a", "x")
    world = apart(["a"], ["x", "y"])
    world.peers["x"].agreement.familiar.meet(["a"])
    assert not told(world, "a", "x"), "two have signed, there it is one"


def views(count: int, start: int = 0, mark: str = "") -> list[KnownView]:
    members = (Member("a", 1),)
    return [KnownView(ViewId(n, f"{mark}{n}"), members, "") for n in range(start, start + count)]


@pytest.mark.parametrize("apart_for", [10, 100, 1000, 10_000])
@pytest.mark.parametrize("common", [1, 40, 3000])
def test_however_long_they_were_apart_they_know_a_view_of_both(common: int, apart_for: int) -> None:
    shared = views(common)
    one = KnownViews((*shared, *views(apart_for, common, "left")))
    other = KnownViews((*shared, *views(apart_for // 3, common, "right")))
    found = one.newest_common(other.told)
    assert found is not None and found.view in {it.view for it in shared}
    assert len(one.told) < 140


def test_a_crowd_of_strangers_does_not_hide_those_that_are_known() -> None:
    familiar = FamiliarPeers("me")
    familiar.give(["given"])
    familiar.meet(["met", "me"])
    for number in range(10_000):
        familiar.hear_of(f"stranger{number}")
    assert len(familiar.all) == STRANGERS_LIMIT + 2
    first = familiar.next_of(familiar.all, 16)
    assert {"given", "met"} <= set(first) and len(first) == 16
    turns = {peer for _ in range(40) for peer in familiar.next_of(familiar.all, 16)}
    assert turns == set(familiar.all), "everybody's turn comes"


def test_a_newcomer_shares_the_view_before_its_first_one_with_the_others() -> None:
    world = swarm(["a", "b", "c"])
    before = view_of(world, "a").id
    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.ask_to_join("d", "a")
    world.run_until(lambda: "d" in view_of(world, "a").member_ids, limit_s=30)
    world.run_until(lambda: world.peers["d"].view is not None, limit_s=30)
    assert before in {known.view for known in world.peers["d"].agreement.history}


def test_invented_standing_is_well_formed() -> None:
    """Otherwise the tests above would show nothing: a peer that knows one of these keys goes over
    to them."""
    world = swarm(["a"])
    world.peers["a"].agreement.familiar.give([INVENTED[1].peer_id])
    claim = invented_standing()
    actions, fault = say(world, claim.sender.peer_id, "a", claim)
    assert fault is None and any(isinstance(it, Rejoin) for it in actions)


def test_the_largest_swarm_can_tell_a_stranger_where_it_stands() -> None:
    members = tuple(Member(f"12D3KooW{number:044}", 1 << 40) for number in range(MEMBERS_LIMIT))
    view = ViewId(1 << 40, "f" * 64)
    certificate = Certificate(view, "e" * 64, members, tuple((m, b"x" * 64) for m in members))
    sums = {number: (b"x" * 16,) * 8 for number in range(4)}
    said = Prepared(view, 9, members[0].peer_id, {}, 1.0, 9, 0.0, 0, view, "a" * 64, sums)
    commit = (sign_prepared(said, lambda text: b"x" * 64),) * COMMIT_TOLD
    follows = tuple(m.peer_id for m in members[:16])
    told = (view,) * 130, commit, follows
    large = Standing(members[0], certificate, True, 9, "f" * 64, *told, b"x" * 64)
    size_bytes = len(encode_for_wire(large))
    gate = Gate(lambda peer_id: Role.STRANGER)
    for kind in ("control", "Standing"):
        assert isinstance(gate.admit("stranger", kind, size_bytes, 0), Admitted)
    assert isinstance(gate.admit("stranger", "Hello", size_bytes, 0), GateRefusal)


def test_what_a_commit_shows_has_room_in_what_outsiders_may_hear() -> None:
    """In a run with audits a Prepared may take 64 KiB. With five members no outsider heard where
    they stand, and with sixteen the message could not be made."""
    world = swarm(["a", "b"])
    agreement, view = world.peers["a"].agreement, view_of(world, "a")
    ledger = agreement._state.ledger
    assert ledger is not None
    ledger.last_commit = tuple(
        Signed(f"holder {number}", "prepared", bytes(44_000 + number), bytes(64))
        for number in range(COMMIT_TOLD)
    )
    told = agreement._machines.outsiders.standing_of(view)
    assert len(encode_for_wire(told)) < 128 * 1024
    assert [it.peer_id for it in told.commit] == ["holder 0", "holder 1"]


def test_an_old_view_of_which_nobody_is_left_is_no_view_in_common() -> None:
    """Anybody may name such a view. Then only the length would count, which is made up as well."""
    world = swarm(["a", "b", "c"])
    old = KnownView(ViewId(1, "f" * 64), (Member("gone", 1), Member("gone too", 1)), "plan")
    invented = invented_standing()
    made_up = msgspec.structs.replace(invented, ancestors=(old.view,), signature=b"")
    claim = stated(made_up, sign_for(invented.sender.peer_id))
    for name in ("a", "b", "c"):
        agreement = world.peers[name].agreement
        agreement._state.others.views._history = {
            old.view: old,
            **agreement._state.others.views._history,
        }
        agreement.familiar.give(["friend"])
        actions, _ = say(world, claim.sender.peer_id, name, claim)
        assert not any(isinstance(action, Rejoin) for action in actions), name
