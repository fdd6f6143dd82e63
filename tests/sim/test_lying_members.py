"""A member that lies in its Prepared is left out by all others, and training goes on."""

import math

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.parts.gather import contributing
from p2p_dtfm.core.messages.agreement_messages import Contribution, PresentView, SavedState
from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared, sign_prepared
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from tests.core.builders import WORKLOAD, record
from tests.sim.sim_support import found_together

MEMBERS = ["a", "b", "c", "d"]
LIAR = "b"
FROM_STEP = 4


class SaysOtherwise(SimulatedTraining):
    """`changes` are what the liar's Prepared says instead, for each kind of lie."""

    def make_prepared(self, view: View, plan: Plan, step: int, done: dict) -> Prepared:  # type: ignore[type-arg]
        said, peer = super().make_prepared(view, plan, step, done), self.peer
        assert isinstance(peer, Lying)
        if peer.name != LIAR or step < FROM_STEP:
            return said
        changes = {
            "norm": {"squared_norms": dict.fromkeys(said.squared_norms, 7.0)},
            "nan": {"squared_norms": dict.fromkeys(said.squared_norms, math.nan)},
            "loss": {"loss_sum": 1e30},
            "tokens": {"token_count": 1 << 40},
            "sums": {"sums": {n: (b"?" * 16,) * len(of) for n, of in said.sums.items()}},
            "base": {"base": "elsewhere"},
        }
        return msgspec.structs.replace(said, **changes.get(peer.kind, {}))


class Lying(SimulatedPeer):
    training_type = SaysOtherwise
    kind = ""

    def broadcast(self, signed: Signed) -> None:
        said = msgspec.msgpack.decode(signed.payload, type=Prepared)
        if self.name != LIAR or self.kind != "each another" or said.step < FROM_STEP:
            super().broadcast(signed)
            return
        for number, name in enumerate(MEMBERS):
            norms = {n: norm + number for n, norm in said.squared_norms.items()}
            other = msgspec.structs.replace(said, squared_norms=norms)
            if name != LIAR:
                self.send(name, SignedPrepared(sign_prepared(other, sign_for(LIAR))))


MANY_MICROBATCHES = msgspec.structs.replace(WORKLOAD, microbatch_count=16)
"""For so many members `replicas` makes a plan that a run can have."""


def replicas(snapshot: Snapshot) -> Plan | NoPlan:
    """A plan in which each member holds the whole model. It needs a microbatch for each."""
    names = [member.peer_id for member in snapshot.members]
    total, count = snapshot.workload.microbatch_count, len(names)
    cuts = [total * number // count for number in range(count + 1)]
    layers = snapshot.workload.layer_count
    return Plan(
        tuple(
            Pipeline((Stage(name, 0, layers, 1),), cuts[n], cuts[n + 1] - cuts[n])
            for n, name in enumerate(names)
        ),
        (),
        1,
    )


@pytest.mark.parametrize("kind", ["norm", "nan", "loss", "tokens", "sums", "base", "each another"])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_left_out(seed: int, kind: str) -> None:
    world = started(seed, kind, frozenset({LIAR}))
    others = [world.peers[name] for name in MEMBERS if name != LIAR]
    world.run_until(lambda: all(peer.agreement.step >= FROM_STEP for peer in others))
    begun_ns = world.now_ns
    world.run_until(lambda: all(peer.agreement.step >= FROM_STEP + 3 for peer in others))
    assert world.now_ns - begun_ns <= 20 * SECOND_NS, "of virtual time, as slow as its messages are"
    for peer in others:
        assert peer.view is not None
        assert peer.view.member_ids == tuple(sorted(set(MEMBERS) - {LIAR}))
    assert any(f"leaves out {LIAR}" in line or "one of" in line for line in world.story)


@pytest.mark.parametrize("kind", ["norm", "base"])
@pytest.mark.parametrize("seed", [4, 5])
def test_who_sees_a_lie_first_is_not_one_that_stops_steps(seed: int, kind: str) -> None:
    """Colluders came back and lied again. The honest member saw a dozen such lies in a minute, and
    was out."""
    world = started(seed, kind, frozenset({LIAR}))
    others = [world.peers[name] for name in MEMBERS if name != LIAR]
    world.run_until(lambda: all(peer.agreement.step >= FROM_STEP + 3 for peer in others))
    for peer in others:
        stops = peer.agreement._state.doubts.accusers._stops
        assert {member.peer_id for member in stops} <= {LIAR}


def test_who_shows_nothing_of_what_led_to_its_false_base_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The liar kept its evidence back, so nobody was blamed in any new view. The members that saw
    the fork went first."""

    def hiding(**facts: object) -> Contribution:
        part = Contribution(**facts)  # type: ignore[arg-type]
        if part.member.peer_id != LIAR or part.retained is None:
            return part
        retained = msgspec.structs.replace(part.retained, prepared=())
        return msgspec.structs.replace(part, retained=retained)

    world = started(0, "base", frozenset({LIAR}))
    monkeypatch.setattr(contributing, "Contribution", hiding)
    others = [world.peers[name] for name in MEMBERS if name != LIAR]
    world.run_until(lambda: all(peer.agreement.step >= FROM_STEP + 3 for peer in others))
    without = tuple(sorted(set(MEMBERS) - {LIAR}))
    for peer in others:
        assert [view.member_ids for view in peer.views][:2] == [tuple(MEMBERS), without]


def test_an_honest_member_that_is_found_at_fault_fails_the_simulation() -> None:
    with pytest.raises(Violation, match=f"finds fault with .*{LIAR}"):
        world = started(0, "norm", frozenset())
        world.run_to(world.now_ns + 60 * SECOND_NS)


def started(seed: int, kind: str, liars: frozenset[str]) -> AgreementWorld:
    world = AgreementWorld(seed, MANY_MICROBATCHES, record("template"), replicas, timing=TIMING)
    world.peer_type, world.liars = type("Liar", (Lying,), {"kind": kind}), liars
    found_together(world, MEMBERS)
    world.run_until(lambda: all(peer.agreement.step >= 1 for peer in world.peers.values()))
    return world


FAR = 10**5
ALL = range(WORKLOAD.layer_count)
CLAIMS = {
    "a step": {"step": FAR},
    "states": {"step": FAR, "held": dict.fromkeys(ALL, FAR), "lineages": {FAR: "made up"}},
    "a cut": {"cuts": (SavedState(FAR, "made up", tuple(ALL)),), "step": FAR},
}


@pytest.mark.parametrize("kind", sorted(CLAIMS))
def test_what_it_claims_to_have_come_to_moves_nobody(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member is lost, and in the attempt that follows one of the others lies. Nobody goes back,
    waits, or takes the liar's states."""

    def lying(**facts: object) -> Contribution:
        part = Contribution(**facts)  # type: ignore[arg-type]
        lies = CLAIMS[kind] if part.member.peer_id == LIAR else {}
        return msgspec.structs.replace(part, **lies)

    world = started(0, "", frozenset({LIAR}))
    others = [world.peers[name] for name in ("a", "c")]
    monkeypatch.setattr(contributing, "Contribution", lying)
    world.crash("d", lose_disk=False)
    step, begun_ns = min(peer.agreement.step for peer in others), world.now_ns
    world.run_until(lambda: all(peer.agreement.step >= step + 6 for peer in others))
    assert world.now_ns - begun_ns <= 30 * SECOND_NS
    assert all(view.snapshot.step <= step + 6 for peer in others for view in peer.views)
    assert not any(view.snapshot.lost_layers for peer in others for view in peer.views)


def test_a_view_that_all_have_left_proves_nothing_of_what_it_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The liar says that it is still in the view before, which all know, and has gone on there
    alone."""
    before: list[PresentView] = []

    def lying(**facts: object) -> Contribution:
        part = Contribution(**facts)  # type: ignore[arg-type]
        if part.member.peer_id != LIAR or part.present is None:
            return part
        before.append(part.present)
        is_later = part.present.view != before[0].view
        lies = {"present": before[0], **CLAIMS["states"]} if is_later else {}
        return msgspec.structs.replace(part, **lies)

    world = started(0, "", frozenset({LIAR}))
    others = [world.peers[name] for name in ("a", "c")]
    monkeypatch.setattr(contributing, "Contribution", lying)
    for lost in (True, False):
        if lost:
            world.crash("d", lose_disk=False)
        else:
            peer = world.peers["a"]
            peer.do(peer.agreement.repeat_step("a lost tensor", peer.now_ns))
        step, begun_ns = min(peer.agreement.step for peer in others), world.now_ns
        world.run_until(lambda at=step: all(it.agreement.step >= at + 6 for it in others))
        assert world.now_ns - begun_ns <= 30 * SECOND_NS
        assert all(view.snapshot.step <= step + 6 for peer in others for view in peer.views)
    assert before[-1].view != before[0].view, "it has lied"
