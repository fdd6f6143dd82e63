"""What this peer can do in a run, and its links to the peers that it knows: its first record."""

import asyncio
import logging
from collections.abc import Callable

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.resident_limit import within_resident_limit
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.reachability import own_addresses
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.train.stage.measure import (
    LIBRARIES_BYTES,
    TorchDevice,
    cap_device_memory,
    select_device,
)
from p2p_dtfm.train.stage.replay.arithmetic import threads_believed

log = logging.getLogger("p2p_dtfm")


def _threads(settings: Settings, spec: RunSpec) -> int:
    """Threads to compute with. In a run with audits, no more than other members believe."""
    wanted = settings.compute_threads
    if not spec.audit.rate or threads_believed(wanted) == wanted:
        return wanted
    log.warning(
        "computes with %d threads, not %d: members audit each other in this run, and believe "
        "nobody more than four for each core (set --threads lower to be rid of this)",
        threads_believed(wanted),
        wanted,
    )
    return threads_believed(wanted)


async def measure(local: Local, network: Network, run: Run) -> SelfRecord:
    """Measure this device and the links to known peers. Returns the record, not yet signed."""
    settings, host = local.settings, network.host
    local.status.say(State.MEASURING, "times the layers on this device")
    device = select_device(settings.device)
    limit = _memory_limit_bytes(settings, device)
    measured = await local.compute.run(
        local.world.measure_device,
        run.spec,
        settings.device,
        _threads(settings, run.spec),
        limit,
        _progress_of_measuring(local),
    )
    measured = within_resident_limit(settings, measured)
    local.compute.device = device
    local.compute.stage_runner = local.world.stage_runner(measured, settings.device)
    own = await own_addresses(host)
    record = SelfRecord(network.me, run.digest, measured, own, network.probes)
    record.state_name(settings.name)
    record.state_swarm({network.me.peer_id, *network.others()})
    record.state_reachability(own, network.reachability.finding.reachability)
    if (shaper := host.shaper) is not None:
        record.state_line(shaper.uplink_bytes_per_s, shaper.downlink_bytes_per_s)
    await record.probe_all(
        network.others(),
        network.messenger,
        lambda done, total: local.status.advance(
            State.MEASURING, "measures the links to the other peers", done, total
        ),
    )
    return record


def _memory_limit_bytes(settings: Settings, device: TorchDevice) -> int | None:
    """The limit for the plan. On an accelerator it also caps what torch takes there, with room for
    its libraries: an H200 was seen to need 0.2 GB for them."""
    limit_bytes = settings.memory_limit_bytes
    if limit_bytes is not None:
        cap_device_memory(device, limit_bytes + LIBRARIES_BYTES)
    return limit_bytes


def _progress_of_measuring(local: Local) -> Callable[[int, int], None]:
    loop = asyncio.get_running_loop()
    advance = local.status.advance

    def tell(done: int, total: int) -> None:
        what = "times the layers on this device"
        loop.call_soon_threadsafe(advance, State.MEASURING, what, done, total)

    return tell
