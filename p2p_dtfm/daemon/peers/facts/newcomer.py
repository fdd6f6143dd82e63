"""This machine as a plan would know it if it took part, within what its owner allows."""

from collections.abc import Callable
from dataclasses import dataclass

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.resident_limit import within_resident_limit
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.train.stage.measure import measure_device, select_device

MBIT_BYTES = 125_000


@dataclass(frozen=True)
class Newcomer:
    """What a record would say of it."""

    measure: Callable[[RunSpec], Device]
    """Times the layers of a run. Raises `UserError`."""
    uplink_bytes_per_s: int = 0
    """0: no limit."""
    downlink_bytes_per_s: int = 0
    settings: Settings | None = None
    """By which it is measured."""

    def on(self, device: str, threads: int) -> "Newcomer":
        """The same of one of several devices; 0 threads: as many as it has."""
        if self.settings is None:
            return self
        changed = {"device": device, "threads": threads or self.settings.threads}
        return within_limits(self.settings.model_copy(update=changed))


def within_limits(settings: Settings) -> Newcomer:
    """Measured as the daemon measures; nothing is set aside for it."""

    def measure(spec: RunSpec) -> Device:
        limit_bytes = int(settings.memory_gib * (1 << 30)) or None
        device = select_device(settings.device)
        measured = measure_device(spec, device, settings.compute_threads, limit_bytes)
        return within_resident_limit(settings, measured)

    return Newcomer(
        measure,
        int(settings.uplink_mbps * MBIT_BYTES),
        int(settings.downlink_mbps * MBIT_BYTES),
        settings,
    )
