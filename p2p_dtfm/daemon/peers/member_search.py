"""Looks for living members of one run: where they were met before, in the directory, and on the
local network. All three are tried at once, and not for long."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.daemon.peers.discovery import ask_present, first_found
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.run_source import AnotherRun, ask_welcome_shortly
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.net.contacts.nearby import Nearby, Neighbour
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.errors import Unreachable

LOOK_LIMIT_S = 6.0
ANSWER_DEADLINE_S = 3.0
MET_FIRST_S = 3.5
HEAD_START_S = 1.0
"""The head start of members that were met."""
ASKED_AT_ONCE_LIMIT = 16
ASKED_LIMIT = 32

log = logging.getLogger("p2p_dtfm")


@dataclass(frozen=True)
class Found:
    """A living member of the run."""

    peer_id: str
    welcome: Welcome
    where: str


@dataclass(frozen=True)
class Sought:
    """The run, and the members that this peer has met in it, newest first: (peer id, addresses)."""

    run_digest: str
    met: tuple[tuple[str, tuple[str, ...]], ...]
    initial: tuple[str, ...] = ()
    """Peers through whom the directory is read first."""


class MemberSearch:
    """A search for members of any run. `own`: this peer's addresses, told to those that answer."""

    def __init__(
        self,
        messenger: Messenger,
        directory: DirectoryPort,
        nearby: Nearby | None,
        own: Callable[[], Awaitable[tuple[str, ...]]],
    ) -> None:
        self._messenger = messenger
        self._directory = directory
        self._nearby = nearby
        self._own = own
        self.elsewhere: dict[str, str] = {}
        """What members that were met train now, if they answered the last look and train something
        else."""

    def places(self, sought: Sought) -> str:
        """Where `look` looks, in words."""
        count = min(len(sought.met), ASKED_LIMIT)
        places = [f"{count} peer{'s' * (count != 1)} met before"] if count else []
        places.append("the directory")
        places += ["the local network"] if self._nearby is not None else []
        return " and ".join([", ".join(places[:-1]), places[-1]] if places[1:] else places)

    async def look(self, sought: Sought, limit_s: float = LOOK_LIMIT_S) -> Found | None:
        """The first member that answers; None if none does within the limit. Members that were met
        have the first word: anybody can say in the directory, or nearby, that it is a member."""
        own, self.elsewhere = await self._own_addresses(), {}
        met_are_silent = asyncio.Event()

        async def ask_met() -> Found | None:
            found = await self._ask_met(sought, own)
            if found is None:
                met_are_silent.set()
            return found

        async def ask_others() -> Found | None:
            loop = asyncio.get_running_loop()
            end_s = loop.time() + MET_FIRST_S
            if sought.met:  # met ones mostly answer, and no other need be asked
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(met_are_silent.wait(), HEAD_START_S)
            ways = [self._ask_directory(sought, own)]
            if self._nearby is not None:
                ways.append(self._ask_nearby(self._nearby, sought, own))
            found = await first_found(ways, None)
            if found is not None and found.peer_id not in {peer for peer, _ in sought.met}:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(end_s):
                        await met_are_silent.wait()
            return found

        return await first_found([ask_met(), ask_others()], limit_s)

    async def _own_addresses(self) -> tuple[str, ...]:
        """This peer's addresses; () while p2pd has no time to say. The others are asked all the
        same."""
        try:
            return await self._own()
        except Unreachable as error:
            log.debug("own addresses: %s", error)
            return ()

    async def _ask_met(self, sought: Sought, own: tuple[str, ...]) -> Found | None:
        return await self._ask_each(sought, sought.met[:ASKED_LIMIT], own, "met before")

    async def _ask_directory(self, sought: Sought, own: tuple[str, ...]) -> Found | None:
        first = list(sought.initial)
        found = await ask_present(self._messenger, self._directory, first, own, sought.run_digest)
        return None if found is None else Found(*found, "in the directory")

    async def _ask_nearby(
        self, nearby: Nearby, sought: Sought, own: tuple[str, ...]
    ) -> Found | None:
        """Ask neighbours that answer, if this peer has met them or they say that they have met
        it."""
        met = {peer_id for peer_id, _ in sought.met}
        answers: asyncio.Queue[Neighbour | None] = asyncio.Queue()

        async def ask() -> None:
            await nearby.ask(sought.run_digest, answers.put_nowait)
            answers.put_nowait(None)

        async with _at_work(ask()):
            while (neighbour := await answers.get()) is not None:
                at = f"{neighbour.address}/p2p/{neighbour.peer_id}"
                if not neighbour.knows_asker and neighbour.peer_id not in met:
                    log.info("another swarm trains this run here: --initial-peers %s joins it", at)
                    continue
                found = await self._ask(
                    sought, neighbour.peer_id, (at,), own, "on the local network"
                )
                if found is not None:
                    return found
        return None

    async def _ask_each(
        self,
        sought: Sought,
        peers: Sequence[tuple[str, tuple[str, ...]]],
        own: tuple[str, ...],
        where: str,
    ) -> Found | None:
        turns = asyncio.Semaphore(ASKED_AT_ONCE_LIMIT)

        async def ask(peer_id: str, addresses: tuple[str, ...]) -> Found | None:
            async with turns:
                return await self._ask(sought, peer_id, addresses, own, where)

        return await first_found([ask(*peer) for peer in peers], None)

    async def _ask(
        self,
        sought: Sought,
        peer_id: str,
        addresses: tuple[str, ...],
        own: tuple[str, ...],
        where: str,
    ) -> Found | None:
        """Ask one peer. If it does not answer it is forgotten, so that nothing waits for it any
        more."""
        if peer_id == self._messenger.me:
            return None
        found, is_met = None, peer_id in {met for met, _ in sought.met}
        with contextlib.suppress(TimeoutError, Unreachable):
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                if is_met:
                    self._messenger.learn(peer_id, addresses)
                else:  # it says that it knows this peer
                    await self._messenger.look_up(peer_id, addresses, was_there=True)
                try:
                    found = await ask_welcome_shortly(
                        self._messenger, peer_id, own, sought.run_digest, ANSWER_DEADLINE_S
                    )
                except AnotherRun as other:
                    if is_met:
                        self.elsewhere[peer_id] = other.cause
        if found is None:
            self._messenger.forget(peer_id)
        if found is None or not found[1].lets_in:
            return None
        return Found(*found, where)


@asynccontextmanager
async def _at_work(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let `work` go on during the block. It is cancelled at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
