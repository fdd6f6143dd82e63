"""A swarm in virtual time, and peers that mean it harm: strangers with keys of their own."""

from collections.abc import Callable

import msgspec

from p2p_dtfm.core.consensus.actions import SECOND_NS, Actions, AgreementTiming
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Contribution,
    Gather,
    PresentView,
    Ready,
    Standing,
    sign_contribution,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import sign_record
from p2p_dtfm.core.protocol.signed import Sign, Signed
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot, ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD, record, run_spec

EVIL = Member("evil", 1)


def one_pipeline(snapshot: Snapshot) -> Plan | NoPlan:
    """One pipeline in which each peer holds a part of the model, for as many peers as there are
    layers."""
    names = [member.peer_id for member in snapshot.members]
    layers = snapshot.workload.layer_count
    holders, spares = names[:layers], tuple(names[layers:])
    cuts = [layers * number // len(holders) for number in range(len(holders) + 1)]
    stages = tuple(Stage(name, cuts[n], cuts[n + 1], 1) for n, name in enumerate(holders))
    return Plan((Pipeline(stages, 0, snapshot.workload.microbatch_count),), spares, 1)


RUN = run_spec().digest()


def swarm(
    names: list[str],
    seed: int = 1,
    peer_type: type[SimulatedPeer] = SimulatedPeer,
    run_digest: str = RUN,
    timing: AgreementTiming = TIMING,
) -> AgreementWorld:
    """The peers train in one view; a peer that loses its view asks to be let in again."""
    template = record("template", run_digest=run_digest)
    world = AgreementWorld(seed, WORKLOAD, template, one_pipeline, timing=timing)
    world.peer_type = peer_type
    world.rejoins = True
    for name in names:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found(names[0]))
    world.run_until(lambda: are_together(world, names))
    trains_on(world, names)
    return world


def are_together(world: AgreementWorld, names: list[str]) -> bool:
    views = [world.peers[name].view for name in names]
    whole = all(view is not None and set(view.member_ids) >= set(names) for view in views)
    return whole and len({view.id for view in views if view is not None}) == 1


def trains_on(world: AgreementWorld, names: list[str], within_s: int = 10) -> None:
    """Three more steps commit at all of these peers."""
    step = min(world.peers[name].agreement.step for name in names)

    def done() -> bool:
        return all(world.peers[name].agreement.step >= step + 3 for name in names)

    world.run_until(done, limit_s=within_s + 10)


def view_of(world: AgreementWorld, name: str) -> View:
    view = world.peers[name].view
    assert view is not None
    return view


def say(
    world: AgreementWorld, sender: str, receiver: str, message: AgreementMessage
) -> tuple[Actions, PeerFault | None]:
    """Deliver a message, whoever made it. Returns what the receiver does about it, or whom it
    blames."""
    peer = world.peers[receiver]
    try:
        actions = peer.agreement.receive(sender, message, peer.now_ns)
    except PeerFault as fault:
        return [], fault
    peer.do(actions)
    return actions, None


def lives(world: AgreementWorld, names: list[str]) -> list[int]:
    return [world.peers[name].agreement.me.life for name in names]


# what a stranger can make ----------------------------------------------------------------------


def evil_record(member: Member = EVIL, **changes: object) -> Signed:
    return sign_record(
        record(member.peer_id, life=member.life, **changes),  # type: ignore[arg-type]
        sign_for(member.peer_id),
    )


def self_made_view(
    members: tuple[Member, ...],
    number: int,
    signers: tuple[Member, ...] = (EVIL,),
    sign_of: Callable[[str], Sign] = sign_for,
) -> Certificate:
    """A view that nobody but its `signers` agreed on."""
    view = ViewId(number, "f" * 64)
    said = members_digest(members)
    ready = [stated(Ready(m, view, "e" * 64, said), sign_of(m.peer_id)) for m in signers]
    return certified(view, members, ready)


def standing(
    certificate: Certificate,
    step: int,
    sender: Member = EVIL,
    ancestors: tuple[ViewId, ...] = (),
) -> Standing:
    prepared = Prepared(certificate.view, step - 1, sender.peer_id, {}, 0.0, 0, 0.0, 0, None)
    commit = (sign_prepared(prepared, sign_for(sender.peer_id)),)
    said = Standing(sender, certificate, True, step, RUN, ancestors, commit)
    return stated(said, sign_for(sender.peer_id))


def active(view: ViewId, sender: Member = EVIL, step: int = 0) -> Active:
    return stated(Active(sender, view, step), sign_for(sender.peer_id))


def contribution(
    number: int, present: PresentView | None = None, sender: Member = EVIL, **changes: object
) -> Signed:
    part = Contribution(sender, number, evil_record(sender), present, 0, {}, ())
    part = msgspec.structs.replace(part, **changes)
    return sign_contribution(part, sign_for(sender.peer_id))


def gather(
    number: int,
    base: ViewId,
    *parts: Signed,
    sender: Member = EVIL,
    **changes: object,
) -> Gather:
    planned = number % 2 == 0
    message = Gather(sender, number, planned, base, 1, parts, (), "0" * 64)
    return msgspec.structs.replace(message, **changes)
