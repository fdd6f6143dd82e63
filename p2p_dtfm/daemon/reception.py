"""What arrives from other peers: calls, frames, and requests for blobs."""

import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from p2p_dtfm.core.agreement_messages import Contribution, Heartbeat, JoinRequest
from p2p_dtfm.core.canonical import decode, encode
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.records import PROTOCOL_VERSION, open_record
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.step import SignedPrepared, Statement, open_prepared
from p2p_dtfm.daemon.courier import PEERS_LIMIT
from p2p_dtfm.daemon.trainer_outlet import TrainerOutlet
from p2p_dtfm.daemon.wire import (
    AGREEMENT,
    CheckpointFiles,
    FollowDone,
    FollowEnded,
    FollowLayers,
    Hello,
    KnownPeers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    Message,
    PeerAddress,
    TraceRequest,
    Welcome,
    unpack,
)
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.frames import FrameHeader
from p2p_dtfm.net.identity import verify
from p2p_dtfm.train.model import layer_count

log = logging.getLogger("p2p_dtfm")

FOLLOWING = (
    FollowLayers,
    LayerOffered,
    LayersCommitted,
    LayerReceipt,
    FollowEnded,
    FollowDone,
)


class Reception(TrainerOutlet):
    """Hands each message to who has to do with it; what is not due is its sender's fault."""

    async def _serve(self, sender: str, body: bytes) -> bytes:
        _, message = unpack(body)
        self._courier.heard(sender)
        if isinstance(message, Hello):
            return await self._welcome(sender, message)
        if self._agreement is None or self._trainer is None:
            raise PeerFault("this peer does not take part in a run yet", sender)
        if isinstance(message, TraceRequest):
            if sender not in self._members():
                raise PeerFault("asks for traces without a place in the view", sender)
            return self._traces.answer(message)
        try:
            self._receive(sender, message)
        except PeerFault as fault:
            log.warning("refused a %s of %s: %s", type(message).__name__, sender, fault.cause)
            raise
        return encode(self._known_peers()) if isinstance(message, JoinRequest) else b""

    def _known_peers(self) -> KnownPeers:
        """Members, and newcomers that wait, for another newcomer."""
        assert self._agreement is not None
        view = self._agreement.view
        records = (*(view.snapshot.records if view else ()), *self._agreement.joiners)
        return KnownPeers(tuple(PeerAddress(r.peer_id, r.addresses) for r in records))

    def _receive(self, sender: str, message: Message) -> None:
        assert self._agreement is not None and self._trainer is not None
        if isinstance(message, AGREEMENT):
            actions = self._agreement.receive(sender, message, time.monotonic_ns())
            self._learn_addresses(message)
            if isinstance(message, Heartbeat):
                assert self._step_watch is not None
                self._step_watch.heard(sender, message.progress, message.work)
            self._do(actions)
        elif isinstance(message, SignedPrepared):
            if message.signed.peer_id != sender:
                raise PeerFault("says Prepared for another peer", sender)
            prepared = open_prepared(message.signed, verify)
            self._trainer.prepared(Statement(prepared, message.signed))
        elif isinstance(message, FOLLOWING):
            if isinstance(message, FollowLayers):
                self._require_follower(sender, message)
            self._trainer.following(sender, message)
        elif isinstance(message, CheckpointFiles):
            assert self._checkpoints is not None
            if sender in self._members():
                self._checkpoints.remote_files(sender, message)

    def _require_follower(self, sender: str, message: FollowLayers) -> None:
        """State goes to members; while a view is being agreed on, the others may know it first."""
        assert self._agreement is not None and self._run is not None
        if sender not in self._members() and not self._agreement.attempting:
            raise PeerFault("asks for layers without a place in the view", sender)
        layers = range(layer_count(self._run.spec))
        if len(message.layers) > len(layers) or not set(message.layers) <= set(layers):
            raise PeerFault("asks for layers that there are not", sender)

    def _learn_addresses(self, message: Any) -> None:
        """Newcomers must be answered before any view names them."""
        if isinstance(message, JoinRequest):
            self._learn_from_record(message.record)
        for contribution in getattr(message, "contributions", ()):
            self._learn_from_record(decode(contribution.payload, Contribution).record)
        for signed in getattr(message, "newcomers", ()):
            self._learn_from_record(signed)

    def _learn_from_record(self, signed: Signed) -> None:
        """Where its signer says that it is; nobody else may say that."""
        assert self._run is not None
        if self._learnt.get(signed.peer_id) == signed:
            return
        try:
            record = open_record(signed, self._run.digest, verify)
        except PeerFault as fault:
            log.debug("addresses not learnt: %s", fault)
            return
        self._courier.learn(record.peer_id, record.addresses)
        if len(self._learnt) >= PEERS_LIMIT:
            self._learnt.clear()
        self._learnt[signed.peer_id] = signed

    async def _welcome(self, sender: str, message: Hello) -> bytes:
        if self._run is None or self._agreement is None:
            raise PeerFault("this peer has no run yet, try again in a moment", sender)
        if message.protocol_version != PROTOCOL_VERSION:
            log.warning("%s speaks protocol %d", sender, message.protocol_version)
        self._courier.learn(sender, message.addresses)
        own = PeerAddress(self._me.peer_id, await self._host.addresses())
        view = self._agreement.view
        records = view.snapshot.records if view is not None else ()
        peers = [PeerAddress(record.peer_id, record.addresses) for record in records]
        others = [peer for peer in peers if peer.peer_id not in (sender, own.peer_id)]
        return encode(
            Welcome(
                PROTOCOL_VERSION,
                self._run.signed_spec,
                (own, *others),
                self._agreement.step,
                len(records),
                self._measured_rate(),
            )
        )

    def _on_frame(
        self, sender: str, header: FrameHeader, payload: bytearray
    ) -> Coroutine[Any, Any, None]:
        if self._trainer is None:
            raise PeerFault("a tensor before this peer takes part", sender)
        self._courier.heard(sender)
        return self._trainer.frame(sender, header, payload)

    def _on_fault(self, sender: str, fault: PeerFault) -> None:
        log.warning("disconnected %s: %s", sender, fault.cause)
        if self._trainer is not None:
            self._trainer.stream_lost(sender)

    def _on_lost(self, peer_id: str, lane: str, error: Unreachable) -> None:
        log.debug("stream %s with %s: %s", lane, peer_id, error.cause)
        self._liveness.stream_reset(peer_id, time.monotonic_ns())

    def _open_blob(self, digest: str) -> Path | bytes | None:
        if self._run is not None and (path := self._run.blobs.path(digest)) is not None:
            return path
        if self._trainer is not None and (offer := self._offers.find(digest)) is not None:
            return offer
        return self._checkpoints.path_of(digest) if self._checkpoints is not None else None
