"""What peers sign during the agreement: Ready, Active, Synced, Standing, and accusations.

A statement counts as its maker's word, whoever passes it on; nothing else does.
"""

from collections.abc import Collection
from typing import TypeVar

import msgspec

from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Active,
    Charge,
    Ready,
    Standing,
    Synced,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.canonical import digest, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Sign, Verify, covered
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

Statement = TypeVar("Statement", Ready, Synced, Active, Standing)
_KINDS = {Ready: "ready", Synced: "synced", Active: "active", Standing: "standing"}
STATEMENTS = (Ready, Synced, Active, Standing)


def stated(message: Statement, signer: Sign) -> Statement:
    """The message under its sender's signature."""
    return msgspec.structs.replace(message, signature=signer(_covered(message)))


def require_stated(message: Ready | Synced | Active | Standing, verify: Verify) -> None:
    """Raises `PeerFault` unless its sender has signed it."""
    if not verify(message.sender.peer_id, _covered(message), message.signature):
        kind = _KINDS[type(message)]
        raise PeerFault(f"forged signature on a {kind!r} statement", message.sender.peer_id)


def is_stated(message: Ready | Synced | Active | Standing, verify: Verify) -> bool:
    """Whether its sender has signed it."""
    return verify(message.sender.peer_id, _covered(message), message.signature)


def _covered(message: Ready | Synced | Active | Standing) -> bytes:
    """The bytes that the signature covers. They leave out whether an Active asks, and its
    certificate: these are for its receiver alone, while others pass on what it says."""
    if isinstance(message, Active):
        message = msgspec.structs.replace(message, asks=False, certificate=None)
    payload = encode(msgspec.structs.replace(message, signature=b""))
    return covered(message.sender.peer_id, _KINDS[type(message)], payload)


def charge(accusation: Accusation, run_digest: str, number: int, signer: Sign) -> Charge:
    """An accusation in the attempt `number`, by its maker."""
    return Charge(accusation, signer(_covered_charge(accusation, run_digest, number)))


def is_charge(item: Charge, run_digest: str, number: int, verify: Verify) -> bool:
    """Whether its maker has signed it, for this attempt."""
    text = _covered_charge(item.accusation, run_digest, number)
    return verify(item.accusation.by.peer_id, text, item.signature)


def _covered_charge(accusation: Accusation, run_digest: str, number: int) -> bytes:
    payload = encode((run_digest, number, accusation))
    return covered(accusation.by.peer_id, "accusation", payload)


def members_digest(members: Collection[Member]) -> str:
    """The digest by which Ready names a view's members."""
    return digest(tuple(members))


def certified(view: ViewId, members: tuple[Member, ...], ready: Collection[Ready]) -> Certificate:
    """The certificate made of Ready that all say the same."""
    plans = {item.plan_digest for item in ready}
    assert len(plans) == 1 and {item.view for item in ready} == {view}
    signatures = sorted((item.sender, item.signature) for item in ready)
    return Certificate(view, plans.pop(), members, tuple(signatures))


def ready_of(certificate: Certificate, member: Member, signature: bytes) -> Ready:
    """The Ready that a certificate holds of a contributor."""
    members = members_digest(certificate.members)
    return Ready(member, certificate.view, certificate.plan_digest, members, signature)


def signers(
    certificate: Certificate, verify: Verify, among: Collection[str] | None = None
) -> frozenset[Member]:
    """Who has signed the certificate. With `among`, only these peers' signatures are checked."""
    members = members_digest(certificate.members)
    found = set()
    for member, signature in certificate.ready:
        if among is not None and member.peer_id not in among:
            continue
        ready = Ready(member, certificate.view, certificate.plan_digest, members)
        if verify(member.peer_id, _covered(ready), signature):
            found.add(member)
    return frozenset(found)


def all_signed(certificate: Certificate, verify: Verify) -> bool:
    """Whether all members of its view have signed the certificate."""
    return set(certificate.members) <= signers(certificate, verify)
