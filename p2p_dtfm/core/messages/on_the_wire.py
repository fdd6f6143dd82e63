"""How a message travels: as msgpack, and compressed if its kind may hold the words of many peers.

A founding's messages repeat each peer's id of 52 characters three times, and the names of fields
once for each peer: deflate takes a third off. Messages of each step are short, and travel as they
are.
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
"""Compressing shorter payloads gains nothing."""
EXPANSION_LIMIT = 4
"""How many times its length a message may expand to. Honest messages of many peers expand to twice
their length, a bomb of zeros to a thousand times. So what is read stays in proportion to what a
gate has let in by its size."""
_LEVEL = 1
"""zlib's level. Level 6 would save a quarter of a percent more."""
_FIRST_BYTE = b"\x78"
"""The first byte of a zlib stream with a window of 32 KiB. In msgpack it would be the number 120,
while all that is said in a call is an array."""
_START_BYTES = 64
_START = re.compile(
    rb"\x92(?:[\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf.{8})(?:[\x80-\x8f]|\xde..)\xa4type([\xa0-\xbf])",
    re.DOTALL,
)
"""A message's start: an array of two, a number, and a dictionary whose first entry is the tag."""


class Unreadable(PeerFault):
    """Bytes that no correct peer sends to anybody."""


def tag_of(body: bytes) -> str:
    """The kind of a message, read from its first bytes. To read or expand all of it would cost a
    gate more than it may spend before it lets the message in. Raises `Unreadable`."""
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
    """`payload`, the encoded `message`, as it travels."""
    if not isinstance(message, COMPRESSED) or len(payload) < SHORT_BYTES:
        return payload
    shorter = zlib.compress(payload, _LEVEL)
    assert shorter[:1] == _FIRST_BYTE, "another window than zlib's own"
    gains = len(shorter) < len(payload) <= EXPANSION_LIMIT * len(shorter)
    return shorter if gains else payload


def expanded(body: bytes) -> bytes:
    """The payload that `compressed` was given. Raises `Unreadable` for a stream that is damaged,
    expands to too much, or is followed by something."""
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
