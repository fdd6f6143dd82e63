"""The line that a person pastes: all that a machine needs to find a run and to be let in."""

import base64
import binascii
import zlib
from collections.abc import Sequence
from unicodedata import category

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import SKEW_S, ChainLink
from p2p_dtfm.core.protocol.signed import Signed

PREFIX = "p2pi1-"
BEHIND = "'\"`\u2018\u2019\u201c\u201d\u00ab\u00bb>)].,;"
"""Signs that come with a line where it was copied out of a text."""
UNSEEN = "Cf"
"""Unicode's class of signs without a shape, such as the space of no width."""
TEXT_LIMIT = 8192
UNPACKED_LIMIT_BYTES = 16384
ADDRESSES_LIMIT = 5
KEY_BYTES = 32
ASK_AGAIN = "ask whoever invited you for a new line: p2p-dtfm invite prints one"


class InvitationLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An invitation: whoever has the line is invited."""

    run: bytes
    """The run's digest."""
    directory_key: bytes
    """The key with which members find one another."""
    seed: bytes
    """The seed of the line's own key, which signs for the peer that comes by the line."""
    chain: tuple[Signed, ...]
    """Empty in a run that asks for no invitation."""
    addresses: tuple[str, ...]
    """Addresses of several members, of which any one is enough."""

    @property
    def run_digest(self) -> str:
        return self.run.hex()

    @property
    def holder(self) -> str:
        """The line's name, by which it can be revoked."""
        return self._link.holder

    @property
    def expires_s(self) -> int | None:
        """Unix time at which the line expires; None for never."""
        return self._link.expires_s if self.chain else None

    @property
    def _link(self) -> ChainLink:
        return decode(self.chain[-1].payload, ChainLink)

    def text(self) -> str:
        packed = zlib.compress(encode(self), 9)
        return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def open_line(run_digest: str, addresses: Sequence[str]) -> InvitationLine:
    """The line of a run that asks for no invitation: it only says where the run is."""
    nothing = bytes(KEY_BYTES)
    return InvitationLine(bytes.fromhex(run_digest), nothing, nothing, (), tuple(addresses))


def read_line(text: str) -> InvitationLine:
    """Reads a line. What stands before it, as where it was copied together with its command, is
    passed over. So are quotes around it, and what nobody sees in it: programs that show messages
    put such signs there. Raises `UserError` if the line is damaged."""
    word = "".join(it for it in text if not it.isspace() and category(it) != UNSEEN)
    word = word[max(word.find(PREFIX), 0) :].rstrip(BEHIND)
    try:
        if not word.startswith(PREFIX) or len(word) > TEXT_LIMIT:
            raise ValueError
        coded = word[len(PREFIX) :]
        packed = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        unpacking = zlib.decompressobj()
        line = decode(unpacking.decompress(packed, UNPACKED_LIMIT_BYTES), InvitationLine)
        sizes = {len(line.run), len(line.directory_key), len(line.seed)}
        if not unpacking.eof or sizes != {KEY_BYTES} or not line.addresses:
            raise ValueError
        _ = line.expires_s
    except (ValueError, PeerFault, zlib.error, binascii.Error) as error:
        paste = f"paste the whole line, which begins with {PREFIX}"
        if word.startswith("/"):
            paste = "give an address as --initial-peers ADDRESS"
        raise UserError("this is no whole invitation", (paste, ASK_AGAIN)) from error
    return line


def require_in_time(line: InvitationLine, now_s: int) -> None:
    """Raises `UserError` if the line has been expired for some minutes, by this machine's clock."""
    if line.expires_s is not None and now_s > line.expires_s + SKEW_S:
        raise UserError(
            "the invitation has expired, by this machine's clock",
            (ASK_AGAIN, "or set this machine's clock, if it is wrong"),
            exit_code=5,
        )
