"""Cards that no library takes for a certificate, and what happens to the tensors meanwhile."""

import datetime
import socket
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography import x509

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed
from p2p_dtfm.net.direct import card as cards
from p2p_dtfm.net.direct.card import Card, OwnCard, read_card
from p2p_dtfm.net.direct.trust import REPLACED_LIMIT, Trust
from tests.net.net_support import run, until
from tests.net.test_direct_lines import RUN, _header, _pair

VERSION_3, VERSION_8 = bytes.fromhex("a003020102"), bytes.fromhex("a003020107")


def _of_no_version(identity: Identity, now_s: float) -> Card:
    card = OwnCard(identity, RUN, 4002, now_s).card
    strange = msgspec.structs.replace(
        card, certificate=card.certificate.replace(VERSION_3, VERSION_8), signature=b""
    )
    with pytest.raises(x509.InvalidVersion):
        x509.load_der_x509_certificate(strange.certificate)
    return msgspec.structs.replace(strange, signature=identity.sign(cards._signed(strange)))


def test_a_card_of_no_version_is_its_senders_fault() -> None:
    one, now_s = identity_of_seed(b"1" * 32), datetime.datetime(2026, 5, 1).timestamp()
    with pytest.raises(PeerFault, match="without a certificate"):
        read_card(msgspec.msgpack.encode(_of_no_version(one, now_s)), one.peer_id, RUN, now_s)


def test_a_member_whose_card_becomes_strange_is_sent_its_tensors_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is for its next lane. What was to go there never left, and others waited for its
    sender."""

    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)
            strange = SimpleNamespace(card=_of_no_version(b.host.identity, time.time()))
            monkeypatch.setattr(b.lines._trust, "own", lambda: strange)
            await a.plane.send(b.host.peer_id, "backward", _header(4, 7), bytes(4))
            await until(lambda: any(index == 7 for index, _ in b.frames), "it comes")
            assert not a.plane.is_direct(b.host.peer_id, "backward")

    run(scenario())


def test_whatever_a_direct_line_fails_by_libp2p_carries_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)

            async def fails(peer_id: str) -> Any:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(a.lines, "_open", fails)
            await a.plane.send(b.host.peer_id, "backward", _header(4, 7), bytes(4))
            await until(lambda: any(index == 7 for index, _ in b.frames), "it comes")

    run(scenario())


def test_a_member_with_ever_new_certificates_does_not_have_tls_begin_anew_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TLS began anew with the certificates of all others, in the event loop: half a second for a
    thousand. A new certificate is let in beside them."""
    begun = 0
    make = Trust._context

    def counted(self: Trust, is_server: bool) -> ssl.SSLContext:
        nonlocal begun
        begun += 1
        return make(self, is_server)

    monkeypatch.setattr(Trust, "_context", counted)
    trust, now_s = Trust(identity_of_seed(b"0" * 32), RUN), time.time()
    members = [identity_of_seed(bytes([number]) * 32) for number in range(1, 6)]
    refused = 0

    def connects() -> None:
        with socket.socket() as raw:
            trust.wrap(raw, is_server=True).close()

    for member in members:
        trust.add(member.peer_id, OwnCard(member, RUN, 4002, now_s).card)
        connects()
    assert begun == 2, "once for each side"
    for _ in range(10):
        try:
            trust.add(members[0].peer_id, OwnCard(members[0], RUN, 4002, now_s).card)
        except PeerFault:
            refused += 1
        connects()
    assert refused == 10 - REPLACED_LIMIT, "it may have been started again"
    assert begun == 2 + 2 * REPLACED_LIMIT
