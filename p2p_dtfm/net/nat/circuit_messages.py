"""The messages of libp2p's circuit relay v2, byte for byte: short protobufs behind their length.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

import asyncio
from dataclasses import dataclass
from enum import IntEnum

from p2p_dtfm.core.protocol.errors import PeerFault

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_LIMIT_BYTES = 4096
_VARINT, _BYTES = 0, 2


class HopKind(IntEnum):
    """What is asked of a relay, or that it answers."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """What a relay asks of the peer that is called, or that this one answers."""

    CONNECT = 0
    STATUS = 1


class RelayStatus(IntEnum):
    NONE = 0
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True)
class RelayMessage:
    """A hop or stop message. Unset fields are not sent."""

    kind: int
    peer: bytes = b""
    """A raw peer id: the peer to connect to, or the caller."""
    status: RelayStatus = RelayStatus.NONE
    expires_s: int = 0
    """Unix time at which a granted reservation ends."""
    limited: bool = False
    """The relay allows few bytes or little time: such a circuit is not for training."""


def encode_hop(message: RelayMessage) -> bytes:
    """A hop message, ready to be written."""
    body = _varint_field(1, message.kind)
    if message.peer:
        body += _bytes_field(2, _bytes_field(1, message.peer))
    if message.expires_s:
        body += _bytes_field(3, _varint_field(1, message.expires_s))
    if message.status:
        body += _varint_field(5, message.status)
    return _varint(len(body)) + body


def encode_stop(message: RelayMessage) -> bytes:
    """A stop message, ready to be written."""
    body = _varint_field(1, message.kind)
    if message.peer:
        body += _bytes_field(2, _bytes_field(1, message.peer))
    if message.status:
        body += _varint_field(4, message.status)
    return _varint(len(body)) + body


async def read_hop(reader: asyncio.StreamReader) -> RelayMessage:
    """Read a hop message. Raises `PeerFault` for anything else, `EOFError` at the end."""
    return _message(await _read_body(reader), limit_field=4, status_field=5)


async def read_stop(reader: asyncio.StreamReader) -> RelayMessage:
    """Read a stop message. Raises `PeerFault` for anything else, `EOFError` at the end."""
    return _message(await _read_body(reader), limit_field=3, status_field=4)


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    length = shift = 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MESSAGE_LIMIT_BYTES or shift > 21:
            raise PeerFault("a relay message longer than 4 KiB")
        if byte < 0x80:
            return await reader.readexactly(length)


def _message(body: bytes, limit_field: int, status_field: int) -> RelayMessage:
    fields = _fields(body)
    kind, status = fields.get(1, 0), fields.get(status_field, 0)
    peer = _fields(_as_bytes(fields.get(2, b""))).get(1, b"")
    reservation = _fields(_as_bytes(fields.get(3, b""))) if limit_field != 3 else {}
    expires_s = reservation.get(1, 0)
    if not isinstance(kind, int) or not isinstance(expires_s, int):
        raise PeerFault("a relay message with a field of the wrong type")
    try:
        known = RelayStatus(status) if isinstance(status, int) else RelayStatus.MALFORMED_MESSAGE
    except ValueError:
        known = RelayStatus.CONNECTION_FAILED
    return RelayMessage(kind, _as_bytes(peer), known, expires_s, limit_field in fields)


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise PeerFault("a relay message with a field of the wrong type")
    return value


def _fields(body: bytes) -> dict[int, int | bytes]:
    """The last value of each field. Raises `PeerFault`."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(body):
        key, at = _read_varint(body, at)
        if key & 7 == _VARINT:
            found[key >> 3], at = _read_varint(body, at)
        elif key & 7 == _BYTES:
            length, at = _read_varint(body, at)
            if at + length > len(body):
                raise PeerFault("a relay message that is cut off")
            found[key >> 3] = body[at : at + length]
            at += length
        else:
            raise PeerFault("a relay message with a field of an unknown type")
    return found


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body) or shift > 63:
            raise PeerFault("a relay message that is cut off")
        value |= (body[at] & 0x7F) << shift
        shift += 7
        at += 1
        if body[at - 1] < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
