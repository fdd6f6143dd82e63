"""A node that only keeps the directory: where newcomers meet the members of any run.

It holds no data and no layer, loads no torch, and a swarm lives on without it. Its address stays
the same as long as its home and its port do.
"""

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.life import end_at_once
from p2p_dtfm.daemon.peers.facts.public_status import StatusHeard
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.values import HEXADECIMAL
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.web.public_server import PublicServer, public_listener

log = logging.getLogger("p2p_dtfm")

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/31331"
REFRESH_S = 30.0
REFUSAL = "it is a bootstrap node and trains nothing"
DIGEST_DIGITS = 64


@dataclass(frozen=True)
class PublicPage:
    """A page about one run, which anybody may read. The node's owner says which run, or strangers
    would have theirs shown there."""

    port: int
    run_digest: str


def public_page(port: int, run_digest: str) -> PublicPage | None:
    """The public page; None without a port. Raises `UserError`."""
    if not port:
        return None
    digest = run_digest.lower()
    if len(digest) != DIGEST_DIGITS or not set(digest) <= HEXADECIMAL:
        raise UserError(
            "a bootstrap node's page is of one run, which its digest names",
            (
                f"add --run-digest and the {DIGEST_DIGITS} digits that the founder's daemon prints",
                "or leave out --public-status",
            ),
        )
    return PublicPage(port, digest)


class Bootstrap:
    """`run` lives until SIGTERM or SIGINT; a second one ends at once."""

    def __init__(
        self,
        home: Path,
        listen: Sequence[str] = (DEFAULT_LISTEN,),
        announce: Sequence[str] = (),
        initial_peers: Sequence[str] = (),
        as_json: bool = False,
        relays: bool = True,
        page: PublicPage | None = None,
    ) -> None:
        self._relays = relays
        self._page = page
        self._home = Home(home)
        self._listen = tuple(listen)
        self._announce = tuple(announce)
        self._initial_peers = tuple(initial_peers)
        self._as_json = as_json
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit code. Raises `UserError`."""
        self._home.acquire()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._home.release)
            listener = public_listener(self._page.port) if self._page is not None else None
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._on_signal)
            host = await Host.start(
                self._home.identity, self._listen, self._announce, self._initial_peers
            )
            stack.push_async_callback(host.close)
            GateKeeper.of(host)
            for address in self._initial_peers:
                host.calling.vouch(parse_address(address)[0])
            control = await ControlPlane(host, _refuse).ready()
            stack.push_async_callback(control.close)
            reachability = await ReachabilityService(
                host, self._relays, self._listen, self._announce
            ).ready()
            stack.push_async_callback(reachability.close)
            directory = await Directory.start(host, self._initial_peers)
            stack.push_async_callback(directory.close)
            addresses = await host.addresses()
            if self._page is not None and listener is not None:
                line = f"p2p-dtfm --initial-peers {addresses[0]} --run-digest "
                line += self._page.run_digest
                heard = StatusHeard(host, directory, self._page.run_digest, line)
                await _serve_page(stack, heard, listener)
            self._print_addresses(addresses)
            await self._until_end(host, directory)
        log.info("the bootstrap node has ended")
        return 0

    def _on_signal(self) -> None:
        if self._ending.is_set():
            end_at_once()
        self._ending.set()

    def _print_addresses(self, addresses: tuple[str, ...]) -> None:
        if self._as_json:
            print(json.dumps({"addresses": addresses}), flush=True)
            return
        lines = ["a swarm is founded through this node with one of these lines:"]
        lines += [f"  p2p-dtfm --run RUN --initial-peers {address}" for address in addresses]
        lines += ["and joined with one of these, whose end the founder's daemon prints:"]
        lines += [f"  p2p-dtfm --initial-peers {addresses[0]} --run-digest DIGEST"]
        print("\n".join(lines), flush=True)

    async def _until_end(self, host: Host, directory: Directory) -> None:
        refreshing = asyncio.create_task(_refresh(directory))
        ending = asyncio.create_task(self._ending.wait())
        lost = asyncio.create_task(host.lost.wait())
        try:
            await asyncio.wait({ending, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not ending.done():
                raise UserError(
                    "the libp2p daemon of this node has ended by itself",
                    "start p2p-dtfm bootstrap again; under systemd that happens by itself",
                    exit_code=1,
                )
        finally:
            for task in (refreshing, ending, lost):
                task.cancel()
            await asyncio.gather(refreshing, ending, lost, return_exceptions=True)


async def _serve_page(
    stack: contextlib.AsyncExitStack, heard: StatusHeard, listener: socket.socket
) -> None:
    server = PublicServer(heard.facts, listener)
    await server.start()
    stack.push_async_callback(server.close)
    asking = asyncio.create_task(heard.keep())
    stack.callback(asking.cancel)


async def _refuse(sender: str, body: bytes) -> bytes:
    """Refuse every question of a newcomer in the same way. It then looks into the directory."""
    raise PeerFault(REFUSAL, sender)


async def _refresh(directory: Directory) -> None:
    """When all nodes were lost, try those known from before."""
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            await directory.refresh()
        except Unreachable as error:
            log.warning("directory: %s", error)
        except Exception:  # nobody would see that the node no longer looks for others
            log.exception("bug while the directory was looked after")
