"""A member that computes nothing, whatever it says of its work, holds up the others only for
seconds."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_microbatches import SimulatedMicrobatches
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import SimulatedProcess
from p2p_dtfm.sim.faults.simulated_waits import PATIENCE, SimulatedWaits
from tests.core.builders import WORKLOAD, record

MEMBERS = ["a", "b", "c", "d"]
LIAR = "c"
STEPS_TOGETHER = 3
HOLD_UP_S = PATIENCE.stuck_ns // SECOND_NS + 5
"""Some of these seconds are for heartbeats, and some for all members to agree."""
MANNERS = {
    "nothing": (),
    "waits for those after it": (Lack("a", Kind.PREPARED), Lack("d", Kind.PREPARED)),
    "waits for a part": (Lack("d", Kind.PART),),
    "waits for a stranger": (Lack("x", Kind.ACTIVATION),),
}


class ComputesNothing(SimulatedMicrobatches):
    def _next_burst(self) -> None:
        if not is_at_fault(self.peer):
            super()._next_burst()


class BlamesOthers(SimulatedWaits):
    def work(self) -> Work | None:
        work = super().work()
        if work is None or not is_at_fault(self.peer):
            return work
        return Work(work.view, work.step, False, type(self.peer).says)  # type: ignore[attr-defined]

    def judge(self, watched: set[str]) -> None:
        if not is_at_fault(self.peer):
            super().judge(watched)


class Stalling(SimulatedPeer):
    """A member that stalls and accuses nobody."""

    microbatches_type = ComputesNothing
    waits_type = BlamesOthers
    says: tuple[Lack, ...] = ()
    first_step = 1 << 62


def is_at_fault(peer: SimulatedProcess) -> bool:
    assert isinstance(peer, Stalling)
    return peer.name == LIAR and peer.agreement.step >= peer.first_step


def pipeline(snapshot: Snapshot) -> Plan:
    """All members in a row."""
    names = [member.peer_id for member in snapshot.members]
    layers, count = snapshot.workload.layer_count, snapshot.workload.microbatch_count
    cuts = [layers * number // len(names) for number in range(len(names) + 1)]
    stages = tuple(Stage(name, cuts[n], cuts[n + 1], 4) for n, name in enumerate(names))
    return Plan((Pipeline(stages, 0, count),), (), 1)


def replicas(snapshot: Snapshot) -> Plan:
    """A plan in which each member has all layers; the last ones may have no microbatch left."""
    names = [member.peer_id for member in snapshot.members]
    count = snapshot.workload.microbatch_count
    used = names[:count]
    cuts = [count * number // len(used) for number in range(len(used) + 1)]
    layers = snapshot.workload.layer_count
    pipelines = tuple(
        Pipeline((Stage(name, 0, layers, 1),), cuts[n], cuts[n + 1] - cuts[n])
        for n, name in enumerate(used)
    )
    return Plan(pipelines, tuple(names[count:]), 1)


@pytest.mark.parametrize("planner", [pipeline, replicas])
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_others_go_on_without_it(planner: object, manner: str, seed: int) -> None:
    is_only_denied = planner is replicas and manner == "waits for a part"
    world, honest, held_up_s = stalled(planner, MANNERS[manner], seed, is_only_denied)
    for peer in honest:
        assert peer.view is None or LIAR not in peer.view.member_ids, world.story[-20:]
    if is_only_denied:  # by the accused: it may have accused first
        assert held_up_s < 3 * HOLD_UP_S, world.story[-20:]
        return
    assert held_up_s < HOLD_UP_S, world.story[-20:]
    for peer in honest:
        assert peer.view is not None
        assert len(peer.view.member_ids) == len(honest), world.story[-20:]


def stalled(
    planner: object, says: tuple[Lack, ...], seed: int, is_only_denied: bool
) -> tuple[AgreementWorld, list[SimulatedPeer], float]:
    """The world when the others have gone on, and how long that took."""

    class Liar(Stalling):
        pass

    world = AgreementWorld(seed, WORKLOAD, record("template"), planner, timing=TIMING)
    world.peer_type = Liar
    for name in MEMBERS:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    honest = [world.peers[name] for name in MEMBERS if name != LIAR]
    everyone = sorted(MEMBERS)
    world.run_until(lambda: all(p.view and [*p.view.member_ids] == everyone for p in honest))
    first_step = max(peer.agreement.step for peer in honest) + STEPS_TOGETHER
    Liar.says, Liar.first_step = says, first_step
    world.run_until(lambda: all(peer.agreement.step >= first_step for peer in honest))
    stalled_ns = world.now_ns
    enough = len(honest) - is_only_denied
    world.run_until(lambda: sum(is_past(peer, first_step) for peer in honest) >= enough)
    return world, honest, (world.now_ns - stalled_ns) / SECOND_NS


def is_past(peer: SimulatedPeer, step: int) -> bool:
    """Whether the swarm commits again: beyond the step held up, or in a view that goes back to a
    cut."""
    view = peer.view
    if view is None:
        return False
    first = step if view.snapshot.planned else min(step, view.snapshot.step)
    return peer.agreement.step > first
