"""The directory: how peers of a run meet, in a DHT that everybody may write to.

Keys are named by their content, so that a validator needs to know no run beforehand:

    p2p-dtfm/1/presence/RUN/SHARD   dictionary: 38-byte peer id -> Signed presence
    p2p-dtfm/1/facts/RUN/PEER       Signed facts of a member: its record and its part in the plan
    p2p-dtfm/1/run/RUN              Signed run spec whose payload has the digest RUN
    p2p-dtfm/1/sealed/SLOT          dictionary: peer id -> a presence of a run by invitation, sealed

A peer's shard follows from its id. What is read here is a hint: two readers may see different peers
at one instant, and a plan is never computed from it.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import base58
import msgspec

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.contacts.addresses import parse_address, peer_ids_of
from p2p_dtfm.net.directory import node as directory_node
from p2p_dtfm.net.directory.entries import facts_in, presences_in, run_in
from p2p_dtfm.net.directory.facts import (
    Facts,
    PublishedFacts,
    PublishedPart,
    facts_key,
    sign_facts,
)
from p2p_dtfm.net.directory.lost_nodes import LostNodes
from p2p_dtfm.net.directory.sealed import Seal, sealed_key
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import (
    SHARDS,
    Presence,
    key_bytes,
    open_run,
    presence_key,
    run_key,
    shard_of,
    sign_presence,
    sign_run,
)
from p2p_dtfm.net.directory.whereabouts import Whereabouts
from p2p_dtfm.net.errors import Unreachable, one_line
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DHTNode,
    DHTRefusal,
    PeerID,
    get_dht_time,
)
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS, Host
from p2p_dtfm.ports import chance, now

Result = TypeVar("Result")

PRESENCE_TTL_S = 90.0
RUN_TTL_S = 600.0
FACTS_TTL_S = 240.0
OPERATION_DEADLINE_S = 20.0
ASKED_NODES = 8
"""How many of the nodes nearest to a key are asked, which is more than hold its value."""
FACTS_AT_ONCE = 64
ASK_FOR_RUNS_S = 1.0
"""The pause between two searches for a run that somebody claims to take part in."""
REFUSED = "the directory refused what was to be published (%s): %s"
NO_NODE = "it does not answer as a node of the directory"
_CLOCK = "local time"
WORTH_SAYING = 3
"""So many refusals of one kind, one after another, are logged."""

__all__ = ["Directory", "DirectoryValidator", "Presence", "open_run", "sign_run"]

log = logging.getLogger(__name__)


class Directory:
    """This peer's node of the DHT, beside its host's p2pd. Made by `start`."""

    def __init__(
        self,
        host: Host,
        node: DHTNode,
        initial_peers: Sequence[str],
        validator: DirectoryValidator,
    ) -> None:
        self._validator = validator
        validator.forget_run = self._drop
        validator.on_unknown_run = self._ask_for_run
        self._asking: set[asyncio.Task[None]] = set()
        self._asked_s = 0.0
        self._host = host
        self._node = node
        self._initial: dict[str, tuple[str, ...]] = {}
        self._lost = LostNodes()
        self.call_again_at(initial_peers)
        self._acquaintances = dict(self._initial)
        self._presence: Presence | None = None
        self._presence_ttl_s = PRESENCE_TTL_S
        self._runs: dict[str, Signed] = {}
        self._seals: dict[str, Seal] = {}
        self._refusals: Counter[str] = Counter()
        self._unexpected: set[type[Exception]] = set()

    @classmethod
    async def start(
        cls, host: Host, initial_peers: Sequence[str] = (), serves: bool = True
    ) -> "Directory":
        """Join the DHT through peers to which the host is connected.

        A node that others cannot call asks and does not serve: `serves` is False. Raises
        `UserError` with exit code 6 when none of the peers both answers as a DHT node and lets this
        one in.
        """
        others = [at for at in initial_peers if parse_address(at)[0] != host.peer_id]
        validator = DirectoryValidator()
        try:
            node = await asyncio.wait_for(
                DHTNode.create(
                    p2p=host.p2p,
                    initial_peers=others,
                    record_validator=validator,
                    client_mode=not serves,
                    # a cache would answer with members that are gone
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                ),
                OPERATION_DEADLINE_S,
            )
        except (TimeoutError, DHTRefusal, ValueError, LookupError, *CONNECTION_ERRORS) as error:
            raise _not_joined(others, validator.turned_away, error) from error
        for peer_id, cause in validator.turned_away.items():
            log.warning("no way into the directory through %s: %s", peer_id, _in_words(cause))
        assert isinstance(node.protocol, directory_node.DHTProtocol)
        whereabouts = Whereabouts(host)
        if serves:  # nobody hears of others; and one host may ask again and again
            await whereabouts.ready()
        node.protocol.host, node.protocol.whereabouts = host, whereabouts
        await asyncio.gather(*(whereabouts.greet(parse_address(at)[0]) for at in others))
        return cls(host, node, others, validator)

    def call_again_at(self, addresses: Sequence[str]) -> None:
        """Call these peers, which the user has named, whenever the node does not know them. They
        may have been away as it began, and be where all others meet. Peers that turned this node
        away are left out: no later call looks at what was wrong, such as its clock."""
        left_out = {self._host.peer_id, *self._validator.turned_away}
        for address in addresses:
            peer_id, where = parse_address(address)
            ways = self._initial.get(peer_id, ())
            if peer_id not in left_out and where not in ways:
                self._host.calling.vouch(peer_id)
                self._initial[peer_id] = (*ways, where)

    def seal(self, run_digest: str, key: bytes) -> None:
        """From now on write and read this run's values for those alone who have its key."""
        self._seals[run_digest] = Seal(key)

    async def publish_presence(
        self, presence: Presence, expires_in_s: float = PRESENCE_TTL_S
    ) -> bool:
        """Say that this peer is there; kept alive by `refresh`. False (and logged) if refused."""
        assert presence.peer_id == self._host.peer_id, "a presence is published by its own peer"
        self._presence, self._presence_ttl_s = presence, expires_in_s
        expires_ms = int((get_dht_time() + expires_in_s) * 1000)
        dated = msgspec.structs.replace(presence, expires_ms=expires_ms)
        signed = sign_presence(dated, self._host.identity.sign)
        key = presence_key(presence.run_digest, shard_of(presence.peer_id))
        if (seal := self._seals.get(presence.run_digest)) is not None:
            signer = self._host.identity.sign
            signed = seal.close(key, signed, expires_ms, signer)
            key = sealed_key(seal.slot(key))
        subkey = base58.b58decode(presence.peer_id)
        reason = await self._store(key, signed, expires_ms / 1000, subkey)
        return self._accepted(signed.kind, reason)

    async def present_peers(self, run_digest: str) -> list[Presence]:
        """Peers that say that they take part in a run, sorted by peer id: a hint, and a recent
        one."""
        self._validator.own(run_digest)
        found = await self._get(self._presence_keys(run_digest))
        present = presences_in(found, run_digest, self._seals.get(run_digest))
        for presence in present.values():
            self._remember(presence)
        return [present[peer_id] for peer_id in sorted(present)]

    async def present_at(self, peer_ids: Sequence[str], run_digest: str) -> list[Presence]:
        """Peers whose presences these nodes hold, sorted by peer id. The peers brought them there
        themselves. Others that the directory finds may be inventions of the node that answers."""
        by_node = await self.present_by_node(peer_ids, run_digest)
        found = {presence.peer_id: presence for node in by_node for presence in node}
        return [found[peer_id] for peer_id in sorted(found)]

    async def present_by_node(
        self, peer_ids: Sequence[str], run_digest: str
    ) -> list[list[Presence]]:
        """As `present_at`, but for each node apart: what one invents hides nothing that others
        hold."""
        self._validator.own(run_digest)
        keys = self._presence_keys(run_digest)
        ids = {key: DHTID.generate(source=key) for key in keys}
        asked = [
            self._node.protocol.call_find(PeerID.from_base58(peer_id), list(ids.values()))
            for peer_id in peer_ids
            if peer_id != self._host.peer_id
        ]
        answers = await asyncio.gather(*map(self._bounded, asked), return_exceptions=True)
        by_node = []
        for answer in answers:
            items = answer.values() if isinstance(answer, dict) else ()
            values = [it[0].value for it in items if it[0] is not None]
            present = presences_in(values, run_digest, self._seals.get(run_digest))
            by_node.append([present[peer_id] for peer_id in sorted(present)])
        return by_node

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that this one has met or heard of, sorted."""
        table = self._node.protocol.routing_table
        return tuple(sorted(peer.to_base58() for peer in table.uid_to_peer_id.values()))

    def _presence_keys(self, run_digest: str) -> list[str]:
        keys = [presence_key(run_digest, shard) for shard in range(SHARDS)]
        seal = self._seals.get(run_digest)
        return keys if seal is None else [sealed_key(seal.slot(key)) for key in keys]

    def _drop(self, key: bytes) -> None:
        """Drop a run spec that gives way to a newer one."""
        key_id = DHTID.from_bytes(key)
        if key_id in self._node.protocol.storage:
            del self._node.protocol.storage[key_id]

    def _ask_for_run(self, run_digest: str) -> None:
        """Look for a run after a presence in it was refused as unknown. If the run exists, the next
        presence is let in."""
        now_s = now.monotonic_s()
        if now_s - self._asked_s < ASK_FOR_RUNS_S or self._asking:
            return
        self._asked_s = now_s
        task = asyncio.create_task(self._look_for_run(run_digest))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _look_for_run(self, run_digest: str) -> None:
        with contextlib.suppress(Unreachable):
            if await self.fetch_run(run_digest) is not None:
                self._validator.learn(run_digest)

    async def publish_facts(
        self,
        run_digest: str,
        record: Signed,
        place: PublishedPart | None,
        expires_in_s: float = FACTS_TTL_S,
    ) -> bool:
        """Publish what this peer can do and does. False (and logged) if refused."""
        assert record.peer_id == self._host.peer_id, "facts are published by their own peer"
        expires_ms = int((get_dht_time() + expires_in_s) * 1000)
        signed = sign_facts(PublishedFacts(expires_ms, record, place), self._host.identity.sign)
        key = facts_key(run_digest, record.peer_id)
        reason = await self._store(key, signed, expires_ms / 1000, None)
        return self._accepted(signed.kind, reason)

    def _accepted(self, kind: str, reason: str | None) -> bool:
        """Whether the value was accepted. Nodes that do not know the run yet refuse, look for it,
        and accept what comes next. So only several refusals in a row are logged."""
        self._refusals[kind] = 0 if reason is None else self._refusals[kind] + 1
        if self._refusals[kind] == WORTH_SAYING:
            log.warning(REFUSED, kind, reason)
        return reason is None

    async def facts_of(self, run_digest: str, peer_ids: Sequence[str]) -> dict[str, Facts]:
        """What these members publish of themselves, checked: a hint. Members that publish nothing
        are left out."""
        found: dict[str, Facts] = {}
        self._validator.own(run_digest)
        for start in range(0, len(peer_ids), FACTS_AT_ONCE):
            keys = [facts_key(run_digest, it) for it in peer_ids[start : start + FACTS_AT_ONCE]]
            found |= facts_in(await self._get(keys), run_digest)
        return {peer_id: found[peer_id] for peer_id in sorted(found) if peer_id in peer_ids}

    async def publish_run(self, run_digest: str, signed: Signed) -> bool:
        """Publish a run spec; kept alive by `refresh`. False (and logged) if refused."""
        open_run(signed, run_digest)
        if run_digest in self._seals:
            return True  # only those who are let in are told of it
        self._runs[run_digest] = signed
        self._validator.own(run_digest)
        expires_s = get_dht_time() + RUN_TTL_S
        reason = await self._store(run_key(run_digest), signed, expires_s, None)
        if reason is None:
            return True
        # A copy that lives longer is as good: its name is the digest of its content.
        if await self.fetch_run(run_digest) is not None:
            return True
        log.warning(REFUSED, signed.kind, reason)
        return False

    async def fetch_run(self, run_digest: str) -> Signed | None:
        """The run spec of that name, or None."""
        return run_in(await self._get([run_key(run_digest)]), run_digest)

    async def meet(self, peer_ids: Sequence[str]) -> None:
        """Learn of peers to which the host is connected as nodes of the directory, all at once."""
        pings = (self._node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peer_ids)
        await asyncio.gather(*map(self._bounded, pings), return_exceptions=True)

    async def refresh(self) -> bool:
        """Publish again what this peer published: to be called each third of the TTL.

        Calls lost nodes first. False if refused.
        """
        if not await self.meet_again() and not self.nodes:
            await self._meet_anybody()
        accepted = True  # runs first: presences are only taken in known runs
        for run_digest, signed in list(self._runs.items()):
            accepted = await self.publish_run(run_digest, signed) and accepted
        if self._presence is not None:
            presence, ttl_s = self._presence, self._presence_ttl_s
            accepted = await self.publish_presence(presence, ttl_s) and accepted
        return accepted

    async def close(self) -> None:
        """Stop answering as a DHT node. The host lives on."""
        for task in self._asking:
            task.cancel()
        if self._node.cache_refresh_task is not None:
            self._node.cache_refresh_task.cancel()
        if self._host.lost.is_set():
            self._node.is_alive = False  # p2pd is gone, and cannot be told
            return
        try:
            await asyncio.wait_for(self._node.shutdown(), OPERATION_DEADLINE_S)
        except TimeoutError:
            log.warning("the directory did not close in time")

    async def _store(
        self, key: str, signed: Signed, expires_s: float, subkey: bytes | None
    ) -> str | None:
        """Store a value. Returns why it was not stored, or None if it was."""
        value = encode(signed)
        reason = DirectoryValidator.refusal(key_bytes(key), subkey, value, expires_s)
        if reason is None:
            stored = await self._bounded(self._node.store(key, value, expires_s, subkey=subkey))
            if not stored:
                return "other nodes hold a later one, or did not accept it"
        return reason

    async def _get(self, keys: list[str]) -> list[object]:
        # Take only the latest. A plain get answers from whatever is nearest, which is stale.
        latest = float("inf")
        found = await self._bounded(
            self._node.get_many(keys, sufficient_expiration_time=latest, beam_size=ASKED_NODES)
        )
        return [item.value for item in (found or {}).values() if item is not None]

    async def _bounded(self, operation: Coroutine[Any, Any, Result]) -> Result:
        if self._host.lost.is_set():
            operation.close()
            raise Unreachable(self._host.peer_id, "the libp2p daemon of this peer has ended")
        try:
            async with asyncio.timeout(OPERATION_DEADLINE_S):
                return await operation
        except Exception as error:  # others' words may raise anything in hivemind
            self._note_unexpected(error)
            said = "" if isinstance(error, TimeoutError) else f": {one_line(repr(error))}"
            raise Unreachable(self._host.peer_id, f"the DHT did not answer{said}") from error

    def _note_unexpected(self, error: Exception) -> None:
        """Log an error that may be a mistake of ours, once of each kind: what fails is asked again
        soon."""
        if isinstance(error, CONNECTION_ERRORS) or type(error) in self._unexpected:
            return  # a timeout is an OSError
        self._unexpected.add(type(error))
        log.warning("unexpected, of the directory", exc_info=error)

    def _remember(self, presence: Presence) -> None:
        if len(self._acquaintances) < 64 and presence.peer_id != self._host.peer_id:
            for address in presence.addresses[:1]:
                suffix = f"/p2p/{presence.peer_id}"
                self._acquaintances[presence.peer_id] = (address.removesuffix(suffix),)

    async def meet_again(self) -> bool:
        """Call initial peers that the node no longer knows, and say whether one answers. A peer
        that was started again knows nobody, and newcomers come through it. After half a minute
        without a network the node knows no node any more. It then asks connected members, which are
        nodes as well."""
        absent = self._initial.keys() - set(self.nodes)
        due = self._lost.due(sorted(absent), now.monotonic_s())
        called = await asyncio.gather(*(self._call_again(it, self._initial[it]) for it in due))
        if not self.nodes:
            with contextlib.suppress(Unreachable):
                connected = await self._host.connected_peers()
                known = [it for it in connected if self._host.calling.trusts(it)]
                await self.meet(chance.sample(known, min(len(known), ASKED_NODES)))
        return any(called)

    async def _meet_anybody(self) -> None:
        for peer_id, addresses in list(self._acquaintances.items()):
            if await self._call_again(peer_id, addresses):
                return

    async def _call_again(self, peer_id: str, addresses: Sequence[str]) -> bool:
        protocol = self._node.protocol
        with contextlib.suppress(Unreachable):
            await self._host.connect(peer_id, addresses, 5.0)
            if await self._bounded(protocol.call_ping(PeerID.from_base58(peer_id))) is not None:
                await protocol.whereabouts.greet(peer_id)  # perhaps nobody has told it yet
                return True
        return False


def _not_joined(
    initial_peers: list[str], turned_away: dict[str, str], error: Exception
) -> UserError:
    causes = [f"{peer_id}: {_in_words(cause)}" for peer_id, cause in turned_away.items()]
    asked = set(peer_ids_of(initial_peers))
    causes += [f"{peer_id}: {NO_NODE}" for peer_id in sorted(asked - turned_away.keys())]
    cause = "; ".join(causes) if turned_away else one_line(str(error) or "it took too long")
    fixes = [
        "see that these addresses belong to p2p-dtfm daemons of this version",
        "see that the other daemon can connect back to this one",
    ]
    clocks = [peer_id for peer_id, why in turned_away.items() if _CLOCK in why]
    if asked and len(clocks) == len(asked):  # of several clocks the odd one is most likely here
        fixes = ["set this machine's clock, for example: timedatectl set-ntp true"]
    elif clocks:
        fixes.append("see that the clock of each machine is set: timedatectl set-ntp true")
    return UserError(
        f"could not join the directory through {', '.join(initial_peers)}: {cause}",
        tuple(fixes),
        exit_code=UNREACHABLE,
    )


def _in_words(refusal: str) -> str:
    """hivemind's refusal in words for the user."""
    if _CLOCK in refusal:
        return "its clock and this machine's differ by more than 3 s"
    return "it cannot connect back to this peer, or keeps to its own run"
