"""The directory: how peers of a run meet, in a DHT that everybody may write to.

Keys are named by their content, so that a validator needs to know no run beforehand:

    p2p-dtfm/1/presence/RUN/SHARD   dictionary: 38-byte peer id -> Signed presence
    p2p-dtfm/1/run/RUN              Signed run spec whose payload has the digest RUN

A peer's shard follows from its id. What is read here is a hint: two readers may see different
peers at one instant, and a plan is never computed from it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import base58
import msgspec

from p2p_dtfm.core.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.errors import PeerFault, UserError
from p2p_dtfm.core.signed import Sign, Signed, open_signed, sign
from p2p_dtfm.net.addresses import parse_address
from p2p_dtfm.net.errors import Unreachable, one_line
from p2p_dtfm.net.host import CONNECTION_ERRORS, Host
from p2p_dtfm.net.identity import is_peer_id, verify
from p2p_dtfm.net.libp2p import (
    DHTID,
    DHTNode,
    DHTRecord,
    DHTRefusal,
    MSGPackSerializer,
    PeerID,
    RecordValidatorBase,
    get_dht_time,
)

Result = TypeVar("Result")

PRESENCE_KIND = "presence"
RUN_KIND = "run"
VALUE_LIMIT_BYTES = 4096
SHARDS = 4
PEERS_PER_SHARD_LIMIT = 900
"""With values of 4 KiB a full shard stays below 4 MiB, above which a DHT reply is lost."""
PRESENCE_TTL_S = 90.0
RUN_TTL_S = 600.0
LONGEST_TTL_S = 3600.0
ADDRESSES_LIMIT = 16
ADDRESS_LIMIT_CHARACTERS = 200
OPERATION_DEADLINE_S = 20.0
# clocks may differ by as much as the DHT itself tolerates
_SKEW_S = 3.0

log = logging.getLogger(__name__)


class Presence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That a peer takes part in a run, and where it is reached. Addresses are full multiaddrs."""

    peer_id: str
    life: int
    addresses: tuple[str, ...]
    run_digest: str
    expires_ms: int = 0
    """Unix time. The signature covers it, so nobody but the peer can keep it alive."""


def sign_presence(presence: Presence, signer: Sign) -> Signed:
    """The presence as its peer publishes it."""
    return sign(presence.peer_id, PRESENCE_KIND, encode(presence), signer)


def open_presence(signed: Signed) -> Presence:
    """Check signature, owner and limits. Raises `PeerFault`."""
    presence = open_signed(signed, PRESENCE_KIND, Presence, verify)
    if presence.peer_id != signed.peer_id:
        raise PeerFault(f"signed a presence of {one_line(presence.peer_id, 60)}", signed.peer_id)
    if not 0 <= presence.life < 1 << 60 or not 0 <= presence.expires_ms < 1 << 60:
        raise PeerFault("a presence with a number below 0 or above 2^60", signed.peer_id)
    if len(presence.addresses) > ADDRESSES_LIMIT:
        raise PeerFault(f"a presence with {len(presence.addresses)} addresses", signed.peer_id)
    if any(len(address) > ADDRESS_LIMIT_CHARACTERS for address in presence.addresses):
        raise PeerFault("a presence with an overlong address", signed.peer_id)
    return presence


def sign_run(run_spec_bytes: bytes, peer_id: str, signer: Sign) -> Signed:
    """A run spec (`RunSpec.canonical_bytes()`) as a peer publishes it."""
    return sign(peer_id, RUN_KIND, run_spec_bytes, signer)


def open_run(signed: Signed, run_digest: str) -> bytes:
    """The canonical bytes of the run spec named `run_digest`. Raises `PeerFault`."""
    run_spec = open_signed_bytes(signed, RUN_KIND)
    if digest_bytes(run_spec) != run_digest:
        raise PeerFault(
            f"a run spec with digest {digest_bytes(run_spec)[:12]} under the name "
            f"{one_line(run_digest[:12])}",
            signed.peer_id,
        )
    return run_spec


def open_signed_bytes(signed: Signed, kind: str) -> bytes:
    """The payload of a statement of `kind` whose signature holds. Raises `PeerFault`."""
    open_signed(signed, kind, msgspec.Raw, verify)
    return signed.payload


class Directory:
    """This peer's node of the DHT, beside its host's p2pd. Made by `start`."""

    def __init__(self, host: Host, node: DHTNode, initial_peers: Sequence[str]) -> None:
        self._host = host
        self._node = node
        self._acquaintances = dict(parse_address(address) for address in initial_peers)
        self._presence: Presence | None = None
        self._presence_ttl_s = PRESENCE_TTL_S
        self._runs: dict[str, Signed] = {}

    @classmethod
    async def start(
        cls, host: Host, initial_peers: Sequence[str] = (), serves: bool = True
    ) -> "Directory":
        """Join the DHT through peers to which the host is connected.

        One that others cannot call asks and does not serve: `serves` is False.
        Raises `UserError` with exit code 6 when none of them answers as a DHT node.
        """
        others = [at for at in initial_peers if parse_address(at)[0] != host.peer_id]
        try:
            node = await asyncio.wait_for(
                DHTNode.create(
                    p2p=host.p2p,
                    initial_peers=others,
                    record_validator=DirectoryValidator(),
                    client_mode=not serves,
                    # a cache would answer with members that are gone
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                ),
                OPERATION_DEADLINE_S,
            )
        except (TimeoutError, DHTRefusal, *CONNECTION_ERRORS) as error:
            raise _not_joined(others, error) from error
        return cls(host, node, others)

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
        subkey = base58.b58decode(presence.peer_id)
        return await self._store(key, signed, expires_ms / 1000, subkey)

    async def withdraw_presence(self) -> None:
        """Stop refreshing the presence: it expires by itself."""
        self._presence = None

    async def present_peers(self, run_digest: str) -> list[Presence]:
        """Who says that it takes part in a run, sorted by peer id: a hint, and a recent one."""
        keys = [presence_key(run_digest, shard) for shard in range(SHARDS)]
        found = await self._get(keys)
        present = {}
        for value in found:
            entries = value if isinstance(value, dict) else {}
            for entry in entries.values():
                presence = _try_open_presence(entry.value)
                if presence is not None and presence.run_digest == run_digest:
                    present[presence.peer_id] = presence
                    self._host.know(presence.peer_id, presence.addresses)
                    self._remember(presence)
        return [present[peer_id] for peer_id in sorted(present)]

    async def publish_run(self, run_digest: str, signed: Signed) -> bool:
        """Publish a run spec; kept alive by `refresh`. False (and logged) if refused."""
        open_run(signed, run_digest)
        self._runs[run_digest] = signed
        if await self._store(run_key(run_digest), signed, get_dht_time() + RUN_TTL_S, None):
            return True
        # a copy that lives longer is as good: its name is the digest of its content
        return await self.fetch_run(run_digest) is not None

    async def fetch_run(self, run_digest: str) -> Signed | None:
        """The run spec of that name, or None."""
        for value in await self._get([run_key(run_digest)]):
            if isinstance(value, bytes):
                try:
                    signed = decode(value, Signed, VALUE_LIMIT_BYTES)
                    open_run(signed, run_digest)
                except PeerFault as fault:
                    log.warning("run spec in the directory: %s", fault)
                    continue
                return signed
        return None

    async def meet(self, peer_ids: Sequence[str]) -> None:
        """Learn of peers to which the host is connected as nodes of the directory, all at once."""
        pings = (self._node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peer_ids)
        await asyncio.gather(*map(self._bounded, pings), return_exceptions=True)

    async def refresh(self) -> bool:
        """Publish again what this peer published: to be called each third of the TTL.

        When all other DHT nodes were lost, known peers are tried first. False if refused.
        """
        if not self._node.protocol.routing_table.uid_to_peer_id:
            await self._meet_again()
        accepted = True
        if self._presence is not None:
            accepted = await self.publish_presence(self._presence, self._presence_ttl_s)
        for run_digest, signed in list(self._runs.items()):
            accepted = await self.publish_run(run_digest, signed) and accepted
        return accepted

    async def close(self) -> None:
        """Stop answering as a DHT node. The host lives on."""
        if self._node.cache_refresh_task is not None:
            self._node.cache_refresh_task.cancel()
        if self._host.lost.is_set():
            self._node.is_alive = False  # p2pd, which would be told, is gone
            return
        try:
            await asyncio.wait_for(self._node.shutdown(), OPERATION_DEADLINE_S)
        except TimeoutError:
            log.warning("the directory did not close in time")

    async def _store(
        self, key: str, signed: Signed, expires_s: float, subkey: bytes | None
    ) -> bool:
        value = encode(signed)
        reason = DirectoryValidator.refusal(_key_bytes(key), subkey, value, expires_s)
        if reason is None:
            stored = await self._bounded(self._node.store(key, value, expires_s, subkey=subkey))
            if stored:
                return True
            reason = "other nodes hold a later one, or did not accept it"
        log.warning("the directory refused to publish a %s: %s", signed.kind, reason)
        return False

    async def _get(self, keys: list[str]) -> list[object]:
        # only the latest: a plain get answers from whatever is nearest, which is stale
        latest = float("inf")
        found = await self._bounded(self._node.get_many(keys, sufficient_expiration_time=latest))
        return [item.value for item in (found or {}).values() if item is not None]

    async def _bounded(self, operation: Coroutine[Any, Any, Result]) -> Result:
        if self._host.lost.is_set():
            operation.close()
            raise Unreachable(self._host.peer_id, "the libp2p daemon of this peer has ended")
        try:
            return await asyncio.wait_for(operation, OPERATION_DEADLINE_S)
        except TimeoutError as error:
            raise Unreachable(self._host.peer_id, "the DHT did not answer") from error

    def _remember(self, presence: Presence) -> None:
        if len(self._acquaintances) < 64 and presence.peer_id != self._host.peer_id:
            for address in presence.addresses[:1]:
                self._acquaintances[presence.peer_id] = address.removesuffix(
                    f"/p2p/{presence.peer_id}"
                )

    async def _meet_again(self) -> None:
        for peer_id, address in list(self._acquaintances.items()):
            try:
                await self._host.connect(peer_id, [address], 5.0)
            except Unreachable:
                continue
            if await self._bounded(self._node.protocol.call_ping(PeerID.from_base58(peer_id))):
                return


def _not_joined(initial_peers: list[str], error: Exception) -> UserError:
    cause = one_line(str(error) or "it took too long")
    fixes = [
        "see that these addresses belong to p2p-dtfm daemons of this version",
        "see that the other daemon can connect back to this one",
    ]
    if "local time" in cause:
        fixes = ["set this machine's clock, for example: timedatectl set-ntp true"]
    return UserError(
        f"could not join the directory through {', '.join(initial_peers)}: {cause}",
        tuple(fixes),
        exit_code=6,
    )


def _try_open_presence(value: object) -> Presence | None:
    if not isinstance(value, bytes):
        return None
    try:
        return open_presence(decode(value, Signed, VALUE_LIMIT_BYTES))
    except PeerFault as fault:
        log.debug("presence in the directory: %s", fault)
        return None


def presence_key(run_digest: str, shard: int) -> str:
    return f"p2p-dtfm/1/presence/{run_digest}/{shard}"


def run_key(run_digest: str) -> str:
    return f"p2p-dtfm/1/run/{run_digest}"


def shard_of(peer_id: str) -> int:
    """The shard of a run's members in which a peer stands."""
    return hashlib.blake2b(peer_id.encode(), digest_size=1).digest()[0] % SHARDS


def _key_bytes(key: str) -> bytes:
    """The key as the DHT knows it: a hash."""
    return bytes(DHTID.generate(source=key).to_bytes())


class DirectoryValidator(RecordValidatorBase):  # type: ignore[misc]
    """What a node of ours stores for others: only values whose key, owner and size are right."""

    def __init__(self) -> None:
        self._members: dict[bytes, dict[bytes, float]] = {}

    def validate(self, record: DHTRecord) -> bool:
        reason = self._refusal_of_record(record)
        if reason is not None:
            log.debug("refused a value for the directory: %s", reason)
        return reason is None

    def _refusal_of_record(self, record: DHTRecord) -> str | None:
        if len(record.value) > VALUE_LIMIT_BYTES + 8 or len(record.subkey or b"") > 64:
            return f"a value of {len(record.value)} bytes"
        try:
            value = MSGPackSerializer.loads(record.value)
            subkey = MSGPackSerializer.loads(record.subkey) if record.subkey else None
        except Exception as error:  # whatever msgpack makes of a stranger's bytes
            log.debug("undecodable value", exc_info=True)
            return f"undecodable bytes: {error!r}"
        if not isinstance(value, bytes) or not isinstance(subkey, bytes | None):
            return "a value that is not bytes"
        reason = self.refusal(record.key, subkey, value, record.expiration_time)
        if reason is None and subkey is not None and not self._has_room(record, subkey):
            return "its shard is full"
        return reason

    @staticmethod
    def refusal(key: bytes, subkey: bytes | None, value: bytes, expires_s: float) -> str | None:
        """Why a value is refused, or None."""
        now = get_dht_time()
        if not now - _SKEW_S < expires_s < now + LONGEST_TTL_S + _SKEW_S:
            return f"expires in {expires_s - now:.0f} s, at most {LONGEST_TTL_S:.0f}"
        try:
            signed = decode(value, Signed, VALUE_LIMIT_BYTES)
            if signed.kind == PRESENCE_KIND:
                return _refusal_of_presence(key, subkey, signed, expires_s)
            if signed.kind == RUN_KIND:
                return _refusal_of_run(key, subkey, signed)
        except PeerFault as fault:
            return fault.cause
        return f"unknown kind {one_line(signed.kind, 32)!r}"

    def _has_room(self, record: DHTRecord, subkey: bytes) -> bool:
        """Bounds the members of a shard, or one writer could make it unreadable for all."""
        now = get_dht_time()
        members = self._members.setdefault(record.key, {})
        if subkey not in members and len(members) >= PEERS_PER_SHARD_LIMIT:
            self._members[record.key] = members = {
                member: expires for member, expires in members.items() if expires > now
            }
            if len(members) >= PEERS_PER_SHARD_LIMIT:
                return False
        members[subkey] = max(record.expiration_time, members.get(subkey, 0.0))
        self._forget_expired(now)
        return True

    def _forget_expired(self, now: float) -> None:
        if len(self._members) > 1024:
            self._members = {
                key: members
                for key, members in self._members.items()
                if max(members.values(), default=0.0) > now
            }


def _refusal_of_presence(
    key: bytes, subkey: bytes | None, signed: Signed, expires_s: float
) -> str | None:
    if not is_peer_id(signed.peer_id) or subkey != base58.b58decode(signed.peer_id):
        return "a presence under the name of another peer"
    presence = open_presence(signed)
    if key != _key_bytes(presence_key(presence.run_digest, shard_of(presence.peer_id))):
        return "a presence under a key that is not its own"
    if expires_s != presence.expires_ms / 1000:
        return "a presence that expires at another time than its peer signed"
    return None


def _refusal_of_run(key: bytes, subkey: bytes | None, signed: Signed) -> str | None:
    if subkey is not None:
        return "a run spec is not part of a dictionary"
    run_spec = open_signed_bytes(signed, RUN_KIND)
    if key != _key_bytes(run_key(digest_bytes(run_spec))):
        return "a run spec under a name that is not its digest"
    return None
