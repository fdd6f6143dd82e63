"""What a member tells another of its direct lines: a certificate, and where it listens.

The certificate's key is fresh and lives in memory. The peer's libp2p identity signs that the key
speaks for the peer, in one run.
"""

import datetime
import hashlib
import ssl

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import Identity, verify

CARD_VERSION = 1
CARD_LIMIT_BYTES = 2048
LIVES_S = 7 * 86_400
RENEWED_AFTER_S = 86_400
SKEW_S = 3_600
"""The most by which the clocks of two members may differ."""
FIRST_PORT = 1024
"""No card may name a port below this one: those are other services'."""
_SIGNED = b"p2p-dtfm direct lines 1\n"


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed by the libp2p identity of the peer that sends it."""

    version: int
    run_digest: str
    certificate: bytes
    """DER, of an Ed25519 key."""
    port: int
    """The TCP port, at whatever host the peer is known by; 0 where the peer takes no direct
    lines."""
    signature: bytes

    @property
    def fingerprint(self) -> bytes:
        """The certificate's SHA-256, which names it."""
        return fingerprint_of(self.certificate)


class OwnCard:
    """A fresh key, its certificate, and the card that tells of it."""

    def __init__(self, identity: Identity, run_digest: str, port: int, now_s: float) -> None:
        self._made_at_s = now_s
        key = Ed25519PrivateKey.generate()
        certificate = _certificate(key, identity.peer_id, now_s)
        der = certificate.public_bytes(Encoding.DER)
        unsigned = Card(CARD_VERSION, run_digest, der, port, b"")
        self.card = msgspec.structs.replace(unsigned, signature=identity.sign(_signed(unsigned)))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self.pem = certificate.public_bytes(Encoding.PEM) + private
        """Certificate and private key, as TLS takes them."""

    def is_due(self, now_s: float) -> bool:
        """Whether another card has to take its place. It has once it is a day old, or once the
        clock was ahead when the card was made and has been set back since."""
        return not -SKEW_S / 2 <= now_s - self._made_at_s < RENEWED_AFTER_S


def read_card(body: bytes, sender: str, run_digest: str, now_s: float) -> Card:
    """The card of `sender`. Raises `PeerFault` for one that is not in order."""
    card = decode(body, Card, CARD_LIMIT_BYTES)
    if card.version != CARD_VERSION:
        raise PeerFault(f"direct lines of version {card.version}, not {CARD_VERSION}", sender)
    if card.run_digest != run_digest:
        raise PeerFault("a card of another run", sender)
    if not verify(sender, _signed(card), card.signature):
        raise PeerFault("a card that its sender has not signed", sender)
    if card.port and not FIRST_PORT <= card.port < 1 << 16:
        raise PeerFault(f"direct lines at port {card.port}", sender)
    _check_certificate(card.certificate, sender, now_s)
    return card


def fingerprint_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _signed(card: Card) -> bytes:
    return _SIGNED + encode(msgspec.structs.replace(card, signature=b""))


def _certificate(key: Ed25519PrivateKey, peer_id: str, now_s: float) -> x509.Certificate:
    name = _name_of(peer_id)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(now_s - SKEW_S))
        .not_valid_after(_date(now_s + LIVES_S))
        .sign(key, None)
    )


def _name_of(peer_id: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer_id)])


def _check_certificate(der: bytes, sender: str, now_s: float) -> None:
    """Check that there is exactly one certificate, with an Ed25519 key, the sender's name and
    nothing else in it. It may be neither too old nor valid for too long. TLS looks for a
    certificate by its name, and of two with one name it finds the first. So a certificate under
    another peer's name would shut that peer out everywhere."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        is_ours = isinstance(certificate.public_key(), Ed25519PublicKey)
        is_plain = not len(certificate.extensions)
        names = {certificate.subject.public_bytes(), certificate.issuer.public_bytes()}
        ends = certificate.not_valid_after_utc
        begins = certificate.not_valid_before_utc
        is_canonical = certificate.public_bytes(Encoding.DER) == der
    except Exception as error:  # the library may raise anything for a stranger's bytes
        raise PeerFault("a card without a certificate", sender) from error
    if not is_ours or not is_plain or not is_canonical:
        raise PeerFault("a certificate of another kind", sender)
    if names != {_name_of(sender).public_bytes()}:
        raise PeerFault("a certificate of another name", sender)
    _require_that_tls_reads_it(der, sender)
    if not _date(now_s - SKEW_S) < ends <= _date(now_s + LIVES_S + 2 * SKEW_S):
        raise PeerFault("a certificate that is too old, or lives too long", sender)
    if begins > _date(now_s + SKEW_S):
        raise PeerFault("a certificate that is not valid yet", sender)


def _require_that_tls_reads_it(der: bytes, sender: str) -> None:
    """Require that TLS can read the certificate. Otherwise TLS would refuse it together with all
    others that are loaded with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=der)
    except ssl.SSLError as error:
        raise PeerFault("a certificate that TLS cannot read", sender) from error
    if context.cert_store_stats()["x509"] != 1:
        raise PeerFault("a certificate that TLS cannot read", sender)


def _date(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
