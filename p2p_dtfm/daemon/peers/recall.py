"""What a daemon is to do, by what it was told and what its home remembers. This is known before
torch and libp2p are loaded, so that a user that typed nothing is answered at once."""

import contextlib
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.privacy_spec import PrivacySpec
from p2p_dtfm.daemon.machine.home import home_option, place_of_run
from p2p_dtfm.daemon.machine.life import code_of_what_may_pass
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers.home_memory import Memory, remembered_runs
from p2p_dtfm.net.contacts.addresses import peer_ids_of
from p2p_dtfm.sim.scenario.files import read_run_spec


class Past(NamedTuple):
    """The runs that a home remembers, newest first, and the one that the daemon comes back to."""

    runs: list[Memory]
    recalled: Memory | None

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """Addresses of the members met in the run to come back to; None where there is no such
        run."""
        return None if self.recalled is None else self.recalled.addresses()

    def without_data(self, settings: Settings) -> tuple[str, ...]:
        """What to type where the data of a run spec have been moved. The home that founded the run
        has its own copy."""
        from p2p_dtfm.train.data import BLOBS_NAME  # it takes a while, and is seldom needed

        home, memory = settings.home, self.recalled
        if memory is None or not settings.run:
            return ()
        if not (place_of_run(home, memory.run_digest) / BLOBS_NAME).is_dir():
            return ()
        digest = memory.run_digest[:16]
        line = f"p2p-dtfm{home_option(home)} --run-digest {digest}"
        return (f"{line} goes on with run {digest}, whose data are in this home",)


def recall(settings: Settings) -> Past:
    """The runs of this home, and the one to come back to. Raises `UserError` if nothing says what
    to do."""
    if settings.new and not settings.run:
        raise UserError(
            "--new founds afresh, and no run spec says what",
            "name one: p2p-dtfm --new --run FILE",
        )
    given = peer_ids_of(settings.initial_peers)  # wrong addresses are told before all else
    home = settings.home.expanduser().absolute()
    if home.is_file():
        raise UserError(
            f"{home} is a file, and no home of a daemon",
            "name a directory, which need not be there yet: --home DIR",
        )
    named = _as_written(read_run_spec(settings.run)) if settings.run else None
    _require_readable(home)
    past = remembered_runs(home)
    wanted = (item for item in past if item.run_digest.startswith(settings.run_digest))
    if named is not None:
        wanted = (item for item in wanted if _as_written(item.spec) == named)
    elif given and not settings.run_digest:  # their run is meant, whichever this home was in last
        wanted = (item for item in wanted if item.has_met(given))
    recalled = None if settings.new else next(wanted, None)
    if recalled is None and not settings.run and not settings.initial_peers:
        raise nothing_to_take_up(home, settings.run_digest)
    return Past(past, recalled)


def _require_readable(home: Path) -> None:
    """A home of another user remembers its runs as well, though nobody else may see them: it was
    made with sudo, say. Raises `UserError`."""
    for folder in (home, home / "runs"):
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.scandir(folder).close()
        except OSError as error:
            raise UserError(
                f"cannot use {folder}: {error.strerror}",
                (f"see whose it is: ls -ld {shlex.quote(str(folder))}", "choose another --home"),
                code_of_what_may_pass(),
            ) from error


def _as_written(spec: RunSpec) -> RunSpec:
    """The spec without what a founder adds to its file. Runs that still differ then are not meant,
    whatever their data come to."""
    founded = {"data": DataSpec(), "layers": (), "privacy": PrivacySpec()}
    return spec.unmarked.model_copy(update=founded)


def nothing_to_take_up(home: Path, run_digest: str) -> UserError:
    """The error of a daemon without an argument, in a home without a past."""
    here, code = home_option(home), code_of_what_may_pass()
    fixes = (
        f"join a swarm: p2p-dtfm{here} --invite LINE, or --initial-peers ADDRESS",
        f"found one: p2p-dtfm{here} --run tiny, or a run spec of your own",
        "see one train on this machine: p2p-dtfm demo",
        "look at this machine and its network: p2p-dtfm doctor",
    )
    if run_digest:
        return UserError(f"{home} does not remember run {run_digest[:16]}", fixes, code)
    return UserError(
        f"nothing says what to do, and {home} remembers no run to take up", fixes, code
    )
