"""Run specs as the daemon is given them: a file, or the name of a packaged one."""

from pathlib import Path

from p2p_dtfm.core.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.files import packaged_configs, read_values


def read_run_spec(path: Path) -> RunSpec:
    """Read a run spec from a TOML (or JSON) file. Raises `UserError` naming line or key."""
    return parse_run_spec(read_values(path), str(path))


def resolve_run_spec(name: str) -> Path:
    """A path as given, or the packaged run spec of that name."""
    path = Path(name)
    packaged = packaged_configs() / f"{name}.toml"
    return packaged if not path.exists() and packaged.is_file() else path
