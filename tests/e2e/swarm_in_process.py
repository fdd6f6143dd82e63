"""Several step engines in one process, over real libp2p on loopback, without the daemon."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory
from tests.e2e.helpers import DEADLINE_S

VIEW = ViewId(1, "0" * 64)
LISTEN = ["/ip4/127.0.0.1/tcp/0"]


@dataclass
class EnginePeer:
    host: Host
    bulk: BulkPlane
    compute: Compute
    faults: list[PeerFault]
    engine: StepEngine | None = None
    memory: ReplicaMemory = field(default_factory=ReplicaMemory)

    def links(self, mailbox: Mailbox) -> StageLinks:
        def trouble(peer_id: str, cause: str) -> None:
            self.faults.append(PeerFault(cause, peer_id))

        return StageLinks(mailbox, StepFrames(mailbox.view, self.bulk, trouble))

    def on_frame(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        assert self.engine is not None
        view = self.engine.view
        if (header.view_number, header.view_digest) == (view.number, view.snapshot):
            self.engine.mailbox.put(sender, header, payload)
        elif header.view_number > view.number:
            raise PeerFault("a tensor of another view", sender)


@contextlib.asynccontextmanager
async def engine_peers(
    count: int, directory: Path, spec: RunSpec, direct: bool = False
) -> AsyncIterator[list[EnginePeer]]:
    """Connected peers, sorted by peer id; their lanes take direct lines, or libp2p only."""
    peers: list[EnginePeer] = []
    first: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        for number in range(count):
            host = await Host.start(directory / f"{number}.key", LISTEN, initial_peers=first[:1])
            stack.push_async_callback(host.close)
            for address in first:
                peer_id = address.rsplit("/", 1)[1]
                await host.connect(peer_id, [address], 10)
            first.append((await host.addresses())[0])
            faults: list[PeerFault] = []
            compute = Compute()
            stack.callback(compute.close)
            peer = EnginePeer(host, None, compute, faults)  # type: ignore[arg-type]
            bulk = BulkPlane(
                host,
                spec.digest(),
                BulkListeners(
                    peer.on_frame, lambda sender, fault, faults=faults: faults.append(fault)
                ),
                lines=DirectLines(host, spec.digest(), LISTEN) if direct else None,
            )
            peer.bulk = await bulk.ready()
            stack.push_async_callback(bulk.close)
            peers.append(peer)
        yield sorted(peers, key=lambda peer: peer.host.peer_id)


def prepare_engines(
    peers: list[EnginePeer], plan: Plan, spec: RunSpec, batch, recompute=False
) -> None:
    for peer in peers:
        me = peer.host.peer_id
        states = {layer: LayerState.genesis(spec, layer) for layer in plan.layers_of(me)}
        peer.engine = StepEngine(
            StagePlace(plan, me, spec, recompute),
            states,
            peer.links(Mailbox(VIEW, plan, me, spec)),
            StageTools(peer.compute, peer.memory, batch),
        )


async def run_all(peers: list[EnginePeer], step: int, *, evaluate: bool = False):
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(
            *(peer.engine.run(step, train=True, evaluate=evaluate) for peer in peers if peer.engine)
        )
