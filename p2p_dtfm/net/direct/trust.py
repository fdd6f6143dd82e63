"""Whom TLS lets in: the peers that have shown their certificates here, and nobody else.

Both sides show one, over TLS 1.3 only. There is no authority: each certificate is trusted by
itself, and after the handshake its fingerprint says whose it is.
"""

import contextlib
import logging
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.direct.card import Card, OwnCard, fingerprint_of
from p2p_dtfm.ports import now

CARDS_LIMIT = 1024
"""The cards that were shown last are kept, and no more."""
REPLACED_LIMIT, REPLACED_S = 4, 240.0
"""How many new certificates a member may show within how many seconds. Each start of a peer brings
one. To begin anew with those of a thousand takes half a second."""
_OPEN_FILES = "/proc/self/fd"

log = logging.getLogger(__name__)


class Trust:
    """This peer's card, and those of others."""

    def __init__(self, identity: Identity, run_digest: str) -> None:
        self._identity = identity
        self._run_digest = run_digest
        self._port = 0
        self._own: OwnCard | None = None
        self._cards: dict[str, Card] = {}
        self._owners: dict[bytes, str] = {}
        self._replaced: dict[str, tuple[float, int]] = {}
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    def listens_at(self, port: int) -> None:
        """Name this port in this peer's card from now on."""
        self._port, self._own, self._contexts = port, None, None

    def own(self) -> OwnCard:
        """This peer's card, renewed once it is due."""
        now_s = now.wall_s()
        if self._own is None or self._own.is_due(now_s):
            self._own = OwnCard(self._identity, self._run_digest, self._port, now_s)
            self._contexts = None
        return self._own

    def add(self, peer_id: str, card: Card) -> None:
        """Make this the only certificate of `peer_id` from now on. Raises `PeerFault` for a
        certificate that another peer has shown."""
        if self._owners.get(card.fingerprint, peer_id) != peer_id:
            raise PeerFault("a certificate that another peer has shown", peer_id)
        before = self._cards.get(peer_id)
        if before is None:
            for context in self._contexts or ():
                _let_in(context, peer_id, card)
        elif before.certificate != card.certificate:
            self._replace(peer_id)
        if before is not None:
            del self._owners[before.fingerprint], self._cards[peer_id]
        self._cards[peer_id] = card
        self._owners[card.fingerprint] = peer_id
        while len(self._cards) > CARDS_LIMIT:
            self.drop(next(iter(self._cards)))

    def _replace(self, peer_id: str) -> None:
        """Make TLS begin anew with all other certificates, because TLS forgets none. Raises
        `PeerFault` for a peer that shows too many."""
        now_s = now.monotonic_s()
        since_s, count = self._replaced.get(peer_id, (now_s, 0))
        if now_s - since_s >= REPLACED_S:
            since_s, count = now_s, 0
        if count >= REPLACED_LIMIT:
            raise PeerFault("shows one certificate after the other", peer_id)
        put_newest(self._replaced, peer_id, (since_s, count + 1), CARDS_LIMIT)
        self._contexts = None

    def drop(self, peer_id: str) -> None:
        """Let a peer in no more."""
        card = self._cards.pop(peer_id, None)
        if card is not None:
            del self._owners[card.fingerprint]
            self._contexts = None

    def keep(self, is_near: Callable[[str], bool]) -> None:
        """Drop all peers that are not near."""
        for peer_id in [peer for peer in self._cards if not is_near(peer)]:
            self.drop(peer_id)

    def owner_of(self, connection: ssl.SSLSocket) -> str | None:
        """The peer whose certificate the other side has shown; None where that is nobody's here."""
        shown = connection.getpeercert(binary_form=True)
        return None if shown is None else self._owners.get(fingerprint_of(shown))

    def wrap(self, connection: socket.socket, is_server: bool) -> ssl.SSLSocket:
        """Prepare a TLS handshake that is done in steps."""
        self.own()
        if self._contexts is None:
            self._contexts = (self._context(False), self._context(True))
        return self._contexts[is_server].wrap_socket(
            connection, server_side=is_server, do_handshake_on_connect=False
        )

    def _context(self, is_server: bool) -> ssl.SSLContext:
        protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            context.num_tickets = 0  # no session is resumed
        with _file_of(self.own().pem) as path:
            context.load_cert_chain(path)
        for peer_id, card in self._cards.items():
            _let_in(context, peer_id, card)
        return context


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """A file with this content, for as long as it is read: TLS takes a key from files alone. It
    lies in memory where the system has such files, so no full disk matters, and no kill leaves
    it."""
    in_memory = getattr(os, "memfd_create", None)  # not of each Python, even on Linux
    if in_memory is not None and os.path.isdir(_OPEN_FILES):
        with os.fdopen(in_memory("certificate"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"{_OPEN_FILES}/{file.fileno()}"
        return
    with tempfile.NamedTemporaryFile() as named:  # mode 0600
        named.write(content)
        named.flush()
        yield named.name


def _let_in(context: ssl.SSLContext, peer_id: str, card: Card) -> None:
    """Add one certificate by itself, so that a bad one spoils no other."""
    try:
        context.load_verify_locations(cadata=card.certificate)
    except ssl.SSLError as error:
        log.warning("TLS does not take the certificate of %s: %s", peer_id, error)
