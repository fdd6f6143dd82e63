"""One stage of our engine in `benchmarks.overhead`; and our engine alone beside a plain loop."""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.overhead_work import (
    Work,
    alone_plan,
    batch_of,
    pipeline_plan,
    processor_s,
    say,
    work_of,
)
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.step.step_frames import FrameTransport, StepFrames
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, Payload
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import update_of
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

VIEW = ViewId(1, "0" * 64)
CONNECT_S = 20.0


class _Stage:
    """An engine with the states of one peer, and the update that follows each of its steps."""

    def __init__(self, plan: Plan, me: str, work: Work, transport: FrameTransport) -> None:
        self.work = work
        self.compute = Compute()
        spec = work.spec
        self.states = {layer: LayerState.genesis(spec, layer) for layer in plan.layers_of(me)}
        self.mailbox = Mailbox(VIEW, plan, me, spec)
        frames = StepFrames(
            VIEW, transport, lambda peer_id, cause: print(f"{peer_id}: {cause}", file=sys.stderr)
        )
        self.engine = StepEngine(
            StagePlace(plan, me, spec),
            self.states,
            StageLinks(self.mailbox, frames),
            StageTools(self.compute, ReplicaMemory(), partial(batch_of, work)),
        )

    async def step(self, number: int) -> float:
        """The loss of the step, here. Gradients are clipped by the norm that this peer knows. In a
        swarm Prepared tells the norm of all, which takes a message."""
        local = await self.engine.run(number, train=True, evaluate=False)
        norm = sum(local.squared_norms.values()) ** 0.5
        await self.compute.run(self._apply, number, norm)
        return local.loss_sum / self.work.spec.tokens_per_step

    def _apply(self, number: int, norm: float) -> None:
        for state in self.states.values():
            state.apply(self.engine.reduced[state.layer], *update_of(self.work.spec, number, norm))


async def _peer(number: int, folder: Path, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    work = work_of(arguments)
    listen, digest = ["/ip4/127.0.0.1/tcp/0"], work.spec.digest()
    host = await Host.start(folder / f"{number}.key", listen)
    stage: _Stage | None = None

    def arrived(sender: str, header: FrameHeader, payload: bytearray) -> None:
        assert stage is not None
        stage.mailbox.put(sender, header, payload)

    lines = DirectLines(host, digest, listen)
    plane = BulkPlane(host, digest, BulkListeners(arrived, _complain), lines=lines)
    await plane.ready()
    say(address=(await host.addresses())[0])
    addresses = json.loads(await asyncio.to_thread(sys.stdin.readline))
    peers = [address.rsplit("/", 1)[1] for address in addresses]
    for peer_id, address in zip(peers, addresses, strict=True):
        if peer_id != host.peer_id:
            await host.connect(peer_id, [address], CONNECT_S)
    stage = _Stage(pipeline_plan(peers, work), host.peer_id, work, plane)
    say(ready=True)
    step = 0
    while await asyncio.to_thread(sys.stdin.readline):
        began_s, computed_s = time.monotonic(), processor_s()
        loss = await stage.step(step)
        elapsed_s = time.monotonic() - began_s
        say(elapsed_s=elapsed_s, processor_s=processor_s() - computed_s, loss=loss)
        step += 1
    stage.compute.close()
    await plane.close()
    await host.close()


class _Nowhere:
    """A transport for one peer alone, which sends nothing."""

    async def send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        raise AssertionError(f"a frame for {peer_id}")


async def alone(rounds: int, work: Work) -> dict[str, list[dict[str, float]]]:
    """Steps of our engine and of a plain loop in turn; the first of each warms up."""
    torch.set_num_threads(1)
    stage = _Stage(alone_plan("me", work), "me", work, _Nowhere())
    plain = ReferenceRun(work.spec, lambda step, index: batch_of(work, step, index))
    plain_losses = plain.losses(rounds + 1)
    found: dict[str, list[dict[str, float]]] = {"ours": [], "plain loop": []}
    for number in range(rounds + 1):
        for kind, rows in found.items():
            began_s, computed_s = time.monotonic(), processor_s()
            if kind == "ours":
                loss = await stage.step(number)
            else:
                loss = next(plain_losses)
            elapsed_s = time.monotonic() - began_s
            row = {"elapsed_s": elapsed_s, "loss": loss, "processor_s": processor_s() - computed_s}
            rows.append(row)
    stage.compute.close()
    return {kind: rows[1:] for kind, rows in found.items()}


def _complain(sender: str, fault: PeerFault) -> None:
    print(f"fault: {fault}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(_peer(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
