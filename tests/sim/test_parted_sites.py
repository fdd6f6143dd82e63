"""Each of two sites holds one half of the model, and the line between them is cut. Neither goes on
alone, and no machine is lost: what was committed is there once they meet again."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.builders import WORKLOAD, record
from tests.core.liars import are_together
from tests.sim.sim_support import found_together

HERE, THERE = ("a", "b"), ("c", "d")
NAMES = [*HERE, *THERE]
STEP = 5
"""The last step that those here have heard of; those there have not."""


def halves(snapshot: Snapshot) -> Plan:
    """Two pipelines, each from one site to the other: all layers have two holders, and no
    guardian."""
    layers, microbatches = snapshot.workload.layer_count, snapshot.workload.microbatch_count
    middle, half = layers // 2, microbatches // 2
    first, second = (
        (Stage(here, 0, middle, 1), Stage(there, middle, layers, 1))
        for here, there in zip(HERE, THERE, strict=True)
    )
    pipelines = (Pipeline(first, 0, half), Pipeline(second, half, microbatches - half))
    return Plan(pipelines, (), 100 * SECOND_NS)


class CutBeforeTheLastWord(SimulatedPeer):
    """The line is cut while those here, which end each step later, still compute."""

    def send(self, receiver: str, message: object) -> None:  # type: ignore[override]
        if isinstance(message, SignedPrepared) and self.name in HERE and receiver in THERE:
            is_late = decode(message.signed.payload, Prepared).step >= STEP
            if is_late and self.agreement.view is self.views[0]:
                return
        super().send(receiver, message)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", (0, 3))
def test_no_step_is_lost(seed: int) -> None:
    """Those there had the gradients of the last step, and nobody asked them: all went back to the
    newest checkpoint."""
    world = AgreementWorld(seed, WORKLOAD, record("template"), halves, timing=TIMING)
    world.peer_type, world.rejoins = CutBeforeTheLastWord, True
    found_together(world, NAMES)
    world.run_until(lambda: all(world.peers[name].agreement.step > STEP for name in HERE))
    assert all(world.peers[name].agreement.step == STEP for name in THERE)
    pairs = {(here, there) for here in HERE for there in THERE}
    heal = world.cut(pairs | {(there, here) for here, there in pairs}, "sites")
    peers = world.peers.values()
    world.run_until(lambda: all(it.view and it.view.snapshot.lost_layers for it in peers))
    heal()

    def goes_on() -> bool:
        return are_together(world, NAMES) and all(it.agreement.step >= STEP + 3 for it in peers)

    world.run_until(goes_on)
    assert all(it.views[-1].snapshot.step == STEP + 1 for it in peers)
