"""Talking to the daemon of this machine over its unix socket."""

import http.client
import json
import os
import socket
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import DEVICES, Home, default_home, home_option

TIMEOUT_S = 10.0
PATIENCE_S = 10.0
LOOK_EVERY_S = 0.05
CLOCK_S = 2.0
"""How exactly the beginning of a process is known."""
_CREDENTIALS = struct.Struct("3i")
"""Credentials of the process that listens: process, user, group."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float, is_own: bool) -> None:
        """`is_own`: only a process of this very user may listen there."""
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._is_own = is_own
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))
        # every user may put a socket where a long home's lies
        _, uid, _ = _CREDENTIALS.unpack(
            self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if self._is_own and uid != os.getuid():
            self.sock.close()
            raise PermissionError(f"at {self._path} another user listens")


def homes_here(home: Path | None) -> list[Path]:
    """Homes of the daemons that were begun together with `--device all`. A daemon begun alone has
    one."""
    first = Home(home or default_home())
    below = sorted((first.root / DEVICES).glob("*"), key=lambda path: (len(path.name), path.name))
    return [first.root, *(root for root in below if holder_of(Home(root)))]


def ask_daemon(
    home: Path, name: str, method: str = "GET", timeout_s: float = TIMEOUT_S
) -> Any | None:
    """Like `call_daemon`, but None where no daemon answers."""
    try:
        return call_daemon(home, name, method, timeout_s, patience_s=0.0)
    except UserError:
        return None


def call_daemon(
    home: Path | None,
    name: str,
    method: str = "GET",
    timeout_s: float = TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Any:
    """Make one request. A daemon that lives but has no socket at this moment is waited for: it
    starts, or begins or ends a pause.

    Raises `UserError` with exit code 4 if no daemon runs in that home, and with the daemon's own
    words where it refuses.
    """
    place = Home(home or default_home())
    _await_socket(place, patience_s)
    is_shared = not place.socket.is_relative_to(place.root)
    connection = _UnixConnection(place.socket, timeout_s, is_own=is_shared)
    try:
        connection.request(method, f"/{name}")
        response = connection.getresponse()
        payload = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(place, error) from error
    finally:
        connection.close()
    if response.status != 200:
        fix = "use the same version of p2p-dtfm for the daemon and this command"
        if response.status >= 500:
            fix = "see what the daemon's log says of it, and report that: it is a bug"
        raise UserError(
            f"the daemon answers {response.status} to {method} {name}", fix, exit_code=4
        )
    answer = json.loads(payload)
    if isinstance(answer, dict) and "error" in answer:
        raise UserError(answer["error"], tuple(answer["fixes"]))
    return answer


def _await_socket(place: Home, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while not place.socket.exists() and time.monotonic() < end_s:
        if (process := holder_of(place)) is None or _is_bootstrap_node(process):
            return
        time.sleep(LOOK_EVERY_S)


def _no_answer(place: Home, error: OSError | http.client.HTTPException) -> UserError:
    """Why nobody answers in this home, and what helps."""
    if isinstance(error, NotADirectoryError):
        return UserError(
            f"{place.root} is a file, and no home of a daemon",
            "name the directory of the one you mean: --home DIR",
        )
    none_runs = isinstance(error, FileNotFoundError | ConnectionRefusedError)
    is_silent = isinstance(error, TimeoutError | BlockingIOError)  # the latter: too many wait
    process = holder_of(place) if none_runs or is_silent else None
    if process is None:
        why = "it was not started there, or has ended" if none_runs else error
        return UserError(
            f"no daemon answers in {place.root} ({why})",
            (
                f"start one: p2p-dtfm{home_option(place.root)}",
                "name the home of the one you mean: --home DIR",
            ),
            exit_code=4,
        )
    if not none_runs:
        return UserError(
            f"the daemon in {place.root} (process {process}) listens and does not answer: it is "
            "stopped, or this machine does much else",
            (
                f"if it is stopped, as by Ctrl-Z, have it go on: kill -CONT {process}",
                "else try again in a moment",
            ),
            exit_code=4,
        )
    if _is_bootstrap_node(process):
        return UserError(
            f"a bootstrap node runs in {place.root} (process {process}): it trains nothing, and "
            "answers no commands",
            (
                f"to end it: Ctrl-C where it runs, or kill {process}",
                "for a daemon that trains, name its home: --home DIR",
            ),
            exit_code=4,
        )
    return UserError(
        f"the daemon in {place.root} does not answer yet: it starts or ends just now",
        "try again in a moment",
        exit_code=4,
    )


def _is_bootstrap_node(process: int) -> bool:
    """Whether the process holds its home as a bootstrap node, which has no socket. The name of a
    command stands right behind the program's."""
    import psutil  # as below

    from p2p_dtfm.daemon.machine.owner.sights import is_ours

    try:
        words = psutil.Process(process).cmdline()
    except (OSError, psutil.Error):
        return False
    return any(word == "bootstrap" and is_ours([before]) for before, word in pairwise(words))


def holder_of(place: Home) -> int | None:
    """The process that held this home last, if it still lives. A process that began later has only
    taken over its number."""
    import psutil  # only where no daemon answers at once

    from p2p_dtfm.daemon.machine.owner.sights import is_ours

    lock = place.root / "daemon.lock"
    try:
        process = psutil.Process(int(lock.read_text()))
        if process.pid == os.getpid():  # in a container all daemons have had the same number
            return None
        is_older = process.create_time() <= lock.stat().st_mtime + CLOCK_S
        # a clock may have been corrected
        return process.pid if is_older or is_ours(process.cmdline()) else None
    except (OSError, ValueError, OverflowError, psutil.Error):
        return None
