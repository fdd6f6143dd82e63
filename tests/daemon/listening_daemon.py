"""The parts of a daemon that messages of others reach, without a host."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.agreement_state import RunConstants
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS, Liveness
from p2p_dtfm.core.protocol.invited.guest_list import GuestList
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.guests.guest_book import GuestBook
from p2p_dtfm.daemon.peers.guests.own_invitation import OwnInvitation
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import (
    pack,
    unpack,
)
from p2p_dtfm.daemon.proof.transcript_file import transcript_in
from p2p_dtfm.daemon.telemetry.trace_collector import TraceCollector
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import Tools
from p2p_dtfm.net.libp2p.control import BODY_LIMIT_BYTES
from p2p_dtfm.net.streams.frames import FrameHeader
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC

ME, OTHER = name_of(0), name_of(1)


class Daemon:
    """The parts of a daemon that messages reach, without a host. What it would call or tell is
    dropped."""

    def __init__(self, directory: Path, trainer: Trainer, tools: Tools) -> None:
        self._trainer = trainer
        host: Any = SimpleNamespace(
            peer_id=ME, addresses=self._addresses, know=self._nothing, identity=None
        )
        host.calling = SimpleNamespace(vouch=self._nothing, seen_hosts=self._hosts)
        messenger = Messenger(host, cast(Any, None), 1)
        self._keeper = GateKeeper({OTHER})
        workload, digest = workload_of(SPEC), SPEC.digest()
        constants = RunConstants(digest, workload, lambda _: b"1" * 64, always, terms_of(SPEC))
        self._agreement = Agreement(Member(ME, 1), constants)
        self._keeper.attach(self._agreement, False)
        own = OwnInvitation(directory, digest, cast(Any, None))
        book = GuestBook(own, GuestList("the founder", digest, always))
        signed = Signed("the founder", "run", SPEC.canonical_bytes(), b"")
        manifest = SimpleNamespace(blobs=dict)
        run = SimpleNamespace(spec=SPEC, digest=digest, manifest=manifest, signed_spec=signed)
        liveness = Liveness(LAN_LIVENESS)
        network = SimpleNamespace(
            host=host,
            me=Member(ME, 1),
            keeper=self._keeper,
            guest_book=book,
            messenger=messenger,
            traces=TraceCollector(tools.recorder, messenger, host),
            liveness=liveness,
            evidence=asyncio.Event(),
        )
        membership = SimpleNamespace(
            agreement=self._agreement,
            run=run,
            actions=SimpleNamespace(do=self._nothing),
            members=lambda: {OTHER},
            lets_in=lambda: True,
            verify=always,
        )
        local = SimpleNamespace(
            observer=SimpleNamespace(seen=Seen()), settings=SimpleNamespace(name="")
        )
        participant: Any = SimpleNamespace(
            network=network,
            membership=membership,
            local=local,
            trainer=trainer,
            checkpoints=tools.stores.checkpoints,
            step_watch=StepWatch(ME, SPEC, (), trainer.waits, liveness.sleep_ns),
            transcript=transcript_in(directory, SPEC, 1),
            measured_rate=lambda: 0,
            poison=self._nothing,
        )
        self._dispatch = Dispatch(participant)

    async def _addresses(self, *of: str) -> tuple[str, ...]:
        return ()

    async def _hosts(self, of: Sequence[str]) -> list[str]:
        return ["" for _ in of]

    def _nothing(self, *what: Any) -> None: ...

    async def hears(self, message: Any) -> None:
        """A message from a member arrives. It comes often, so a gate that knows nobody yet checks
        its rate."""
        if isinstance(message, FrameHeader):
            self._trainer._followers.gradient(OTHER, message, bytearray(16))
            mailbox = self._trainer._mail.mailbox(ViewId(message.view_number, message.view_digest))
            if mailbox is not None:
                mailbox.put(OTHER, message, bytearray(16))
            return
        try:
            body = pack(1, message)
        except (msgspec.MsgspecError, OverflowError):
            return  # no number that goes over the line
        if len(body) > BODY_LIMIT_BYTES:
            return  # nor so much at once
        _, heard, _ = unpack(body)
        gate = GateKeeper({OTHER})
        gate.attach(self._agreement, False)
        gate.require_message(OTHER, heard, len(body))
        await self._dispatch.answer(OTHER, heard)


def always(*signed: Any) -> bool:
    return True
