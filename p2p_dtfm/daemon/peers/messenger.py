"""Messages to other peers: one bounded queue for each, begun in order, tried again for a while.

Several messages to a peer are under way at once. Otherwise, around the world, each would wait for
the answer to the one before: a Prepared behind a heartbeat came half a second late, and a Gather of
eight peers took longer than its deadline. So the message that was told last may arrive first. Every
message says by itself what it is about.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

from p2p_dtfm.core.gate.dialling import NamedDoors
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL as BOOTSTRAP_REFUSAL
from p2p_dtfm.daemon.peers.wire import Introduction, Knock, Message, PeerAddress, pack
from p2p_dtfm.net.contacts.addresses import is_public, is_relayed, ways_to, whole
from p2p_dtfm.net.contacts.calling import NO_WAY, door_of, put_newest
from p2p_dtfm.net.door import BUSY
from p2p_dtfm.net.errors import Refused, Unreachable, in_plain_words
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import ADDRESSES_LIMIT
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now, rarely

Value = TypeVar("Value")

QUEUE_LIMIT = 512
UNDER_WAY_LIMIT = 16
"""Messages to one peer at a time. A peer answers more than that at once (`net.libp2p.control`)."""
DEADLINE_S = 5.0
ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
CONNECT_DEADLINE_S = 5.0
LOOK_DEADLINE_S = 2.5
CLOSE_S = 3.0
IDLE_S = 60.0
KNOCK_AGAIN_S = 300.0
REFUSALS_TOLD_EVERY_S = 10.0
NOT_UNDERSTOOD = ("message that is not a valid", "a message of an unknown kind")
"""Answers of a peer that cannot read a message."""
PACKED_LIMIT = 4
PEERS_LIMIT = 4096
"""Limit of remembered peers. The one learnt longest ago is forgotten first."""
GONE_AFTER_S = 3600.0
"""A peer silent for so long is forgotten, unless this peer still has to do with it."""

log = logging.getLogger("p2p_dtfm.messenger")


class Messenger:
    """Knows where peers are and keeps a worker for each that was lately spoken to."""

    def __init__(
        self,
        host: HostPort,
        control: ControlPlane,
        life: int,
        on_heard: Callable[[str], None] = lambda peer_id: None,
        on_failed: Callable[[str, str], None] = lambda peer_id, cause: None,
        straighten: Callable[[str, Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        self._straighten = straighten
        self._on_heard = on_heard
        self._on_failed = on_failed
        self._host = host
        self._control = control
        self._life = life
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._named_doors = NamedDoors()
        self._queues: dict[str, asyncio.Queue[Message]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, list[Message]] = {}
        """Messages queued or under way to each peer that has a worker."""
        self._when_taken: dict[tuple[str, int], Callable[[], None]] = {}
        """What to call when a message is taken, by peer and `id`, since not all can be hashed."""
        self._last_packed: deque[tuple[Message, bytes]] = deque(maxlen=PACKED_LIMIT)
        """Messages with their packed bytes."""
        self._connected: dict[str, None] = {}
        self._silent: set[str] = set()
        self._refusals: dict[str, tuple[str, float]] = {}
        """The last cause that was logged for each peer, and when."""
        self.run_digest = ""
        """The run to join, once it is known."""
        self.passed_over: dict[str, UserError] = {}
        """Peers that answered which run they train and could not be followed, each with the
        reason."""
        self.greeted_s: dict[str, float] = {}
        """When each peer of this version last asked which run is trained here."""
        self.introduction: Introduction | None = None
        """What each peer is told before anything else, in a run by invitation."""
        self._introduced: dict[str, None] = {}
        self._knocked_s: dict[str, float] = {}
        self.heard_s: dict[str, float] = {}
        """When each peer last answered or spoke, on this process's monotonic clock."""
        self._began_s = now.monotonic_s()
        self._is_closed = False

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remember where a peer is that the user named, or that members agreed on."""
        if not addresses or peer_id == self._host.peer_id:
            return
        self._host.calling.vouch(peer_id)
        if ways := ways_to(peer_id, addresses[:ADDRESSES_LIMIT]):
            put_newest(self._addresses, peer_id, ways, PEERS_LIMIT)
            self._host.know(peer_id, ways)

    def learn_named(self, peers: Iterable[PeerAddress]) -> None:
        """Learn members as the member that was asked names them. That member may have put many of
        them behind one door, so that others knock there: of each door only some are learnt."""
        for peer in peers:
            addresses = peer.addresses[:ADDRESSES_LIMIT]
            self.learn(peer.peer_id, [it for it in addresses if self._may_be_at(peer.peer_id, it)])

    def _may_be_at(self, peer_id: str, address: str) -> bool:
        door = door_of(address)
        if door is None:
            return False
        behind = address.partition("/p2p/")[2].split("/", 1)[0] if is_relayed(address) else peer_id
        return self._named_doors.admits(door, behind, is_public(door[0]))

    def hear_of(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Somebody says where a peer is, perhaps to make this peer knock there
        (`net.contacts.calling`)."""
        if peer_id in self._addresses:
            self.learn(peer_id, addresses)
        elif peer_id != self._host.peer_id and (
            ways := ways_to(peer_id, addresses[:ADDRESSES_LIMIT])
        ):
            self._host.know(peer_id, ways)

    async def look_up(self, peer_id: str, addresses: Sequence[str], was_there: bool) -> None:
        """Connect to a peer that the directory names. `was_there`: it brought its presence
        to a node that this peer believes. Raises `Unreachable`."""
        own_suffix = f"/p2p/{peer_id}"
        plain = [address.removesuffix(own_suffix) for address in addresses]
        if await self._host.calling.is_linked(peer_id):
            return
        chosen = self._host.calling.look_up(peer_id, plain, was_there)
        await self._host.connect(peer_id, chosen, LOOK_DEADLINE_S, is_chosen=True)
        await self._host.calling.answered(peer_id)

    async def knock(self, peer_id: str) -> None:
        """Say that this peer is going to join, unless it did so lately. That comes before it asks
        for anything that strangers do not get. Raises `Unreachable`."""
        now_s = now.monotonic_s()
        if now_s - self._knocked_s.get(peer_id, -KNOCK_AGAIN_S) < KNOCK_AGAIN_S:
            return
        with contextlib.suppress(Refused, PeerFault):
            await self.ask(peer_id, Knock(self.run_digest))
            put_newest(self._knocked_s, peer_id, now_s, PEERS_LIMIT)

    def pass_over(self, peer_id: str, reason: UserError) -> None:
        """Do not ask a peer any more which run it trains, until `passed_over` is cleared."""
        put_newest(self.passed_over, peer_id, reason.to_keep(), PEERS_LIMIT)

    def greeted_by(self, peer_id: str) -> None:
        """A peer asked, in this version of the protocol, which run is trained here."""
        put_newest(self.greeted_s, peer_id, now.monotonic_s(), PEERS_LIMIT)

    def forget(self, peer_id: str) -> None:
        """Forget the addresses of a peer that is no member: a bootstrap node, or one that has
        gone."""
        self._addresses.pop(peer_id, None)

    def forget_gone(self, here: Collection[str]) -> None:
        """Forget peers that are not `here` and were not heard for long. Over months they are
        many."""
        since_s = now.monotonic_s() - GONE_AFTER_S
        for peer_id in self.known:
            if peer_id not in here and self.heard_s.get(peer_id, self._began_s) < since_s:
                self.forget(peer_id)

    def where(self, peer_id: str) -> tuple[str, ...]:
        """A peer's addresses, as far as they are known, each ending in its id."""
        return tuple(whole(address, peer_id) for address in self._addresses.get(peer_id, ()))

    def heard(self, peer_id: str) -> None:
        self._silent.discard(peer_id)
        put_newest(self.heard_s, peer_id, now.monotonic_s(), PEERS_LIMIT)
        self._on_heard(peer_id)

    @property
    def me(self) -> str:
        return self._host.peer_id

    @property
    def known(self) -> tuple[str, ...]:
        """Peers whose addresses are known, sorted."""
        return tuple(sorted(self._addresses))

    def tell(
        self, peer_id: str, message: Message, when_taken: Callable[[], None] | None = None
    ) -> None:
        """Send without waiting. `when_taken` is called once the peer has taken the message.

        A peer that does not keep up loses the oldest messages. It is not told again what it has not
        answered yet: where all are slow, that would make them slower.
        """
        if peer_id == self._host.peer_id or self._is_closed:
            return
        unanswered = self._unanswered.setdefault(peer_id, [])
        if message in unanswered:
            return
        queue = self._queues.get(peer_id)
        if queue is None:
            queue = self._queues[peer_id] = asyncio.Queue(QUEUE_LIMIT)
            worker = self._workers[peer_id] = asyncio.create_task(self._deliver(peer_id, queue))
            worker.add_done_callback(lambda ended: self._worker_ended(peer_id, ended))
        if queue.full() or (not queue.empty() and rarely.happens("oldest lost")):
            lost = queue.get_nowait()
            unanswered.remove(lost)
            self._when_taken.pop((peer_id, id(lost)), None)
            queue.task_done()
        if when_taken is not None:
            self._when_taken[peer_id, id(message)] = when_taken
        unanswered.append(message)
        queue.put_nowait(message)

    async def ask(self, peer_id: str, message: Message, deadline_s: float = DEADLINE_S) -> bytes:
        """Send and wait for the reply. Raises `Unreachable` or `Refused`."""
        try:
            await self.connect(peer_id)
            await self._introduce(peer_id)
            reply = await self._control.call(peer_id, self._packed(message), deadline_s)
        except Unreachable as error:
            self._connected.pop(peer_id, None)
            self._on_failed(peer_id, error.cause)
            raise
        except Refused as refusal:
            if NOT_INVITED in refusal.cause:  # the peer may have been started again
                self._introduced.pop(peer_id, None)
            raise
        self.heard(peer_id)
        return reply

    def _packed(self, message: Message) -> bytes:
        """The bytes of a message, packed once for all that are told it. With 32 peers that agree,
        packing for each was two fifths of the cost to send."""
        for one, packed in self._last_packed:
            if one is message:
                return packed
        packed = pack(self._life, message)
        self._last_packed.append((message, packed))
        return packed

    async def turned_away(self, peer_id: str) -> str | None:
        """Why a peer does not let this one in; empty if it does, or does not answer. None for a
        bootstrap node, which trains nothing and lets nobody in."""
        try:
            refusal = await self._introduce(peer_id)
        except (Unreachable, Refused) as error:
            return error.cause if NOT_INVITED in error.cause else ""
        return None if BOOTSTRAP_REFUSAL in refusal else ""

    async def _introduce(self, peer_id: str) -> str:
        """Show this peer's invitation to a peer, once and before all else. Returns why a peer wants
        to see none, if it says so. Raises `Unreachable` or `Refused`."""
        if self.introduction is None or peer_id in self._introduced:
            return ""
        put_newest(self._introduced, peer_id, None, PEERS_LIMIT)
        try:
            await self._control.call(peer_id, pack(self._life, self.introduction), DEADLINE_S)
        except (Unreachable, Refused) as error:
            self._introduced.pop(peer_id, None)
            if isinstance(error, Unreachable) or NOT_INVITED in error.cause:
                raise
            return error.cause
        return ""

    async def connect(self, peer_id: str) -> None:
        """Make sure that there is a connection, if the peer's addresses are known."""
        if peer_id in self._connected or peer_id not in self._addresses:
            return
        await self._host.connect(peer_id, self._addresses[peer_id], CONNECT_DEADLINE_S)
        put_newest(self._connected, peer_id, None, PEERS_LIMIT)
        if self._straighten is not None:
            await self._straighten(peer_id, self._addresses.get(peer_id, ()))

    def forget_knocks(self) -> None:
        """Forget the knocks, since they did not help. The peers that were knocked at may have let
        in others since."""
        self._knocked_s.clear()

    async def is_direct(self, peer_id: str) -> bool:
        """Whether the connection to a peer, if there is one, goes without a relay."""
        if self._host.is_only_local:
            return True
        return await self._host.direct_address(peer_id) is not None

    async def _deliver(self, peer_id: str, queue: asyncio.Queue[Message]) -> None:
        turns = asyncio.Semaphore(UNDER_WAY_LIMIT)
        unanswered = self._unanswered[peer_id]
        answers = False  # of late; a peer that has come by itself needs no address

        async def deliver(message: Message) -> None:
            nonlocal answers
            try:
                answers = await self._try_to_deliver(peer_id, message)
            finally:
                unanswered.remove(message)
                self._when_taken.pop((peer_id, id(message)), None)
                turns.release()
                queue.task_done()

        async with asyncio.TaskGroup() as under_way:
            while (message := await self._next(peer_id, queue)) is not None:
                await turns.acquire()
                delivery = under_way.create_task(deliver(message))
                if not answers and peer_id not in self._connected:  # one finds out for all
                    await delivery

    def _worker_ended(self, peer_id: str, worker: asyncio.Task[None]) -> None:
        """Drop a worker that failed: the next message gets a new queue and worker. A bug here must
        not cut a peer off for good."""
        if worker.cancelled() or (error := worker.exception()) is None:
            return
        log.error("bug while messages to %s were under way", peer_id, exc_info=error)
        if self._workers.get(peer_id) is worker:
            del self._queues[peer_id], self._workers[peer_id], self._unanswered[peer_id]
            for key in [key for key in self._when_taken if key[0] == peer_id]:
                del self._when_taken[key]  # another message may get the `id` of a lost one

    async def _try_to_deliver(self, peer_id: str, message: Message) -> bool:
        """Returns whether the peer has answered."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(ATTEMPTS):
            try:
                await self.ask(peer_id, message)
                if (when_taken := self._when_taken.get((peer_id, id(message)))) is not None:
                    when_taken()
                return True
            except Refused as refusal:
                if refusal.cause != BUSY:
                    self._log_refusal(peer_id, message, refusal.cause)
                    return True
            except Unreachable as error:
                if error.cause == NO_WAY:
                    return False
                if attempt == ATTEMPTS - 1:
                    first = peer_id not in self._silent
                    self._silent.add(peer_id)
                    is_news = first and not isinstance(message, Standing)  # outsiders get it, too
                    level = logging.WARNING if is_news else logging.DEBUG
                    why = in_plain_words(error.cause)
                    log.log(
                        level,
                        "what %s is told (%s) does not arrive: %s",
                        peer_id,
                        _name(message),
                        why,
                    )
            except PeerFault as fault:
                log.warning("reply to a %s: %s", _name(message), fault)
                return True
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return False

    def _log_refusal(self, peer_id: str, message: Message, cause: str) -> None:
        """Log a refusal once for each cause in a row, and not all the time: a peer may invent
        causes. One that has just started refuses much at first."""
        before, told_s = self._refusals.get(peer_id, ("", -REFUSALS_TOLD_EVERY_S))
        now_s = now.monotonic_s()
        first = cause != before and now_s - told_s >= REFUSALS_TOLD_EVERY_S
        if first:
            put_newest(self._refusals, peer_id, (cause, now_s), PEERS_LIMIT)
        is_unlike = cause.startswith(NOT_UNDERSTOOD)
        is_news = first and (is_unlike or not isinstance(message, Standing))
        level = logging.WARNING if is_news else logging.DEBUG  # one just started refuses that
        more = ": perhaps it is of another version" if is_unlike else ""
        log.log(level, "%s refuses a %s: %s%s", peer_id, _name(message), cause, more)

    async def _next(self, peer_id: str, queue: asyncio.Queue[Message]) -> Message | None:
        """The next message. None when there is none for a while; the worker is then forgotten."""
        while True:
            if not queue.empty():
                return queue.get_nowait()
            try:
                async with asyncio.timeout(IDLE_S):
                    return await queue.get()
            except TimeoutError:
                if queue.empty() and not self._unanswered[peer_id]:
                    del self._queues[peer_id], self._workers[peer_id], self._unanswered[peer_id]
                    self._silent.discard(peer_id)
                    return None

    async def close(self) -> None:
        """Give messages that are queued or under way a moment to arrive, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                for queue in list(self._queues.values()):
                    await queue.join()
        self._is_closed = True
        for worker in self._workers.values():
            worker.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)


def _name(message: Message) -> str:
    return type(message).__name__
