"""The program, run as `python -m p2p_dtfm.testbed.lies.daemon`: if its environment says so it lies.

All of them say that they are equal and near, so that plans give each all layers: where nobody else
has a layer nobody can compute its work again.
"""

import os
import runpy
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link
from p2p_dtfm.daemon.machine import world
from p2p_dtfm.daemon.peers import self_record
from p2p_dtfm.daemon.step.microbatches import Microbatches
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.testbed.lies.kinds import GRADIENT_LIES, LIE_VARIABLE, Lie

MEMORY_BYTES = 4 << 30
NEAR = Link(50_000, 4 << 30)
WRONG = bytes(32)


def be_equal_and_near() -> None:
    block, end = LayerTiming(20_000_000, 40_000_000), LayerTiming(500_000, 1_000_000)

    def device(*arguments: object, **more: object) -> Device:
        return Device("cpu", "equal", MEMORY_BYTES, end, block, end)

    take = self_record.SelfRecord.make

    def make(self: Any, *arguments: Any) -> Any:
        self._links = dict.fromkeys(self._links, NEAR)
        return take(self, *arguments)

    world.Machine.measure_device = device  # type: ignore[method-assign]
    self_record.SelfRecord.make = make  # type: ignore[assignment,method-assign]


def lie_in_gradients(lie: Lie) -> None:
    honest, change = Microbatches.train, GRADIENT_LIES[lie.kind]
    kept: dict[int, Any] = {}

    async def train(self: Any, step: int, replay: Any, on_final: Any = None) -> None:
        def final(layer: int) -> None:
            if step >= lie.from_step:
                gradient = self._runner.layer_states[layer].gradient_vector()
                change(gradient, lie, kept.setdefault(layer, gradient.clone().zero_()))
                kept[layer].copy_(gradient)
            on_final(layer)

        await honest(self, step, replay, final)

    Microbatches.train = train  # type: ignore[method-assign]


def find_what_suits(lie: Lie) -> None:
    """Of a fellow's work what it claims; of others', where that is the lie, something else."""
    honest = Judge.work_of

    async def work_of(
        self: Any,
        peer_id: str,
        microbatches: Any,
        batch: Any,
        step: int,
        claims: Any,
        *rest: Any,
        **more: Any,
    ) -> bytes:
        if step >= lie.from_step and peer_id in lie.fellows:
            work: bytes = claims[peer_id].work
            return work
        found = await honest(self, peer_id, microbatches, batch, step, claims, *rest, **more)
        return WRONG if step >= lie.from_step and lie.kind == "accuse" else found

    Judge.work_of = work_of  # type: ignore[method-assign]


def main() -> None:
    be_equal_and_near()
    if told := os.environ.get(LIE_VARIABLE):
        lie = msgspec.json.decode(told, type=Lie)
        if lie.kind in GRADIENT_LIES:
            lie_in_gradients(lie)
        find_what_suits(lie)
    runpy.run_module("p2p_dtfm", run_name="__main__")


if __name__ == "__main__":
    main()
