"""The program with an engine that stops at a step and says nothing of it. `STALLS_AT`: the step,
and whether it says that it waits for others, as in `12,waits`."""

import asyncio
import os
from typing import Any

from p2p_dtfm.cli import main
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.daemon.step import step_engine
from p2p_dtfm.daemon.trainer import step_watch

STEP, _, MANNER = os.environ.get("STALLS_AT", "").partition(",")


class _Stalling(step_engine.StepEngine):
    async def run(self, step: int, **how: Any) -> step_engine.LocalResult:
        if STEP and step >= int(STEP):
            await asyncio.get_running_loop().create_future()
        return await super().run(step, **how)


class _Lying(step_watch.StepWatch):
    """A watch that says it waits for the others, and accuses nobody."""

    def tick(self, *given: Any) -> list[Any]:
        return [] if STEP else super().tick(*given)

    def work(self, agreement: Any) -> Work | None:
        work = super().work(agreement)
        if work is None or not STEP or work.step < int(STEP) or MANNER != "waits":
            return work
        others = [peer for peer in agreement.view.member_ids if peer != agreement.me.peer_id]
        lacks = tuple(Lack(peer, Kind.PREPARED) for peer in others)
        return Work(work.view, work.step, False, lacks)


def _install() -> None:
    from p2p_dtfm.core.protocol.records import Device, LayerTiming
    from p2p_dtfm.daemon.machine import world
    from p2p_dtfm.testbed.lies.daemon import be_equal_and_near

    be_equal_and_near()
    layer = LayerTiming(1_000_000, 2_000_000)  # a waiting peer is patient for some planned steps
    device = Device("cpu", "equal", 4 << 30, layer, layer, layer)
    world.Machine.measure_device = lambda *given: device  # type: ignore[assignment]
    from p2p_dtfm.daemon.node.participation import participant
    from p2p_dtfm.daemon.trainer import step_loop

    step_loop.StepEngine = _Stalling  # type: ignore[misc]
    participant.StepWatch = _Lying  # type: ignore[misc]


if __name__ == "__main__":
    _install()
    main()
