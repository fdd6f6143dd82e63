"""How a message travels: as msgpack, and compressed where one of many peers' words is likely.

An id of 52 characters stands three times in what a founding says of each peer, and names of fields
stand once for each: deflate takes a third off. What is said in each step is short, and goes as it
is.
"""

import re
import zlib

from p2p_dtfm.core.messages.agreement_messages import (
    Gather,
    JoinRequest,
    Spread,
    Standing,
    Tidings,
)
from p2p_dtfm.core.protocol.errors import PeerFault

COMPRESSED = (Gather, Spread, Tidings, Standing, JoinRequest)
SHORT_BYTES = 256
"""Below this, nothing is gained."""
EXPANSION_LIMIT = 4
"""Honest messages of many peers come to two, a bomb of zeros to a thousand. So what is read stays
in proportion to what a gate has let in by its size."""
_LEVEL = 1
"""Six saves a quarter of a percent more."""
_FIRST_BYTE = b"\x78"
"""Of a zlib stream with a window of 32 KiB. To msgpack it would be the number 120, and all that is
said in a call is an array."""
_START_BYTES = 64
_START = re.compile(
    rb"\x92(?:[\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf.{8})(?:[\x80-\x8f]|\xde..)\xa4type([\xa0-\xbf])",
    re.DOTALL,
)
"""An array of two, a number, and a dictionary whose first word is its tag."""


class Unreadable(PeerFault):
    """What no correct peer sends to anybody."""


def tag_of(body: bytes) -> str:
    """What kind of message it is, by its first bytes: reading all of it, or expanding it, costs
    more than a gate that lets nobody in without asking. Raises `Unreadable`."""
    start = body[:_START_BYTES]
    if body[:1] == _FIRST_BYTE:
        try:
            start = zlib.decompressobj().decompress(body[: 16 * _START_BYTES], _START_BYTES)
        except zlib.error as error:
            raise Unreadable(f"a compressed message that cannot be read: {error}") from error
    found = _START.match(start)
    if found is None:
        raise Unreadable("bytes that are no message")
    length = found[1][0] & 31
    return start[found.end() : found.end() + length].decode("ascii", "replace")


def compressed(message: object, payload: bytes) -> bytes:
    """`payload`, in which `message` is written, as it travels."""
    if not isinstance(message, COMPRESSED) or len(payload) < SHORT_BYTES:
        return payload
    shorter = zlib.compress(payload, _LEVEL)
    assert shorter[:1] == _FIRST_BYTE, "another window than zlib's own"
    gains = len(shorter) < len(payload) <= EXPANSION_LIMIT * len(shorter)
    return shorter if gains else payload


def expanded(body: bytes) -> bytes:
    """What `compressed` was given. Raises `Unreadable` for a stream that is damaged, too large for
    its length, or followed by something."""
    if body[:1] != _FIRST_BYTE:
        return body
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(body, EXPANSION_LIMIT * len(body))
    except zlib.error as error:
        raise Unreadable(f"a compressed message that cannot be read: {error}") from error
    if not stream.eof or stream.unused_data:
        raise Unreadable(
            f"a compressed message of {len(body)} bytes that is cut off, followed by something, or "
            f"of more than {EXPANSION_LIMIT} times its length"
        )
    return payload
