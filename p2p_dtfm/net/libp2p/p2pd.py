"""Starts the libp2p daemon (p2pd). hivemind's own start lacks flags, and shares Ctrl-C.

p2pd gets a session of its own. A Ctrl-C in the terminal tells this program to finish its step and
leave in order, and must not cut it off from the swarm at once. p2pd ends by itself when the process
that it serves is gone.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts.addresses import is_loopback
from p2p_dtfm.net.errors import one_line
from p2p_dtfm.net.hivemind_parts import P2P, Multiaddr

READY_LINE = b"Peer ID:"
STARTUP_TIMEOUT_S = 60.0
CLOSE_DEADLINE_S = 5.0
_SOCKET_FOLDER = Path("/tmp")
_READ_BYTES = 1 << 16

log = logging.getLogger(__name__)


class P2pdFailed(Exception):
    """p2pd did not start; the text is the last thing it said."""


class P2pd:
    """A running p2pd. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, socket_path: Path) -> None:
        self.process = process
        self.socket_path = socket_path
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, flags: Sequence[str], startup_timeout_s: float) -> "P2pd":
        """Start p2pd and wait until it answers. Raises `P2pdFailed`."""
        path = _SOCKET_FOLDER / f"hivemind-p2pd-{secrets.token_urlsafe(8)}.sock"
        try:
            process = await asyncio.create_subprocess_exec(
                str(_binary()),
                f"-listen=/unix{path}",
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise P2pdFailed(f"hivemind's p2pd cannot be run here: {error}") from error
        daemon = cls(process, path)
        try:
            async with asyncio.timeout(startup_timeout_s):
                await daemon._wait_until_ready()
        except TimeoutError as error:
            await daemon.stop()
            raise P2pdFailed(f"it was not ready within {startup_timeout_s:g} s") from error
        except BaseException:
            await daemon.stop()
            raise
        daemon._draining = asyncio.create_task(daemon._drain(), name="p2pd output")
        return daemon

    async def stop(self) -> None:
        """End p2pd, by force where asking does not help, and wait until it is gone."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), CLOSE_DEADLINE_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.process.wait()
        if self._draining is not None:
            self._draining.cancel()
        self.socket_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """End a p2pd that hangs, and would not hear that it is to end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal without `Popen.send_signal`, which would reap the child before asyncio's
        watcher can."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        last = b""
        while line := await self.process.stdout.readline():
            last = line
            if line.startswith(READY_LINE):
                return
        raise P2pdFailed(one_line(last.decode(errors="replace").strip() or "it ended at once"))

    async def _drain(self) -> None:
        """Read p2pd's output, or p2pd would one day wait for that."""
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(_READ_BYTES):
            for line in data.splitlines()[:16]:
                log.debug("p2pd: %s", one_line(line.decode(errors="replace")))


def _binary() -> Path:
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "hivemind_cli" / "p2pd"


def _environment() -> Mapping[str, str]:
    # warnings of Go's libp2p tell of every unreachable stranger
    return {"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "json"}


def flags_of(
    identity_path: Path,
    listen: list[str],
    announce: list[str],
    message_limit_bytes: int,
    maps_port: bool = True,
) -> list[str]:
    """The flags that p2pd is started with."""
    # a swarm on loopback has no router to talk to
    beyond = int(not listen or not all(is_loopback(address) for address in listen))
    flags = [
        f"-id={identity_path}",
        # no -dht: its routing calls whatever strangers name, see `net.directory.whereabouts`
        "-connManager=1",
        "-relay=1",
        "-relayService=0",  # it would push `net.nat.relay` aside once p2pd believes itself public
        f"-autonat={beyond}",
        f"-natPortMap={int(beyond and maps_port)}",
        "-autoRelay=0",  # `daemon.peers.reachability` looks for relays
        # both kinds of encryption authenticate the peer id; TLS takes a quarter less CPU
        "-tls=1",
        "-noise=0",
        "-idleTimeout=30s",
        f"-persistentConnMaxMsgSize={message_limit_bytes}",
    ]
    flags += [f"-hostAddrs={','.join(listen)}"] if listen else ["-noListenAddrs=1"]
    flags += [f"-announceAddrs={','.join(announce)}"] if announce else []
    return flags


async def start_p2pd(flags: list[str], listen: list[str]) -> tuple[P2pd, P2P]:
    """Start p2pd, and connect hivemind's client to it. Raises `UserError`."""
    try:
        p2pd = await P2pd.start(flags, STARTUP_TIMEOUT_S)
    except P2pdFailed as error:
        where = ", ".join(listen) or "no address"
        raise UserError(
            f"the libp2p daemon could not start, listening on {where}: {error}",
            (
                "see whether another program uses the port: choose another one, or 0 for any",
                "see whether the address is this machine's: /ip4/0.0.0.0/tcp/PORT always is",
            ),
        ) from error
    try:
        control = Multiaddr(f"/unix{p2pd.socket_path}")
        return p2pd, await asyncio.wait_for(P2P.replicate(control), STARTUP_TIMEOUT_S)
    except BaseException:
        await p2pd.stop()
        raise
