"""Every message of the agreement, with hostile values in every field, in every phase. A receiver
raises `PeerFault` or returns. It never ends in another way, and never stops training for the
message. A stranger changes nothing, and a member at most makes the others agree anew."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, Disagreed, Left, Rejoin
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Active,
    AgreementMessage,
    Contribution,
    Heartbeat,
    JoinRequest,
    PendingStep,
    PresentView,
    Ready,
    RetainedStep,
    SavedState,
    Standing,
    Synced,
)
from p2p_dtfm.core.messages.statements import charge, stated
from p2p_dtfm.core.protocol.canonical import decode, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import sign
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import run_spec
from tests.core.liars import EVIL, contribution, evil_record, gather, standing, swarm, view_of

NAMES = ["a", "b", "c"]
NUMBERS = (-(2**63), -1, 2**31, 2**53, 2**63 - 1, 2**64 - 1)
PHASES: dict[str, Callable[[AgreementWorld], None]] = {}

# phases ----------------------------------------------------------------------------------------


def phase(
    make: Callable[[AgreementWorld], None],
) -> Callable[[AgreementWorld], None]:
    PHASES[make.__name__] = make
    return make


@phase
def in_view(world: AgreementWorld) -> None:
    world.run_to(world.now_ns + SECOND_NS)


@phase
def gathering_planned(world: AgreementWorld) -> None:
    world.send = lambda *_: None  # type: ignore[method-assign]
    world.peers["a"].do(world.peers["a"].agreement.request_replan("test", world.peers["a"].now_ns))
    assert world.peers["a"].agreement.attempting


@phase
def gathering_unplanned(world: AgreementWorld) -> None:
    world.send = lambda *_: None  # type: ignore[method-assign]
    peer = world.peers["a"]
    peer.do(peer.agreement.suspect("b", "test", peer.now_ns))
    assert peer.agreement.frozen


@phase
def ready(world: AgreementWorld) -> None:
    peer, send = world.peers["a"], world.send

    def without_ready(*call: object) -> None:
        if not any(isinstance(part, Ready) for part in call):
            send(*call)  # type: ignore[arg-type]

    world.send = without_ready  # type: ignore[method-assign]
    peer.do(peer.agreement.request_replan("test", peer.now_ns))
    world.run_until(lambda: has_said_ready(peer.agreement))


@phase
def agreed(world: AgreementWorld) -> None:
    peer = world.peers["a"]
    peer.do(peer.agreement.request_replan("test", peer.now_ns))
    world.run_until(lambda: peer.agreement.next_view is not None)


@phase
def newcomer(world: AgreementWorld) -> None:
    world.send = lambda *_: None  # type: ignore[method-assign]
    begin_again(world)


@phase
def founding(world: AgreementWorld) -> None:
    newcomer(world)
    world.peers["a"].do(world.peers["a"].agreement.found(world.peers["a"].now_ns))


@phase
def outside(world: AgreementWorld) -> None:
    world.peers["a"].agreement._machines.outsiders.rejoin("test")


def begin_again(world: AgreementWorld) -> None:
    peer = world.peers["a"]
    peer.world.send = lambda *_: None  # type: ignore[method-assign]
    peer.do([Rejoin("test")])


def has_said_ready(agreement: Agreement) -> bool:
    attempt = agreement._state.attempt
    return attempt is not None and agreement.me in attempt.ready


# messages --------------------------------------------------------------------------------------


def hostile(value: Any) -> Iterator[Any]:
    """Other values in place of this one, one at a time, at any depth."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from NUMBERS
    elif isinstance(value, str):
        yield from ("", "x" * 70_000, "\x00", "ﬀ")
    elif isinstance(value, bytes):
        yield from (b"", bytes(64), bytes(70_000))
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            for other in hostile(getattr(value, name)):
                yield msgspec.structs.replace(value, **{name: other})
    elif isinstance(value, tuple):
        yield ()
        yield value * 5000
        for number, item in enumerate(value):
            for other in hostile(item):
                yield (*value[:number], other, *value[number + 1 :])
    elif isinstance(value, dict):
        yield {}
        for key, item in value.items():
            for other in hostile(key):
                yield {other: item}
            for other in hostile(item):
                yield {key: other}


def contributions(number: int, sender: Member, present: PresentView) -> Iterator[Any]:
    """Contributions of a contributor that signs whatever it likes."""
    plan = Plan((Pipeline((Stage("a", -5, 10**6, 1), Stage("z", 3, 2, 0)), -7, 10**9),), (), -1)
    whole = Contribution(
        member=sender,
        number=number,
        record=evil_record(sender),
        present=present,
        step=3,
        held={0: 3},
        joiners=(Member("other", 1),),
        lineages={3: "f"},
        saved=(SavedState(3, "f", (0,)),),
        pending=PendingStep(3, "f", (), (0,)),
        retained=RetainedStep(present.view, 2, "f", None, (0,)),
        accusers=("b",),
        doubted=(("b", "a"), ("", "")),
    )
    view = PresentView(present.view, present.members, plan)
    for part in (whole, msgspec.structs.replace(whole, present=view), *hostile(whole)):
        try:
            payload = encode_for_wire(part)
        except OverflowError:
            continue
        yield sign(sender.peer_id, "contribution", payload, sign_for(sender.peer_id))


def messages(sender: Member, agreement: Agreement, world: AgreementWorld) -> Iterator[Any]:
    """Messages as `sender` could say them, in what it claims to be the receiver's view or
    attempt."""
    view = view_of(world, "b")
    assert view.certificate is not None
    attempt = agreement._state.attempt
    signer = sign_for(sender.peer_id)
    number = attempt.number if attempt is not None else view.id.number + 1
    base = view.id if number % 2 == 0 else GENESIS
    named = attempt.outcome.view_id if attempt is not None and attempt.outcome.view_id else view.id
    accusation = charge(Accusation(sender, agreement.me), run_spec().digest(), number, signer)
    present = PresentView(view.id, view.members, view.plan)  # type: ignore[arg-type]
    whole = gather(
        number,
        base,
        contribution(number, present, sender),
        sender=sender,
        absent=(agreement.me, EVIL),
        accusations=(accusation,),
        newcomers=(evil_record(),),
        certificates=(view.certificate,),
    )
    yield from (whole, *hostile(whole))
    for part in contributions(number, sender, present):
        yield msgspec.structs.replace(whole, contributions=(part,))
    for message in (
        Ready(sender, named, "e" * 64, "f" * 64),
        Synced(sender, named),
        Active(sender, named, 3, "f", True, view.certificate),
        Active(sender, ViewId(named.number + 2, "f"), 3),
        standing(view.certificate, 10**9, sender, (view.id,)),
    ):
        for other in (message, *hostile(message)):
            yield other
            if isinstance(other, Ready | Synced | Active | Standing):
                yield stated_if_possible(other, signer)
    for beat in (Heartbeat(sender, 1), JoinRequest(evil_record(sender), view.id, 3)):
        yield from (beat, *hostile(beat))


def stated_if_possible(message: Any, signer: Any) -> Any:
    try:
        return stated(message, signer)
    except OverflowError:
        return message


def as_it_arrives(message: AgreementMessage) -> AgreementMessage | None:
    """The message as it arrives; None where it cannot be said, or is refused where it is
    decoded."""
    try:
        return decode(encode_for_wire(message), type(message))
    except (OverflowError, PeerFault):
        return None


@pytest.mark.parametrize("by", ["evil", "c"])
@pytest.mark.parametrize("name", sorted(PHASES))
def test_hostile_values_are_their_senders_fault(name: str, by: str) -> None:
    world = swarm(NAMES)
    fellow = next(member for member in view_of(world, "a").members if member.peer_id == "c")
    PHASES[name](world)
    peer = world.peers["a"]
    sender = fellow if by == "c" else EVIL
    count = faults = 0
    agreement = copy.deepcopy(peer.agreement)
    for said in messages(sender, agreement, world):
        message = as_it_arrives(said)
        if message is None:
            continue
        before = agreement.view.id if agreement.view is not None else None
        attempting = agreement._state.attempt
        count += 1
        try:
            actions = agreement.receive(by, message, peer.now_ns)
        except PeerFault as fault:
            assert fault.cause
            faults += 1
            continue
        if name == "outside":
            assert actions == []
            continue
        bad = [it for it in actions if isinstance(it, Rejoin | Left | Disagreed)]
        assert not bad, f"{message} makes it {bad}"
        assert (agreement.view.id if agreement.view is not None else None) == before
        if by == "evil" and before is not None:
            assert agreement._state.attempt is attempting, (
                f"a stranger changes an attempt: {message}"
            )
        if agreement._state.attempt is not attempting:
            agreement = copy.deepcopy(peer.agreement)
        agreement.tick(peer.now_ns)
    assert count > 200 and (name == "outside" or faults > 50)
