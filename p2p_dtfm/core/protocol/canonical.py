"""Canonical bytes: equal values give equal bytes on any machine, and only equal bytes are hashed.

Maps are sorted, structs keep the order of their definition, and floats are refused: two machines
may disagree about a float's last bit.
"""

import hashlib
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import msgspec.inspect

from p2p_dtfm.core.protocol.errors import PeerFault

Value = TypeVar("Value")

NUMBERED_LIMIT = 4096
"""Numbers of layers, segments or microbatches in one dictionary. Python places a number in a
dictionary by its lowest bits. So a sender that chooses the numbers can make decoding take time in
the square of their count: 86,507 of them in 467 KB took 7 s, before the sender was even checked."""
Numbered = Annotated[dict[int, Value], msgspec.Meta(max_length=NUMBERED_LIMIT)]
"""What is said of layers, segments or microbatches. No other dictionaries of numbers are decoded.
Those of names are safe: Python hashes text in a way that nobody foresees."""

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_WIRE_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_HASHED = msgspec.inspect.DictType | msgspec.inspect.SetType | msgspec.inspect.FrozenSetType


def encode(value: object) -> bytes:
    """Deterministic msgpack. Floats may pass through here; `digest` refuses them."""
    return _ENCODER.encode(value)


def encode_for_wire(value: object) -> bytes:
    """Plain msgpack, for values that others read but never encode again to compare or hash."""
    return _WIRE_ENCODER.encode(value)


def decode(payload: bytes, expected: type[Value], limit_bytes: int = 1 << 20) -> Value:
    """Decode bytes from a stranger into exactly `expected`; anything else is `PeerFault`."""
    if len(payload) > limit_bytes:
        raise PeerFault(f"message of {len(payload)} bytes, more than the limit of {limit_bytes}")
    decoder = _DECODERS.get(expected)
    if decoder is None:
        assert not _has_many_numbers(msgspec.inspect.type_info(expected), set()), (
            f"{expected} has a dictionary or set of numbers that is not `Numbered`"
        )
        decoder = _DECODERS[expected] = msgspec.msgpack.Decoder(expected)
    try:
        value: Value = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"message that is not a valid {expected.__name__}: {error}") from error
    return value


def digest_bytes(payload: bytes | memoryview) -> str:
    """Hexadecimal BLAKE2b-256."""
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


def digest(value: object) -> str:
    """Digest of the canonical bytes of `value`, in which no float may occur."""
    _refuse_floats(value)
    return digest_bytes(encode(value))


def _refuse_floats(value: object) -> None:
    """Asserts that no float is in a value. Structs whose fields cannot hold one are skipped."""
    assert not isinstance(value, float), f"a float must not reach hashed bytes: {value!r}"
    if isinstance(value, msgspec.Struct):
        if not _has_no_floats(type(value)):
            for name in value.__struct_fields__:
                _refuse_floats(getattr(value, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_floats(key)
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)


@cache
def _has_no_floats(struct: type[msgspec.Struct]) -> bool:
    return not _may_hold_float(msgspec.inspect.type_info(struct), set())


def _may_hold_float(info: object, seen: set[int]) -> bool:
    """Whether a value of the type that `info` describes can have a float in it."""
    if isinstance(info, msgspec.inspect.FloatType | msgspec.inspect.AnyType):
        return True
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, tuple):
        return any(_may_hold_float(item, seen) for item in info)
    if isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        parts = (getattr(info, name) for name in info.__struct_fields__)
        return any(_may_hold_float(part, seen) for part in parts)
    return False


def _has_many_numbers(info: object, seen: set[int]) -> bool:
    """Whether a value of the type that `info` describes can have a dictionary or set in it with
    more numbers than `NUMBERED_LIMIT`."""
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, tuple):
        return any(_has_many_numbers(item, seen) for item in info)
    if not isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        return False
    if isinstance(info, _HASHED) and (info.max_length or NUMBERED_LIMIT + 1) > NUMBERED_LIMIT:
        key = info.key_type if isinstance(info, msgspec.inspect.DictType) else info.item_type
        if not isinstance(key, msgspec.inspect.StrType | msgspec.inspect.BytesType):
            return True
    parts = (getattr(info, name) for name in info.__struct_fields__)
    return any(_has_many_numbers(part, seen) for part in parts)
