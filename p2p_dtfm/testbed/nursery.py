"""Daemons of one machine, forked from one process that has loaded torch and libp2p.

A daemon needs two seconds of processor to load what it runs, and 280 MB to keep it. For several
daemons on one machine a *nursery* loads that once, and each daemon is a fork of it. A fork starts
at once, and shares that memory until it writes to it. From then on it is a process like any other,
with a session, streams, a directory and an environment of its own. It runs the same module's
`__main__`.

The nursery itself computes nothing: a fork of a process whose thread pools have started would hang.
It ends when the process that started it ends, and tells that process how each child ended.
"""

import array
import atexit
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from p2p_dtfm.ports.packages import python_command

REQUEST_LIMIT_BYTES = 1 << 20
LOADED = (
    "p2p_dtfm.cli.app",
    "p2p_dtfm.cli.commands.run",
    "p2p_dtfm.daemon.node.daemon",
    "cid",
    "netaddr",
    "numpy.random",
    "uvicorn.protocols.http.h11_impl",
)
"""Modules by name: the program is above this package, and imports what runs daemons only when it
does. The daemons import the last ones when they are at work."""
_STREAMS = 4  # what a request brings: standard input, output, error, and where to tell the end
_STATUS = struct.Struct("<i")
_PID = struct.Struct("<q")
_START_DEADLINE_S = 120.0


class ForkedProcess:
    """A child of the nursery, like a `subprocess.Popen`. `stdin` is the write end of a pipe."""

    def __init__(self, pid: int, stdin: IO[bytes], ended: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.returncode: int | None = None
        self._ended = ended

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._ended)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative if a signal ended the child. Raises
        `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            end = select.poll()  # which takes descriptors of any number
            end.register(self._ended, select.POLLIN)
            if not end.poll(None if timeout is None else math.ceil(timeout * 1000)):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            told = os.read(self._ended, _STATUS.size)
            # the nursery was ended, and cannot say how this one did
            self.returncode = _STATUS.unpack(told)[0] if told else -signal.SIGKILL
            os.close(self._ended)
            if self.stdin is not None:  # nobody reads it any more
                self.stdin.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The near end. It starts the nursery with the first child, and asks it for each child."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        output: IO[bytes],
        errors: IO[bytes],
        *,
        environment: Mapping[str, str] | None = None,
        without: tuple[str, ...] = (),
    ) -> ForkedProcess:
        """Starts `python -m module arguments...` in this directory. The child has this environment
        and what is given besides, without names that begin with one of `without`."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(without)}
        theirs, stdin = os.pipe()
        ended, tells = os.pipe()
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": {**kept, "PYTHONUNBUFFERED": "1", **(environment or {})},
            "directory": os.getcwd(),
        }
        streams = [theirs, output.fileno(), errors.fileno(), tells]
        try:
            with self._asking:
                pid = self._ask(json.dumps(request).encode(), streams)
        except BaseException:
            os.close(stdin)
            os.close(ended)
            raise
        finally:
            os.close(theirs)
            os.close(tells)
        return ForkedProcess(pid, os.fdopen(stdin, "wb", buffering=0), ended)

    def _ask(self, request: bytes, streams: list[int]) -> int:
        near = self._running()
        assert len(request) <= REQUEST_LIMIT_BYTES, "an environment of a mebibyte"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        near.sendmsg([struct.pack("<I", len(request))], rights)
        near.sendall(request)
        told = near.recv(_PID.size)
        assert len(told) == _PID.size, "the nursery ended"
        pid: int = _PID.unpack(told)[0]
        return pid

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            assert self._socket is not None
            return self._socket
        near, far = socket.socketpair()
        near.settimeout(_START_DEADLINE_S)
        self._process = subprocess.Popen(
            python_command("-m", __name__, str(far.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
            start_new_session=True,  # the terminal's Ctrl-C is for the parent to pass on
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        far.close()
        self._socket = near
        return near


NURSERY = Nursery()
"""The nursery of this process."""


def serve(far: socket.socket) -> None:
    """Forks for each request, until the asking process is gone."""
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tells: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([far.fileno(), wakes], [], [])
        if wakes in readable:
            os.read(wakes, 4096)
            _tell_ends(tells)
        if far.fileno() in readable:
            request, streams = _request(far)
            if request is None:
                return
            pid = os.fork()
            if pid == 0:
                far.close()
                for fd in (wakes, woken, *tells.values()):
                    os.close(fd)
                _become(request, streams)
            for fd in streams[:-1]:
                os.close(fd)
            tells[pid] = streams[-1]
            far.sendall(_PID.pack(pid))


def _tell_ends(tells: dict[int, int]) -> None:
    while tells:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = tells.pop(pid)
        with suppress(BrokenPipeError):
            os.write(fd, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(fd)


def _request(far: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    space = socket.CMSG_SPACE(_STREAMS * array.array("i").itemsize)
    first, attached, _, _ = far.recvmsg(4, space)
    if not first:
        return None, []
    streams = array.array("i")
    for _, _, data in attached:
        streams.frombytes(data)
    (length,) = struct.unpack("<I", first)
    body = b""
    while len(body) < length:
        more = far.recv(length - len(body))
        if not more:
            return None, []
        body += more
    request: dict[str, Any] = json.loads(body)
    return request, list(streams)


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Runs the module in the child, and never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd, place in zip(streams, (0, 1, 2), strict=False):
            os.dup2(fd, place)
        for fd in streams:
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        status = _run(request["module"], request["arguments"], request["directory"])
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def _run(module: str, arguments: Sequence[str], directory: str) -> int:
    """Runs the module as Python does. Returns its exit status; a traceback goes to standard
    error."""
    sys.path[0] = directory
    sys.argv = [module, *arguments]
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    _finish()
    return status if isinstance(status, int) else int(status is not None)


def _finish() -> None:
    """Does what the interpreter does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def main() -> None:
    """Loads what daemons run, then serves."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that the collector would write to are shared for longer
    with socket.socket(fileno=int(sys.argv[1])) as far, suppress(ConnectionError):
        serve(far)  # until who asks is gone, as by Ctrl-C before a first answer


if __name__ == "__main__":
    main()
