"""Where a daemon keeps what outlives it: identity, runs, and the lock that keeps it alone."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.records import LIFE_LIMIT
from p2p_dtfm.daemon.machine.life import code_of_what_may_pass
from p2p_dtfm.daemon.machine.locks import (
    hold_identity,
    let_go_of_identity,
    temporary_folder,
)
from p2p_dtfm.ports import disk, now

log = logging.getLogger("p2p_dtfm")

PRIVATE_UMASK = 0o077
USUAL_HOME = Path("~/.local/share/p2p-dtfm")
DEVICES = "devices"
"""Folder of the homes of this machine's other daemons, one for each device but the first."""
BESIDE_FILE = "beside.json"
"""File with the ids of all peers of this machine that were begun together, while they run."""
KEPT_FILES = (
    "identity.key",
    "life.json",
    "daemon.lock",
    "dashboard.token",
    "dashboard.html",
    BESIDE_FILE,
    "stdout",
    "stderr",
)
RUN_NAME = "[0-9a-f]" * 16
"""The name of a run's directory, as a pattern."""
KEPT_DIRECTORIES = ("runs", "prepared", DEVICES)
_SOCKET_PATH_LIMIT = 100
"""A unix socket's path may have 107 bytes. A little is kept in reserve."""


def default_home() -> Path:
    """The home that is used where none is named. Raises `UserError` where the system knows no
    directory of this user's."""
    base = os.environ.get("XDG_DATA_HOME") or str(expanded(USUAL_HOME.parent))
    return Path(base) / "p2p-dtfm"


def expanded(path: Path) -> Path:
    """The path with `~` as the user's own directory, also where no shell has read it. Raises
    `UserError`."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        first = path.parts[0]
        if first == "~":
            raise UserError(
                "the system knows no directory of this user's",
                ("name one for the daemon: --home DIR", "or set the environment variable HOME"),
            ) from error
        raise UserError(
            f"cannot use {path}: there is no user {first[1:]!r} here, whose directory {first} is",
            f"in a directory of your own it is ~/{path.as_posix()[1:]}",
        ) from error


def is_full(error: OSError) -> bool:
    """Whether the disk is full, or the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def fault_of_home(error: OSError, home: Path) -> str:
    """What is wrong with a file of a home, if that raised `error`: a directory in its place, a disk
    that may only be read. Empty if it is something else."""
    kinds = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
    name = error.filename2 or error.filename
    if error.errno not in kinds or not isinstance(name, str):
        return ""
    path = Path(name)
    is_in_home = path.is_absolute() and path.is_relative_to(home.expanduser().absolute())
    return f"cannot use {name}: {error.strerror}" if is_in_home else ""


def fault_of_disk(error: OSError, home: Path) -> str:
    """What is wrong with this machine, if that raised `error`; else empty."""
    return f"a disk is full: {error}" if is_full(error) else fault_of_home(error, home)


def unexplained(error: UserError | OSError, home: Path) -> OSError | None:
    """`error`, if its words do not say what to see to. The log then has where it comes from."""
    return None if isinstance(error, UserError) or fault_of_disk(error, home) else error


def all_below(directory: Path, but: Path | None = None) -> Iterator[Path]:
    """All files and directories below, but for `but` and what is below that. `Path.rglob` fails
    where another program removes one meanwhile."""
    for folder, folders, files in os.walk(directory):
        if but is not None and but.parent == Path(folder):
            folders[:] = [name for name in folders if name != but.name]
        for name in (*folders, *files):
            yield Path(folder, name)


def home_option(root: Path) -> str:
    """The option that a command needs to mean this home; empty for the default home."""
    with contextlib.suppress(UserError):
        if root == default_home():
            return ""
    return f" --home {shlex.quote(str(root))}"


def _require_text(root: Path) -> None:
    """A daemon tells in UTF-8 where its home is: to commands, to its page, and to the program that
    takes its place in a pause. Raises `UserError`."""
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"cannot use {str(root)!r}: its name is no text in UTF-8",
            ("name a symbolic link to it: --home LINK", "or rename it"),
        ) from error


def require_made(root: Path, was_held: bool = False) -> None:
    """Raises `UserError` if no home is there, for a service. If the disk of a named home is not
    there yet, another home with another identity would be made in its place. So it would where this
    process has held the home before (`was_held`), and it was moved away since."""
    place = Home(root).root
    kept = (place / name for name in (*KEPT_FILES, *KEPT_DIRECTORIES))
    if any(map(os.path.exists, kept)):
        return
    if was_held:
        raise UserError(
            f"the home of this daemon is gone from {place}: it was moved, or its disk is away",
            "start the daemon again where it is now, or once it is back: --home DIRECTORY",
            exit_code=UNREACHABLE,
        )
    with contextlib.suppress(UserError):  # without a home directory, another place was named
        if place == expanded(USUAL_HOME):
            return
    raise UserError(
        f"{place} is no home of a daemon: its disk may not be there yet, and a service makes none",
        (
            "have that disk there: the service is begun again every 30 s",
            f"for a new home there: mkdir -p {shlex.quote(str(place / 'runs'))}",
        ),
        exit_code=UNREACHABLE,
    )


def place_of_run(root: Path, run_digest: str) -> Path:
    """The directory of a run in a home, whether or not it is there."""
    return root / "runs" / run_digest[:16]


def _may_be_entered(folder: Path) -> bool:
    """Whether others than its user may enter it."""
    try:
        return bool(folder.stat().st_mode & 0o077)
    except OSError:
        return False


class Home:
    """A directory of one daemon."""

    def __init__(self, root: Path, lock_folder: Path | None = None) -> None:
        """`lock_folder`: where all daemons of this machine hold their identities' locks, if not in
        the usual place."""
        self._lock_folder = lock_folder
        self.root = expanded(root).absolute()
        self._lock: IO[str] | None = None
        self._identity_lock: IO[str] | None = None

    @property
    def identity(self) -> Path:
        return self.root / "identity.key"

    @property
    def socket(self) -> Path:
        """The local API's socket. It lies next to the temporary files if the home's own path is too
        long."""
        path = self.root / "daemon.sock"
        if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
            return path
        name = digest_bytes(os.fsencode(self.root))[:16]
        return temporary_folder() / f"p2p-dtfm-{os.getuid()}-{name}.sock"

    def of_this_machine(self) -> tuple[str, ...]:
        """The ids of all peers that were begun together with this home's, for other devices. None
        where it is alone."""
        try:
            return tuple(map(str, json.loads((self.root / BESIDE_FILE).read_text())))
        except (OSError, ValueError, TypeError, RecursionError):
            return ()

    def run_directory(self, run_digest: str) -> Path:
        """The directory with blobs, checkpoints and events of one run. It is made if it is missing,
        but in no home that was moved away while it is held: nothing is then where it was."""
        path = place_of_run(self.root, run_digest)
        if self._lock is None or self.root.exists():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def checkpoints(self, run_digest: str) -> Path:
        return place_of_run(self.root, run_digest) / "checkpoints"

    def acquire(self) -> None:
        """Make the directory and take its lock. Raises `UserError`; exit code 3 if it is held."""
        _require_text(self.root)
        try:
            os.umask(PRIVATE_UMASK)
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._close_to_others()
            lock = (self.root / "daemon.lock").open("a+")
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise UserError(
                f"a daemon is already running in {self.root} (process {holder or 'unknown'})",
                (
                    f"look at it: p2p-dtfm status{home_option(self.root)}",
                    "run a second one with another --home",
                ),
                exit_code=3,
            ) from None
        except OSError as error:  # such as another machine's disk that keeps no locks
            lock.close()
            raise UserError(
                f"cannot use {self.root}: it cannot be locked, {error.strerror}",
                "choose another --home, on a disk of this machine",
                exit_code=code_of_what_may_pass(),
            ) from error
        self._lock = lock
        try:
            lock.truncate(0)
            os.write(lock.fileno(), str(os.getpid()).encode())  # nothing waits to be written later
        except OSError as error:
            if not is_full(error):
                self._lock = None
                raise self._unusable(error) from error
            log.warning("the lock of %s does not say whose it is: %s", self.root, error.strerror)
        try:
            self._hold_identity()
        except UserError:
            self.let_go()
            raise

    def _unusable(self, error: OSError) -> UserError:
        fix = "free space on that disk" if is_full(error) else "choose another --home"
        code = code_of_what_may_pass()
        return UserError(f"cannot use {self.root}: {error.strerror}", fix, code)

    def _hold_identity(self) -> None:
        if not self.identity.exists():
            from p2p_dtfm.net.contacts.identity import Identity  # a daemon that is away needs none

            Identity.load_or_create(self.identity)
        self._identity_lock = hold_identity(self.identity, self.root, self._lock_folder)

    def _close_to_others(self) -> None:
        """Close to others what an earlier program left readable: the directory, and what daemons
        keep in it. If other things lie there too, as in a project with runs of its own, only what
        is surely a daemon's.

        What is below a folder that nobody else may enter needs no look: closing that folder was
        enough.
        """
        kept = [self.root / name for name in KEPT_FILES]
        if {path.name for path in self.root.iterdir()} <= {*KEPT_FILES, *KEPT_DIRECTORIES}:
            self.root.chmod(0o700)
            folders = [self.root / name for name in KEPT_DIRECTORIES]
        else:
            folders = [*self.root.glob(f"runs/{RUN_NAME}")]
        for folder in filter(_may_be_entered, folders):
            kept += [folder, *all_below(folder)]
        for path in kept:
            if path.is_symlink() or not path.exists():
                continue
            with contextlib.suppress(OSError):
                path.chmod(0o700 if path.is_dir() else 0o600)

    def release(self) -> None:
        """Free the home, as a daemon that ends."""
        self.let_go()

    def let_go(self) -> None:
        """Free the home, as the operating system does for a process that was killed."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # another user's, in a place that all share
                self.socket.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if self._identity_lock is not None:
            let_go_of_identity(self._identity_lock)
            self._identity_lock = None

    def next_life(self) -> int:
        """A number that grows with each start, even if the file is lost, as long as the clock is
        right."""
        path = self.root / "life.json"
        try:
            last = int(json.loads(path.read_text())["life"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            last = 0
        if last + 1 >= LIFE_LIMIT:
            last = 0  # damaged: nobody would know a peer of such a life
        life = max(last + 1, int(now.wall_s() * 1000))
        disk.write_whole(path, json.dumps({"life": life}).encode())
        disk.sync_directory(self.root)  # before others hear of it: clocks are set back, too
        return life
