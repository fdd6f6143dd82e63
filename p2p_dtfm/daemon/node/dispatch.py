"""What arrives from other peers: calls, frames, and requests for blobs."""

import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.core.gate.gate_table import Role
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    Heartbeat,
    JoinRequest,
    Standing,
)
from p2p_dtfm.core.messages.prepared import PreparedSteps, SignedPrepared, Statement, open_prepared
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION, open_record
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.node.trainer_outlet import TrainerOutlet
from p2p_dtfm.daemon.peers.held_back import LIMIT as STATEMENTS_LIMIT
from p2p_dtfm.daemon.peers.messenger import PEERS_LIMIT
from p2p_dtfm.daemon.peers.wire import (
    AGREEMENT,
    CheckpointFiles,
    ConfirmLayers,
    CutBegun,
    CutReceipt,
    FollowDone,
    FollowEnded,
    FollowLayers,
    Hello,
    Knock,
    KnownPeers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    Message,
    PeerAddress,
    StateDigest,
    TraceRequest,
    WaitingPeer,
    Welcome,
    unpack,
)
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.train.model.gpt import layer_count

log = logging.getLogger("p2p_dtfm")

WAITING_TOLD_LIMIT = 32
LANE_KINDS = {
    "forward": (FrameKind.ACTIVATION,),
    "backward": (FrameKind.ACTIVATION_GRADIENT,),
    "reduce": (FrameKind.GRADIENT_PART, FrameKind.GRADIENT_SUM),
    "state": (FrameKind.LAYER_GRADIENT, FrameKind.LAYER_STATE),
}
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


class Dispatch(TrainerOutlet):
    """Hands each message to who has to do with it; what is not due is its sender's fault."""

    async def _serve(self, sender: str, body: bytes) -> bytes:
        _, message = unpack(body)
        self._keeper.require_message(sender, message, len(body))
        self._messenger.heard(sender)
        if isinstance(message, Hello):
            return await self._welcome(sender, message)
        if isinstance(message, Knock):
            self._admit(sender, message)
            return b""
        if self._agreement is None or self._trainer is None:
            raise PeerFault("this peer does not take part in a run yet", sender)
        if isinstance(message, TraceRequest):
            return self._traces.answer(message)
        try:
            if isinstance(message, PreparedSteps):
                await self._receive_steps(sender, message)
            else:
                self._receive(sender, message)
        except PeerFault as fault:
            self._keeper.blame(sender, message)
            level = logging.WARNING if self._keeper.is_near(sender) else logging.DEBUG
            log.log(level, "refused a %s of %s: %s", type(message).__name__, sender, fault.cause)
            raise
        return encode(await self._known_peers()) if isinstance(message, JoinRequest) else b""

    async def _receive_steps(self, sender: str, message: PreparedSteps) -> None:
        """One after another: each is counted before the next one is looked at."""
        assert self._trainer is not None
        if len(message.signed) > STATEMENTS_LIMIT:
            raise PeerFault(f"says Prepared of {len(message.signed)} steps at once", sender)
        for signed in message.signed:
            self._receive(sender, SignedPrepared(signed))
            await self._trainer.counted()

    def _admit(self, sender: str, message: Knock) -> None:
        """Whoever is going to join this run gets what it needs for that."""
        if self._run is None or self._agreement is None:
            raise PeerFault("this peer has no run yet, try again in a moment", sender)
        if message.run_digest != self._run.digest:
            raise PeerFault("knocks for another run", sender)
        self._keeper.admissions.admit(sender, time.monotonic_ns())

    async def _known_peers(self) -> KnownPeers:
        """Members, and newcomers that wait, for another newcomer."""
        assert self._agreement is not None
        view, joiners = self._agreement.view, self._agreement.joiners
        members = view.snapshot.records if view else ()
        waiting = [
            WaitingPeer(r.peer_id, r.addresses, await self._host.calling.seen_host(r.peer_id) or "")
            for r in joiners[:WAITING_TOLD_LIMIT]
        ]
        mine = () if view else (PeerAddress(self._me.peer_id, await self._host.addresses()),)
        peers = (*mine, *(PeerAddress(r.peer_id, r.addresses) for r in members))
        return KnownPeers(peers, tuple(waiting), self._lets_in)

    def _receive(self, sender: str, message: Message) -> None:
        assert self._agreement is not None and self._trainer is not None
        if isinstance(message, AGREEMENT):
            if isinstance(message, JoinRequest) and message.record.peer_id != sender:
                raise PeerFault("asks for another peer to be let in", sender)
            actions = self._agreement.receive(sender, message, time.monotonic_ns())
            if isinstance(message, JoinRequest):
                self._keeper.admissions.admit(sender, time.monotonic_ns())
            if any(isinstance(action, Rejoin) for action in actions):
                self._asked_first = sender  # it may be of a swarm of which nobody is known yet
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
            if isinstance(message, FollowLayers | ConfirmLayers):
                self._require_layers(sender, message)
            self._trainer.following(sender, message)
        elif isinstance(message, CheckpointFiles):
            assert self._checkpoints is not None
            if sender in self._members():
                self._checkpoints.remote_files(sender, message)

    def _require_layers(self, sender: str, message: FollowLayers | ConfirmLayers) -> None:
        assert self._run is not None
        layers = range(layer_count(self._run.spec))
        if len(message.layers) > len(layers) or not set(message.layers) <= set(layers):
            raise PeerFault("asks for layers that there are not", sender)

    def _learn_addresses(self, message: Any) -> None:
        """Newcomers must be answered before any view names them."""
        if isinstance(message, JoinRequest):
            self._learn_from_record(message.record)
        for contribution in getattr(message, "contributions", ()):
            with contextlib.suppress(PeerFault):  # what hearing from its sender began is done
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
        if self._keeper.role_of(record.peer_id) is Role.MEMBER:
            self._messenger.learn(record.peer_id, record.addresses)
        else:
            self._messenger.hear_of(record.peer_id, record.addresses)
        if len(self._learnt) >= PEERS_LIMIT:
            self._learnt.clear()
        self._learnt[signed.peer_id] = signed

    async def _welcome(self, sender: str, message: Hello) -> bytes:
        if self._run is None or self._agreement is None:
            raise PeerFault("this peer has no run yet, try again in a moment", sender)
        if message.protocol_version != PROTOCOL_VERSION:
            log.warning("%s speaks protocol %d", sender, message.protocol_version)
        self._messenger.hear_of(sender, message.addresses)
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
                self._lets_in,
                self._proof_of_end(),
            )
        )

    @property
    def _lets_in(self) -> bool:
        """Two newcomers that take each other for members would wait for ever."""
        return self._founds or (self._agreement is not None and self._agreement.view is not None)

    def _proof_of_end(self) -> Standing | None:
        """Without one nobody believes that the run is complete."""
        assert self._agreement is not None and self._run is not None
        if self._agreement.step <= self._run.spec.total_steps:
            return None
        return self._agreement.standing

    def _admit_frame(self, sender: str, lane: str, header: FrameHeader) -> None:
        """Before memory is taken for it. Raises `PeerFault`."""
        if self._trainer is None or not self._keeper.is_near(sender):
            raise PeerFault("a tensor of somebody who has no place here", sender)
        if header.kind not in LANE_KINDS[lane]:
            raise PeerFault(f"a frame of kind {header.kind} on the lane {lane}", sender)
        self._trainer.require_possible(sender, header)

    def _on_frame(
        self, sender: str, header: FrameHeader, payload: bytearray
    ) -> Coroutine[Any, Any, None]:
        if self._trainer is None:
            raise PeerFault("a tensor before this peer takes part", sender)
        self._messenger.heard(sender)
        return self._trainer.frame(sender, header, payload)

    def _on_fault(self, sender: str, fault: PeerFault) -> None:
        log.warning("disconnected %s: %s", sender, fault.cause)
        if self._trainer is not None:
            self._trainer.stream_lost(sender)

    def _on_lost(self, peer_id: str, lane: str, error: Unreachable) -> None:
        log.debug("stream %s with %s: %s", lane, peer_id, error.cause)
        self._liveness.stream_reset(peer_id, time.monotonic_ns())

    def _may_have(self, sender: str, digest: str) -> None:
        """Who gets which files of the run; see `core.gate.gate_table`. Raises `PeerFault`."""
        if self._run is None:
            return  # there is nothing to get
        data = self._run.manifest
        kind = "data" if digest in self._data_digests else "weights"
        if digest in (self._run.spec.data.manifest, data.tokenizer.digest):
            kind = "manifest"
        self._keeper.require(sender, kind)

    def _open_blob(self, digest: str) -> Path | bytes | None:
        if self._run is not None and (path := self._run.blobs.path(digest)) is not None:
            return path
        if self._trainer is not None and (offer := self._offers.find(digest)) is not None:
            return offer
        return self._checkpoints.path_of(digest) if self._checkpoints is not None else None
