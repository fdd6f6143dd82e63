"""What can be found wrong with a start before anything is started: addresses, run spec, data."""

from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import expanded
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net.contacts.addresses import (
    check_announced_address,
    check_listen_address,
    parse_address,
)
from p2p_dtfm.ports.granted import granted_memory
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.train.codecs import require_directions
from p2p_dtfm.train.data import DIGITS, STANDARD_LIBRARY, open_prepared
from p2p_dtfm.train.model.kinds.registry import with_sizes
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s
from p2p_dtfm.train.stage.measure import select_device
from p2p_dtfm.train.stage.room_to_train import require_room


def check_before_start(settings: Settings, without_data: tuple[str, ...] = ()) -> None:
    """Raises `UserError` for the first thing that cannot be right. `without_data`: other ways to
    start, shown where the run spec's data are missing."""
    for address in settings.listen:
        check_listen_address(address)
    for address in settings.announce:
        check_announced_address(address)
    for address in settings.initial_peers:
        parse_address(address)
    if settings.run:
        path = find_run_spec(settings.run)
        spec = with_sizes(read_run_spec(path))
        require_directions(spec)
        if has_own_data(spec):
            try:
                open_prepared(data_directory(spec, path))
            except UserError as error:
                fixes = (*without_data, *error.fixes)
                raise UserError(error.cause, fixes, error.exit_code) from error
        device = select_device(settings.device)
        if device.type == "cpu" and emulated_flops_per_s(settings.device) is None:
            require_room(spec, granted_memory().free_bytes)


def has_own_data(spec: RunSpec) -> bool:
    """Whether a run's data are in a directory of its own, and do not come along with the
    program."""
    return spec.data.source not in (STANDARD_LIBRARY, DIGITS)


def data_directory(spec: RunSpec, path: Path) -> Path:
    """The directory of a run spec's own data. A relative path starts at the run spec."""
    source = expanded(Path(spec.data.source))
    return source if source.is_absolute() else path.parent / source


def source_from_anywhere(spec: RunSpec, path: Path) -> str:
    """The data source, in words that hold if the run spec lies in another place than `path`."""
    return str(data_directory(spec, path).absolute()) if has_own_data(spec) else spec.data.source
