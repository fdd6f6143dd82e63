"""What travels along an overlay is for swarms of many. Nobody makes a small swarm speak so, and
what strangers name is not kept for ever."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import WIDE_ABOVE
from p2p_dtfm.core.consensus.parts.wide.spread_reception import EARLY_LIMIT
from p2p_dtfm.core.messages.agreement_messages import (
    PREPARED_LIMIT,
    Bodies,
    Contribution,
    JoinRequest,
    PendingStep,
    ReadySet,
    RetainedBody,
    RetainedStep,
    Spread,
)
from p2p_dtfm.core.messages.outlines import (
    RECORDS_LIMIT_BYTES,
    NamedBodies,
    open_outline,
    record_name,
    require_sound,
    sign_outline,
)
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.liars import EVIL, evil_record, say, swarm, trains_on, view_of

NAMES = ["a", "b", "c"]
VIEW = ViewId(2, "v")


@pytest.mark.parametrize("sender", [EVIL, Member("other", 1)])
def test_a_stranger_makes_no_small_swarm_speak_along_an_overlay(sender: Member) -> None:
    world = swarm(NAMES)
    view, evil = view_of(world, "a"), evil_record()
    for number in (view.id.number // 2 * 2 + 2, view.id.number // 2 * 2 + 3):
        planned = number % 2 == 0
        bodies = Bodies(records=(evil,))
        spread = Spread(sender, number, planned, view.id, 1, "", bodies=bodies, wants=("a",))
        actions, fault = say(world, sender.peer_id, "a", spread)
        assert not actions and fault is None
        attempts = world.peers["a"].agreement._state.attempts
        assert attempts.spread_number != number and not attempts.early
        assert world.peers["a"].agreement._state.others.bodies.record(record_name(evil)) is None
        heard = world.peers["a"].agreement.last_heard
        assert heard is not None and "a swarm of many" in heard.reason
    trains_on(world, NAMES)


def test_who_is_let_in_with_a_crowd_says_of_no_later_attempt_that_it_is_of_many() -> None:
    """Keys cost nothing, and with so many of them the attempt that lets them in goes along the
    overlay. What members do after a failure must not go so, or they wait longer for silent
    peers."""
    world = swarm(NAMES, timing=replace(TIMING, wide_above=WIDE_ABOVE))
    peer, view = world.peers["a"], view_of(world, "a")
    crowd = [Member(f"evil{number:02}", 1) for number in range(2 * WIDE_ABOVE)]
    for member in crowd:
        say(world, member.peer_id, "a", JoinRequest(evil_record(member)))
    world.run_until(lambda: peer.agreement.attempting)
    attempt = peer.agreement._state.attempt
    assert attempt is not None and attempt.wide is not None and crowd[0] in attempt.universe
    number = attempt.number + 1
    for at in (view.id, GENESIS):
        _, fault = say(world, crowd[0].peer_id, "a", Spread(crowd[0], number, False, at, 1, ""))
        assert fault is None and not peer.agreement._state.attempts.early
    peer.do(peer.agreement.suspect("b", "it is gone", peer.now_ns))
    attempt = peer.agreement._state.attempt
    assert attempt is not None and attempt.number == number and attempt.wide is None


@pytest.mark.parametrize("sender", [EVIL, Member("c", 1)])
def test_nobody_has_what_others_said_too_early_forgotten(sender: Member) -> None:
    """A peer keeps what it hears of an attempt in which it may not take part yet. One message of a
    much later attempt, by whomever, had all of that forgotten; so had 128 of the same attempt."""
    world = swarm(NAMES, timing=replace(TIMING, wide_above=2))
    peer, view, honest = world.peers["a"], view_of(world, "a"), world.peers["b"].agreement.me
    number, ahead = view.id.number // 2 * 2 + 2, ViewId(7, "not known yet")
    early = Spread(honest, number, True, ahead, 1, "")
    say(world, "b", "a", early)
    said = [Spread(sender, number, True, ahead, round_, "") for round_ in range(2 * EARLY_LIMIT)]
    for message in (Spread(sender, 1 << 40, True, ahead, 1, ""), *said):
        say(world, sender.peer_id, "a", message)
    kept = [it for it, _ in peer.agreement._state.attempts.early]
    assert early in kept and len(kept) <= EARLY_LIMIT


def test_what_is_refused_puts_no_attempt_on_the_overlay() -> None:
    """Asking whether a message is of the attempt under way put the attempt on the overlay."""
    world = swarm(NAMES)
    peer, member = world.peers["a"], world.peers["b"].agreement.me
    peer.do(peer.agreement.request_replan("for the test", peer.now_ns))
    attempt = peer.agreement._state.attempt
    assert attempt is not None and attempt.wide is None
    ready = ReadySet(ViewId(attempt.number + 1, "f" * 64), "", "", ((member, b""),))
    ours = attempt.number, attempt.planned, attempt.base
    _, fault = say(world, "b", "a", Spread(member, *ours, 1, "", ready_sets=(ready,)))
    assert fault is not None and "Ready of another attempt" in fault.cause
    assert peer.agreement._state.attempt is attempt and attempt.wide is None


def test_records_that_were_named_are_kept_up_to_so_many_bytes() -> None:
    bodies, first = NamedBodies(), evil_record()
    kept = bodies.keep_record(first)
    large = [_padded(first, number) for number in range(2)]
    for record in large:
        bodies.keep_record(record)
    assert bodies.record(kept) is None
    assert bodies.record(record_name(large[0])) is None
    assert bodies.record(record_name(large[1])) == large[1]


def _padded(record: Signed, number: int) -> Signed:
    size_bytes = RECORDS_LIMIT_BYTES // 2 + 1
    return msgspec.structs.replace(record, payload=bytes([number]) * size_bytes)


def retained(step: int, prepared: tuple[Signed, ...], layers: tuple[int, ...]) -> RetainedStep:
    return RetainedStep(VIEW, step, "b", None, layers, prepared)


def said_prepared(peer: str) -> Signed:
    said = Prepared(VIEW, 7, peer, {}, 0.0, 0, 0.0, 0, None)
    return sign_prepared(said, sign_for(peer))


def part_of(name: str, prepared: tuple[Signed, ...]) -> Contribution:
    pending = PendingStep(7, "b", prepared, ())
    step = retained(6, prepared, (int(name[-1]),))
    member = Member(name, 1)
    return Contribution(member, 3, evil_record(), None, 7, {}, (), pending=pending, retained=step)


def test_steps_and_prepared_are_named_and_come_back_whole() -> None:
    prepared = tuple(map(said_prepared, NAMES))
    mine, others = NamedBodies(), NamedBodies()
    outlines = [mine.outlined(part_of(name, prepared)) for name in ("p1", "p2")]
    others.keep_record(evil_record())
    assert not any(map(others.knows, outlines)) and others.filled(outlines[0]) is None
    beside, names = mine.beside(outlines[0])
    assert beside == mine.beside(outlines[1])[0], "they retain the same but for their layers"
    assert len(beside.retained) == 1 and len(beside.prepared) == 3 and len(names) == 4
    others.keep(Bodies(retained=beside.retained, prepared=beside.prepared[1:]))
    assert not any(map(others.knows, outlines)), "one Prepared is missing"
    others.keep(beside)
    for name, outline in zip(("p1", "p2"), outlines, strict=True):
        assert others.filled(outline) == part_of(name, prepared)


def test_an_outline_has_no_prepared_in_it() -> None:
    outline = NamedBodies().outlined(part_of("p1", (said_prepared("a"),)))
    assert outline.pending is not None
    signer = sign_for("p1")
    open_outline(sign_outline(outline, signer), verify)
    full = msgspec.structs.replace(outline.pending, prepared=(said_prepared("a"),))
    for pending in (full, None):
        wrong = msgspec.structs.replace(outline, pending=pending)
        with pytest.raises(PeerFault, match="where none belong"):
            open_outline(sign_outline(wrong, signer), verify)


def test_who_passes_on_what_nobody_said_is_at_fault() -> None:
    good = said_prepared("a")
    forged = msgspec.structs.replace(good, signature=b"not its own")
    step = retained(6, (), ())
    with_layers = RetainedBody(msgspec.structs.replace(step, reduced_layers=(1,)), ())
    for bodies in (
        Bodies(prepared=(forged,)),
        Bodies(prepared=(evil_record(),)),
        Bodies(retained=(with_layers,)),
        Bodies(retained=(RetainedBody(step, (b"n",) * (PREPARED_LIMIT + 1)),)),
    ):
        with pytest.raises(PeerFault) as fault:
            require_sound(bodies, NamedBodies(), "giver", verify)
        assert fault.value.peer_id == "giver"
    sound = Bodies(retained=(RetainedBody(step, ()),), prepared=(good,))
    require_sound(sound, NamedBodies(), "giver", verify)
