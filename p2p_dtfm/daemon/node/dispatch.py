"""What arrives from other peers: calls, frames, and requests for blobs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2p_dtfm.core.audit.work import require_signed, require_signed_audit
from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.core.gate.gate_table import Role
from p2p_dtfm.core.membership.bars import bar_ends_step, barred_at
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Gather,
    Heartbeat,
    JoinRequest,
    Spread,
    Tidings,
)
from p2p_dtfm.core.messages.audit_messages import Audited, Claimed, ShownClaims
from p2p_dtfm.core.messages.prepared import PreparedSteps, SignedPrepared, Statement, open_prepared
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.gate import UNPAID
from p2p_dtfm.daemon.peers.held_back import LIMIT as STATEMENTS_LIMIT
from p2p_dtfm.daemon.peers.messenger import PEERS_LIMIT
from p2p_dtfm.daemon.peers.wire import (
    AGREEMENT,
    Barred,
    CheckpointFiles,
    ConfirmLayers,
    CutBegun,
    CutReceipt,
    FollowDone,
    FollowEnded,
    FollowLayers,
    Hello,
    Introduction,
    Knock,
    KnownPeers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    Message,
    PeerAddress,
    Revocations,
    StateDigest,
    TraceRequest,
    TranscriptRequest,
    WaitingPeer,
    Welcome,
    with_room,
)
from p2p_dtfm.daemon.proof.of_others import answer_with_piece
from p2p_dtfm.daemon.trainer.followers import NOT_NAMED
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.contacts.identity import effort_spent
from p2p_dtfm.ports import now, rarely
from p2p_dtfm.train.model.gpt import layer_count

log = logging.getLogger("p2p_dtfm")

WAITING_TOLD_LIMIT = 32
WAITING_LIMIT_BYTES = 32 * 1024
"""Bytes of the waiting newcomers' addresses in one answer. Anybody may wait, and ask again and
again."""
FOLLOWING = (
    FollowLayers,
    ConfirmLayers,
    StateDigest,
    LayerOffered,
    LayersCommitted,
    LayerReceipt,
    CutBegun,
    CutReceipt,
    FollowEnded,
    FollowDone,
)

TOLD_EVERY_S = 10.0
TOLD_LIMIT = 256


class Dispatch:
    """Hands each message to the part that deals with it. A message that is not due is its sender's
    fault.

    It is what `network.Inside` asks for.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._membership = participant.membership
        self._agreement = participant.membership.agreement
        self._network = participant.network
        self._host = participant.network.host
        self._me = participant.network.me.peer_id
        self._keeper = participant.network.keeper
        self._run = participant.membership.run
        self._data_digests = frozenset(self._run.manifest.blobs())
        """Digests of the run's data shards and its tokenizer."""
        self._learnt: dict[str, Signed] = {}
        self._unlike_protocols = UnlikeProtocols()
        self._refused = RefusedMessages()
        self._told_of: tuple[View | None, tuple[PeerAddress, ...]] = (None, ())
        self._gathered = (0, 0)
        """(attempt, number of contributions) whose records this peer has learnt."""

    async def answer(self, sender: str, message: Message) -> bytes:
        await rarely.lingers("read late")
        if isinstance(message, Hello):
            return await self._welcome(sender, message)
        if isinstance(message, Knock):
            self._admit(sender, message)
            return b""
        if isinstance(message, Introduction | Revocations):
            self._of_guests(sender, message)
            return b""
        if isinstance(message, TraceRequest):
            return self._network.traces.answer(message)
        if isinstance(message, TranscriptRequest):
            return await answer_with_piece(self._participant.transcript, message)
        try:
            if isinstance(message, PreparedSteps):
                await self._receive_steps(sender, message)
            else:
                self._receive_paid(sender, message)
        except PeerFault as fault:
            kind, is_near = type(message).__name__, self._keeper.is_near(sender)
            self._keeper.blame(sender, kind)
            self._refused.tell(sender, kind, fault.cause, is_near=is_near)
            raise
        return encode(await self._known_peers(sender)) if isinstance(message, JoinRequest) else b""

    def _of_guests(self, sender: str, message: Introduction | Revocations) -> None:
        """Take an introduction or revocations to the guest book. In a run without invitations they
        mean nothing."""
        book = self._network.guest_book
        if book is None:
            return
        try:
            if isinstance(message, Introduction):
                book.introduced(sender, message.chain, self._keeper.came_before(sender))
            else:
                book.told_of(message.chains, self._keeper.came_before)
                book.revoked(message.signed)
        except PeerFault:
            self._keeper.blame(sender, type(message).__name__)
            raise

    async def _receive_steps(self, sender: str, message: PreparedSteps) -> None:
        """Take the statements one after another: each is counted before the next one is looked
        at."""
        if len(message.signed) > STATEMENTS_LIMIT:
            raise PeerFault(f"says Prepared of {len(message.signed)} steps at once", sender)
        for signed in message.signed:
            self._receive_paid(sender, SignedPrepared(signed))
            await self._participant.trainer.counted()

    def _admit(self, sender: str, message: Knock) -> None:
        """Admit a newcomer that is going to join this run, so that it gets what it needs for
        that."""
        if message.run_digest != self._run.digest:
            raise PeerFault("knocks for another run", sender)
        self._keeper.admissions.admit(sender, now.monotonic_ns())

    async def _known_peers(self, sender: str) -> KnownPeers:
        """The answer to a newcomer: the members, other newcomers that wait, and whether the sender
        is barred."""
        view, joiners = self._agreement.view, self._agreement.joiners
        joiners = joiners[:WAITING_TOLD_LIMIT]
        hosts = await self._host.calling.seen_hosts([it.peer_id for it in joiners])
        asking = with_room(((it.peer_id, it.addresses) for it in joiners), WAITING_LIMIT_BYTES)
        pairs = zip(asking, hosts, strict=True)
        waiting = [WaitingPeer(it.peer_id, it.addresses, host) for it, host in pairs]
        mine = () if view else (PeerAddress(self._me, await self._host.addresses()),)
        peers = (*mine, *self._members_told(view))
        lets_in, end = self._membership.lets_in(), self._agreement.proof_of_end
        step = self._agreement.step
        bar = barred_at(self._agreement.bars, step).get(sender)
        barred = None if bar is None else Barred(bar_ends_step(bar), step, bar.reason)
        return KnownPeers(peers, tuple(waiting), lets_in, end, barred)

    def _members_told(self, view: View | None) -> tuple[PeerAddress, ...]:
        """Where the members say that they are. It is computed once for each view."""
        if view is not self._told_of[0]:
            records = view.snapshot.records if view is not None else ()
            self._told_of = view, with_room((it.peer_id, it.addresses) for it in records)
        return self._told_of[1]

    def _receive_paid(self, sender: str, message: Message) -> None:
        """Receive a message, and charge its sender for the effort. Strangers and newcomers may cost
        this peer so much, and no more."""
        before = effort_spent()
        try:
            self._receive(sender, message)
        finally:
            if not isinstance(message, UNPAID):
                self._keeper.pays(sender, effort_spent() - before)

    def _receive(self, sender: str, message: Message) -> None:
        trainer = self._participant.trainer
        self._membership.actions.do([])  # what was put off comes first
        if isinstance(message, AGREEMENT):
            if isinstance(message, JoinRequest) and message.record.peer_id != sender:
                raise PeerFault("asks for another peer to be let in", sender)
            actions = self._agreement.receive(sender, message, now.monotonic_ns())
            if isinstance(message, JoinRequest):
                self._keeper.admissions.admit(sender, now.monotonic_ns())
                if self._network.guest_book is not None:
                    self._network.guest_book.asked(sender)
            if any(isinstance(action, Rejoin) for action in actions):
                # the sender may be of a swarm of which this peer knows nobody yet
                self._membership.asked_first = sender
            self._learn_addresses(message)
            if isinstance(message, Heartbeat):
                self._hear_heartbeat(sender, message)
            self._membership.actions.do(actions)
            if isinstance(message, Active | Tidings):
                trainer.wake()
        elif isinstance(message, SignedPrepared | Claimed | Audited):
            self._of_a_step(sender, message)
        elif isinstance(message, ShownClaims):
            trainer.shown(sender, message, self._membership.verify)
        elif isinstance(message, FOLLOWING):
            trainer.following(sender, message)
        elif isinstance(message, CheckpointFiles) and sender in self._membership.members():
            self._participant.checkpoints.remote_files(sender, message)

    def _of_a_step(self, sender: str, message: SignedPrepared | Claimed | Audited) -> None:
        trainer = self._participant.trainer
        if isinstance(message, Claimed):
            require_signed(message, sender, self._membership.verify)
        if isinstance(message, Audited):
            require_signed_audit(message, sender, self._membership.verify)
        if not isinstance(message, SignedPrepared):
            trainer.audited(sender, message)
            return
        if message.signed.peer_id != sender:
            self._passed_on(sender, message.signed)
            return
        try:
            prepared = open_prepared(message.signed, self._membership.verify)
        except PeerFault as fault:
            if sender in self._membership.members():  # all wait for a readable one
                self._participant.poison(sender, f"a Prepared that nobody says: {fault.cause}")
                # Its contribution is not heard either: else it would go on alone, and be let in
                # later like a peer that was away.
                self._agreement.turn_away(sender, now.monotonic_ns())
            raise
        trainer.prepared(Statement(prepared, message.signed))

    def _passed_on(self, sender: str, signed: Signed) -> None:
        """Take another member's Prepared of the open step. That member may have told all but this
        peer. Or take another one of the last step than that by which this peer has committed it.
        What a peer said that has gone since is not looked at. Raises `PeerFault`."""
        members = self._membership.members()
        ledger, held = self._agreement.ledger, self._agreement.said_of_last_step(signed.peer_id)
        has_gone = signed.peer_id not in members
        if sender not in members or (has_gone and held is None):
            raise PeerFault("says Prepared for another peer", sender)
        if has_gone:
            return
        is_lacked = ledger is not None and signed.peer_id in ledger.missing
        if not is_lacked and (held is None or held.payload == signed.payload):
            return  # the Prepared has come meanwhile
        try:
            prepared = open_prepared(signed, self._membership.verify)
        except PeerFault as fault:
            raise PeerFault(f"passes on a Prepared: {fault.cause}", sender) from fault
        statement = Statement(prepared, signed)
        if self._agreement.hears_unlike(statement):
            cause = f"{signed.peer_id} said two different Prepared for step {prepared.step}"
            self._participant.contradiction(cause)
        elif is_lacked and ledger and (prepared.view, prepared.step) == (ledger.view, ledger.step):
            self._participant.trainer.prepared(statement)

    def _hear_heartbeat(self, sender: str, message: Heartbeat) -> None:
        self._participant.step_watch.heard(sender, message.progress, message.work)
        if message.work is not None:
            self._participant.trainer.hear_work(sender, message.work)
        self._network.liveness.fellow_says(
            sender, message.missed, message.silent_ms, now.monotonic_ns()
        )
        if message.missed or message.silent_ms:
            self._network.evidence.set()

    def _learn_addresses(self, message: Any) -> None:
        """Learn where newcomers are, because they must be answered before any view names them. Only
        records that the agreement has opened are used, since its signer's word may count. All else
        that was passed on is left alone."""
        records: list[Signed] = [*getattr(message, "newcomers", ())]
        if isinstance(message, JoinRequest):
            records.append(message.record)
        if isinstance(message, Spread):
            records += message.bodies.records
        if isinstance(message, Gather | Spread):
            number, parts = self._agreement.gathered
            if (number, len(parts)) != self._gathered:
                self._gathered = number, len(parts)
                records += [part.record for part in parts]
        for signed in records:
            if self._learnt.get(signed.peer_id) != signed:
                self._learn_from_record(signed)

    def _learn_from_record(self, signed: Signed) -> None:
        """Learn where the record's signer says that it is. Nobody else may say that of it."""
        record = self._agreement.opened_record(signed)
        if record is None:
            return
        self._participant.local.observer.seen.names.hear(record.peer_id, record.called)
        is_member = self._keeper.role_of(record.peer_id) is Role.MEMBER
        if is_member and self._keeper.trusts(record.peer_id):
            self._network.messenger.learn(record.peer_id, record.addresses)
        else:
            self._network.messenger.hear_of(record.peer_id, record.addresses)
        if len(self._learnt) >= PEERS_LIMIT:
            self._learnt.clear()
        self._learnt[signed.peer_id] = signed

    async def _welcome(self, sender: str, message: Hello) -> bytes:
        if message.protocol_version != PROTOCOL_VERSION:
            self._unlike_protocols.tell(sender, message.protocol_version)
        self._network.messenger.hear_of(sender, message.addresses)
        own = PeerAddress(self._me, await self._host.addresses())
        view = self._agreement.view
        others = [
            peer for peer in self._members_told(view) if peer.peer_id not in (sender, own.peer_id)
        ]
        return encode(
            Welcome(
                PROTOCOL_VERSION,
                self._run.signed_spec,
                (own, *others),
                self._agreement.step_to_come,
                len(view.snapshot.records) if view is not None else 0,
                self._participant.measured_rate(),
                self._membership.lets_in(),
                self._agreement.proof_of_end,
                self._participant.local.settings.name,
            )
        )

    def require_may_have(self, sender: str, digest: str) -> None:
        """Refuse a file of the run that is not for `sender`; see `core.gate.gate_table`. Raises
        `PeerFault`."""
        data = self._run.manifest
        kind = "data" if digest in self._data_digests else "weights"
        if digest in (self._run.spec.data.manifest, data.tokenizer.digest):
            kind = "manifest"
        self._keeper.require(sender, kind)
        kept = self._run.spec.privacy.withheld(sender, layer_count(self._run.spec))
        if kept and (kind == "data" or self._is_of_ends(digest)):
            raise PeerFault(NOT_NAMED, sender)

    def _is_of_ends(self, digest: str) -> bool:
        """Whether a file here is of the first layer or the last one, in whichever place it lies."""
        it = self._participant
        return any(place.is_of_ends(digest) for place in (it.checkpoints, it.initial, it.offers))

    def open_blob(self, digest: str) -> Path | bytes | memoryview | None:
        if (path := self._run.blobs.path(digest)) is not None:
            return path
        if (offer := self._participant.offers.find(digest)) is not None:
            return offer
        if (part := self._participant.trainer.find_part(digest)) is not None:
            return part
        return self._participant.checkpoints.path_of(digest)

    def unread(self, digest: str) -> Callable[[], bool] | None:
        """See `Inside.unread`. Offers need none: this process wrote them."""
        return self._run.blobs.unread(digest) or self._participant.checkpoints.unread(digest)

    def name_of(self, digest: str) -> str:
        is_data = digest in self._data_digests
        return f"data shard {digest[:8]}" if is_data else f"states {digest[:8]}"

    def stream_lost(self, sender: str) -> None:
        self._participant.trainer.stream_lost(sender)


class RefusedMessages:
    """Logs whose messages are refused, of each near sender now and then. The gate lets one that was
    a member once say thousands in a second: the log would fill the disk."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def tell(self, sender: str, kind: str, cause: str, *, is_near: bool) -> None:
        now_s = now.monotonic_s()
        is_due = is_near and now_s - self._told_s.get(sender, -TOLD_EVERY_S) >= TOLD_EVERY_S
        untold = self._untold.pop(sender, 0) if is_due else 0
        more = f" ({counted(untold, 'other')} since the last one told)" if untold else ""
        level = logging.WARNING if is_due else logging.DEBUG
        log.log(level, "refused a %s of %s: %s%s", kind, sender, cause, more)
        if is_due:
            put_newest(self._told_s, sender, now_s, TOLD_LIMIT)
        elif is_near:
            put_newest(self._untold, sender, self._untold.get(sender, 0) + 1, TOLD_LIMIT)


class UnlikeProtocols:
    """Logs which peers speak another protocol. Each is told once, and not many at once, or
    strangers would fill the log."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._told_s = -TOLD_EVERY_S

    def tell(self, sender: str, version: int) -> None:
        now_s = now.monotonic_s()
        if self._told.get(sender) == version or now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        put_newest(self._told, sender, version, TOLD_LIMIT)
        log.warning("%s speaks protocol %d", sender, version)
