"""A member that says much along the overlay, all of it well formed and signed, fills nobody's
memory. Sixty-five such messages of 1 MB took 300 MB of each other member, and 2,048 would have been
kept."""

import tracemalloc

import msgspec

from p2p_dtfm.core.consensus.parts.wide.spread_reception import EARLY_LIMIT_BYTES
from p2p_dtfm.core.consensus.parts.wide.spreading import ready_sets
from p2p_dtfm.core.consensus.parts.wide.telling import _tidings
from p2p_dtfm.core.messages import outlines
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Bodies,
    Ready,
    RetainedBody,
    RetainedStep,
    SavedState,
    Spread,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded
from p2p_dtfm.core.messages.opened_once import OpenedOnce
from p2p_dtfm.core.messages.outlines import NamedBodies, Outline, open_outline, sign_outline
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.liars import say, swarm, trains_on, view_of

NAMES = ["a", "b", "c"]
MB = 1_000_000
VIEW = ViewId(4, "view")


def large_outline(number: int, maker: Member) -> Signed:
    """An outline as large as it may be, of checkpoints that nobody has."""
    saved = tuple(SavedState(0, "", (0,) * 1000) for _ in range(480))
    said = Outline(
        maker, number, b"", b"", False, (), 0, {}, (), (), {}, saved, (), None, (), b"", (), False,
        0, (), (), (),
    )  # fmt: skip
    return sign_outline(said, sign_for(maker.peer_id))


def test_outlines_that_a_member_makes_for_nothing_are_forgotten() -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    evil = next(member for member in view.members if member.peer_id == "b")
    number = view.id.number // 2 * 2 + 2
    tracemalloc.start()
    for place in range(40):
        both = large_outline(number, evil), large_outline(number + 2 * place, evil)
        spread = Spread(evil, number, True, ViewId(7, "no"), 1, "", contributions=both)
        say(world, "b", "a", spread)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 120 * MB
    assert outlines._opened.held_bytes <= outlines.OUTLINES_OPENED_BYTES
    trains_on(world, NAMES)


def test_what_comes_too_early_is_kept_by_all_that_it_takes() -> None:
    world = swarm(NAMES)
    view = view_of(world, "a")
    evil = next(member for member in view.members if member.peer_id == "b")
    said = RetainedStep(GENESIS, 0, "", None, ())
    bodies = Bodies(retained=tuple(RetainedBody(said, (b"",) * 1000) for _ in range(450)))
    number = view.id.number // 2 * 2 + 2
    raw = encode_for_wire(Spread(evil, number, True, ViewId(7, "no"), 1, "", bodies=bodies))
    assert len(raw) > 900_000
    for _ in range(4 * EARLY_LIMIT_BYTES // (3 * len(raw))):
        say(world, "b", "a", msgspec.msgpack.decode(raw, type=Spread))
    early = world.peers["a"].agreement._state.attempts.early
    assert 0 < len(early) * len(raw) <= EARLY_LIMIT_BYTES
    trains_on(world, NAMES)


def test_plans_that_are_named_are_kept_up_to_so_many_bytes() -> None:
    bodies = NamedBodies()
    codecs = (("fp32", "fp32"),) * 100_000
    for step_ns in range(20):
        stages = (Stage("a", 0, 1, 1),)
        bodies.keep_plan(Plan((Pipeline(stages, 0, 1, codecs),), (), step_ns))
    assert 0 < len(bodies._plans) < 9 and bodies._plans.keys() == bodies._plan_bytes.keys()
    newest = Plan((Pipeline((Stage("a", 0, 1, 1),), 0, 1),), (), 77)
    bodies.keep_plan(newest)
    bodies.keep_plan(newest)
    assert newest.digest() in bodies._plans


def test_what_was_opened_is_found_again_until_newer_ones_take_its_room() -> None:
    held, first = OpenedOnce[str](10_000), Signed("a", "kind", bytes(4000), b"")
    assert held.find(first) is None
    assert held.keep(first, "first") == held.find(first) == held.keep(first, "again") == "first"
    for place in range(2):
        assert held.find(first) == "first"
        held.keep(Signed("b", "kind", bytes([place]) * 4000, b""), "newer")
    assert held.find(first) is None and held.held_bytes <= 10_000


def test_an_outline_is_opened_once() -> None:
    signed = large_outline(4, Member("b", 1))
    assert open_outline(signed, verify) is open_outline(signed, verify)


def test_who_says_what_nobody_else_says_does_not_make_others_say_too_much() -> None:
    """Nine newcomers each agreed to another view. What all members passed on was then refused as
    too long, with all that was true in it."""
    honest, liars = (
        [Member(f"{who}{number}", 1) for number in range(20)] for who in ("honest", "liar")
    )
    ready = [Ready(it, ViewId(4, it.peer_id), "plan", "members", b"x") for it in liars]
    ready += [Ready(it, ViewId(4, "view"), "plan", "members", b"x") for it in honest]
    sets = ready_sets(ready)
    told = Spread(honest[0], 4, True, GENESIS, 1, "", ready_sets=sets)
    require_bounded(told, "honest0")
    assert any([member for member, _ in it.said] == honest for it in sets)

    active = [Active(it, VIEW, number, signature=b"x") for number, it in enumerate(liars)]
    active += [Active(it, VIEW, 100, signature=b"x") for it in honest]
    tidings = _tidings(honest[0], VIEW, active)
    require_bounded(tidings, "honest0")
    assert any([member for member, _ in it.said] == honest for it in tidings.active)


def test_of_a_spread_that_is_refused_halfway_no_giver_is_left() -> None:
    """What came next, and not along the overlay, counted as if it had come so: by a Gather of one
    that spoke with each, a frozen attempt was ended, and that one blamed."""
    world = swarm(NAMES)
    view = view_of(world, "a")
    evil = next(member for member in view.members if member.peer_id == "b")
    number = view.id.number // 2 * 2 + 2
    peer = world.peers["a"]
    peer.do(peer.agreement.request_replan("for the test", peer.now_ns))
    attempt = peer.agreement._state.attempt
    assert attempt is not None and attempt.number == number
    of_another = (large_outline(number + 2, evil),)
    _, fault = say(
        world, "b", "a", Spread(evil, number, True, view.id, 1, "", contributions=of_another)
    )
    assert fault is not None and fault.cause == "an outline of another view"
    assert not peer.agreement._state.attempts.spread_giver
    assert attempt.wide is not None and not attempt.wide.giver
    trains_on(world, NAMES)
