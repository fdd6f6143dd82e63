"""This machine as a plan would know it if it took part, within what its owner allows."""

from collections.abc import Callable
from dataclasses import dataclass

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.resident_limit import within_resident_limit
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.train.stage.measure import measure_device, select_device


@dataclass(frozen=True)
class Newcomer:
    """What this machine's record would say of it."""

    measure: Callable[[RunSpec], Device]
    """Times the layers of a run. Raises `UserError`."""
    uplink_bytes_per_s: int = 0
    """0: no limit."""
    downlink_bytes_per_s: int = 0


def within_limits(settings: Settings, device: str, threads: int) -> Newcomer:
    """This machine with one of its devices, measured as the daemon measures. Nothing is set aside
    for it."""

    def measure(spec: RunSpec) -> Device:
        limit_bytes = settings.memory_limit_bytes
        measured = measure_device(spec, select_device(device), threads or None, limit_bytes)
        return within_resident_limit(settings, measured)

    return Newcomer(measure, settings.uplink_bytes_per_s, settings.downlink_bytes_per_s)
