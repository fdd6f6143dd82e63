"""In a complete run all steps are committed, nobody is let in any more, and the members left show
the end."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.phase import Phase
from p2p_dtfm.core.consensus.present import LostLayers
from p2p_dtfm.core.consensus.views.view_precedence import proven_step, shows_end
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import TERMS, verify
from tests.core.builders import record
from tests.core.liars import EVIL, say, self_made_view, standing

COST = LayerCost(1, 1, 1, 1)
LAST_STEP = 5


class Ends(SimulatedPeer):
    """A peer that takes no steps after the last one."""

    def in_training(self) -> tuple[View | None, Plan | None]:
        if self.agreement.step > LAST_STEP:
            return None, None
        return super().in_training()


def by_the_first_alone(snapshot: Snapshot) -> Plan | NoPlan:
    """A plan in which the others guard the first one's layers, and have each step's states with
    it."""
    first, *others = sorted(member.peer_id for member in snapshot.members)
    layers, count = snapshot.workload.layer_count, snapshot.workload.microbatch_count
    stage = Stage(first, 0, layers, 1)
    return Plan((Pipeline((stage,), 0, count),), tuple(others), 60 * SECOND_NS)


def test_the_last_one_left_of_a_complete_run_shows_that_it_is() -> None:
    """The member that is left computed nothing, so no word of its own says that the last step is
    committed."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    world = AgreementWorld(1, workload, record("template"), by_the_first_alone, timing=TIMING)
    world.peer_type = Ends
    first, other, late = (world.add_peer(name) for name in ("p0", "p1", "p2"))
    other.agreement.wants_view()
    world.ask_to_join("p1", "p0")
    world.after(SECOND_NS, lambda: world.found("p0"))
    world.run_until(lambda: first.view is not None and len(first.view.members) == 2)
    for peer in (first, other):  # the ledger has its terms from before: all steps are alike
        peer.agreement._state.settings.terms = msgspec.structs.replace(TERMS, total_steps=LAST_STEP)
    for peer in (first, other):
        world.run_until(lambda peer=peer: peer.agreement.step > LAST_STEP)  # type: ignore[misc]
    view = first.view
    world.ask_to_join("p2", "p0")
    world.run_to(world.now_ns + 10 * SECOND_NS)
    assert first.view is view, "no view is agreed on that no step could take over"
    assert late.agreement.next_view is None and not late.agreement.attempting
    world.crash("p0", lose_disk=False)
    world.run_until(lambda: other.view is not None and len(other.view.members) == 1)
    assert other.agreement.step > LAST_STEP, "nothing is lost"
    standing, proof = other.agreement.standing, other.agreement.proof_of_end
    assert standing is not None
    assert proven_step(standing, verify) <= LAST_STEP, "else this shows nothing"
    assert proof is not None and proven_step(proof, verify) > LAST_STEP
    assert proof.sender == other.agreement.me
    assert other.agreement.step_to_come == other.agreement.step
    other.agreement._state.present.lost = LostLayers(world.now_ns, frozenset())
    assert other.agreement.proof_of_end is None, "who comes may have what is lost (seed 800018)"
    assert other.agreement.step_to_come == LAST_STEP, "it is not turned away"


def test_a_view_that_is_agreed_on_after_the_last_step_is_waited_for_by_nobody() -> None:
    """A peer asks while the last step is under way, and has no states yet when that step commits.
    No step is left with which it could join."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    world = AgreementWorld(1, workload, record("template"), by_the_first_alone, timing=TIMING)
    world.peer_type, world.compute_ns = Ends, (SECOND_NS, 2 * SECOND_NS)
    first, other, late = (world.add_peer(name) for name in ("p0", "p1", "p2"))
    other.agreement.wants_view()
    world.ask_to_join("p1", "p0")
    world.after(SECOND_NS, lambda: world.found("p0"))
    world.run_until(lambda: first.view is not None and len(first.view.members) == 2)
    for peer in (first, other):
        peer.agreement._state.settings.terms = msgspec.structs.replace(TERMS, total_steps=LAST_STEP)
    view = first.view
    world.run_until(lambda: first.agreement.step == LAST_STEP)
    late.agreement.synced = lambda view: []  # type: ignore[method-assign]
    world.ask_to_join("p2", "p0")
    world.run_until(lambda: late.agreement.attempting)
    assert first.agreement.step == LAST_STEP, "the last one is under way"
    world.run_until(lambda: first.agreement.step > LAST_STEP)
    assert first.view is view, "else this shows nothing"
    world.run_to(world.now_ns + 20 * SECOND_NS)
    for peer in (first, other):
        assert peer.agreement.next_view is None and not peer.agreement.attempting, peer.name
    assert first.view is view and late.view is None
    (said,) = {it for it in (first.agreement.standing,) if it is not None}
    assert proven_step(said, verify) > LAST_STEP, "whoever asks is shown the end"


@pytest.mark.parametrize("wide_above", [64, 1])
def test_who_has_said_ready_as_the_last_step_commits_hears_that_it_did(wide_above: int) -> None:
    """The members have given up the attempt, and tell the peer that still is in it. Its own
    deadline is as long as any plan may take."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    timing = replace(TIMING, ready_ns=120 * SECOND_NS, wide_above=wide_above)
    world = AgreementWorld(1, workload, record("template"), by_the_first_alone, timing=timing)
    world.peer_type = Ends
    first, other, late = (world.add_peer(name) for name in ("p0", "p1", "p2"))
    other.agreement.wants_view()
    world.ask_to_join("p1", "p0")
    world.after(SECOND_NS, lambda: world.found("p0"))
    world.run_until(lambda: first.view is not None and other.view is not None)
    for peer in (first, other, late):
        peer.agreement._state.settings.terms = msgspec.structs.replace(TERMS, total_steps=LAST_STEP)
    world.run_until(lambda: first.agreement.step == LAST_STEP)
    for peer in (first, other):  # their machines are slow: the step commits before they have a plan
        peer.agreement.plan_computed = lambda *_: []  # type: ignore[method-assign]
    world.compute_ns = (3 * SECOND_NS, 4 * SECOND_NS)
    world.ask_to_join("p2", "p0")
    world.run_until(lambda: late.agreement.outlook(late.now_ns).phase is Phase.NEWCOMER_READY)
    assert first.agreement.step == LAST_STEP, "the last one is under way"
    elsewhere = tuple(sorted((EVIL, first.agreement.me)))
    false = standing(self_made_view(elsewhere, 1, elsewhere), LAST_STEP + 2)
    assert shows_end(false, LAST_STEP, verify), "else this shows nothing"
    say(world, EVIL.peer_id, "p2", false)
    assert late.agreement.attempting, "it takes nobody's word that gathers with others"
    view = first.view
    assert view is not None and view.certificate is not None and len(view.members) == 2
    own = standing(view.certificate, LAST_STEP + 2, first.agreement.me)
    assert shows_end(own, LAST_STEP, verify), "else this shows nothing"
    for _ in range(3):
        say(world, "p0", "p2", own)
    assert late.agreement.attempting, "nor that of one alone, who needs nobody else to show it"
    for peer in (first, other):
        world.run_until(lambda peer=peer: peer.agreement.step > LAST_STEP)  # type: ignore[misc]
        assert not peer.agreement.attempting, "else this shows nothing"
    world.run_until(lambda: not late.agreement.attempting, limit_s=5)
    world.run_to(world.now_ns + 10 * SECOND_NS)
    assert late.view is None and not late.agreement.attempting, "nor does it begin another"


def test_who_has_come_to_the_end_goes_back_for_nobody() -> None:
    """A smaller part of a split swarm trains to the end. The larger part counts more, but has
    nothing to give to a peer that has it all. The smaller part went over to it, and steps were
    trained anew."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    world = AgreementWorld(1, workload, record("template"), by_the_first_alone, timing=TIMING)
    world.peer_type, world.rejoins = Ends, True
    first, *others = (world.add_peer(name) for name in ("p0", "p1", "p2"))
    for peer in others:
        peer.agreement.wants_view()
        world.ask_to_join(peer.name, "p0")
    world.after(SECOND_NS, lambda: world.found("p0"))
    world.run_until(lambda: first.view is not None and len(first.view.members) == 3)
    ways = {way for it in ("p1", "p2") for way in (("p0", it), (it, "p0"))}
    heal = world.cut(ways, "p0 is alone")
    world.run_until(lambda: first.view is not None and len(first.view.members) == 1)
    first.agreement._state.settings.terms = msgspec.structs.replace(TERMS, total_steps=LAST_STEP)
    world.run_until(lambda: first.agreement.step > LAST_STEP, limit_s=60)
    world.run_until(lambda: all(it.view is not None and len(it.view.members) == 2 for it in others))
    alone = first.view
    assert alone is not None and alone.member_ids == ("p0",)
    heal()
    world.run_to(world.now_ns + 20 * SECOND_NS)
    assert first.view is alone and first.agreement.step > LAST_STEP
