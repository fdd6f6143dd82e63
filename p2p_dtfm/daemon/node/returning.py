"""How a daemon comes back after a pause: with what."""

from typing import Any

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.settings import Settings


def to_come_back(settings: Settings, met: tuple[str, ...], run_digest: str) -> Settings:
    """To the run that it was in, which it finds by what its home remembers, or as a newcomer to
    those who were met; a founder's file may be another one by then."""
    if not run_digest or not (settings.run or met or not settings.initial_peers):
        return settings
    changes: dict[str, Any] = {"new": False, "run_digest": run_digest}
    if settings.run:
        changes["run"] = "" if _is_remembered(settings, run_digest) else settings.run
    elif settings.initial_peers:
        changes["initial_peers"] = tuple(dict.fromkeys((*settings.initial_peers, *met)))
    return settings.model_copy(update=changes)


def _is_remembered(settings: Settings, run_digest: str) -> bool:
    from p2p_dtfm.daemon.peers.home_memory import read_memory  # loaded by whoever took part

    return read_memory(Home(settings.home).run_directory(run_digest)) is not None
