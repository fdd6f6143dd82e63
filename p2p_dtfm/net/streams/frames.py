"""The form of a tensor on the wire, without any I/O: a prefix, a header, the payload.

    magic "DTFM" · version u8 · reserved u8 = 0 · header length u16 · header (msgpack) · payload

Every claim in the header is checked before a byte of the payload is allocated for.
"""

import asyncio
import math
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

import msgspec

from p2p_dtfm.core.messages.audit_messages import LOSSES_BYTES
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now

Payload = bytes | bytearray | memoryview

FRAME_VERSION = 1
HEADER_LIMIT_BYTES = 4096
PART_BYTES = 1 << 18
"""Large frames may travel as parts of this size, each with the frame's header. The last part is the
rest."""
WHOLE = -1
_PREFIX = struct.Struct(">4sBBH")
PREFIX_BYTES = _PREFIX.size
_MAGIC = b"DTFM"
SLOWEST_BYTES_PER_S = 4096
"""A frame that comes more slowly than this, with `stall_s` besides, is given up."""
_READ_BYTES = 1 << 18
_RANK_LIMIT = 8
_DIMENSION_LIMIT = 1 << 40
_NUMBER_LIMIT = 1 << 53

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""Bytes of one element, by the name of its type."""

CODEC_ITEM_BYTES: Mapping[str, int | None] = {"raw": None, "fp32": None, "bf16": 2}
"""Codecs whose payload is one item for each element; None: as wide as the type itself."""

OTHER_CODEC_BYTES: Mapping[str, int] = {
    "fp16": 2,
    "int8": 2,
    "rotated4": 1,
    "rotated6": 1,
    "subspace": 1,
    "sparse": 2,
    "sign": 1,
}
"""Codecs whose payload has a length of its own: the most bytes for each element, besides
`CODEC_ROOM_BYTES`. The decoder knows the exact length."""
CODEC_ROOM_BYTES = 64 << 10


class FrameKind(StrEnum):
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"
    GRADIENT_PART = "gradient_part"
    GRADIENT_SUM = "gradient_sum"
    LAYER_GRADIENT = "layer_gradient"
    LAYER_STATE = "layer_state"


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a payload is. `index` is the microbatch, shard or chunk, as `kind` says."""

    view_number: int
    view_digest: str
    step: int
    kind: FrameKind
    index: int
    layer: int
    codec: str
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int = 0
    """Set by `encode_frame`."""
    checksum: int = 0
    """CRC-32 of what follows, set by `encode_frame`. It finds bugs, not enemies: libp2p seals. It
    is 0 over a direct line, where nothing lies between this process and the seal."""
    frame: int = 0
    """Number of the frame that a part belongs to, in its lane."""
    part: int = WHOLE
    """Which part of `PART_BYTES` of the payload follows."""
    losses: bytes = b""
    """In runs with audits, on some frames: what the sender tells of its losses
    (`core.audit.told_losses`)."""

    @property
    def view(self) -> ViewId:
        return ViewId(self.view_number, self.view_digest)

    @property
    def following_bytes(self) -> int:
        """Bytes that come after the header."""
        if self.part == WHOLE:
            return self.payload_bytes
        return min(PART_BYTES, self.payload_bytes - self.part * PART_BYTES)


class FrameLimits(msgspec.Struct, frozen=True):
    """The limits of what a receiver takes."""

    payload_bytes: int = 64 << 20


def encode_frame(
    header: FrameHeader, payload: Payload, with_checksum: bool = True
) -> tuple[FrameHeader, bytes]:
    """The header completed with length and checksum, and the bytes that precede the payload."""
    view = as_bytes(payload)
    checksum = zlib.crc32(view) if with_checksum else 0
    complete = msgspec.structs.replace(header, payload_bytes=view.nbytes, checksum=checksum)
    body = encode(complete)
    assert len(body) <= HEADER_LIMIT_BYTES, f"a frame header of {len(body)} bytes"
    return complete, _PREFIX.pack(_MAGIC, FRAME_VERSION, 0, len(body)) + body


def encode_part(
    header: FrameHeader, frame: int, part: int, payload: memoryview, with_checksum: bool = True
) -> bytes:
    """The bytes that precede a part of a payload."""
    start = part * PART_BYTES
    checksum = zlib.crc32(payload[start : start + PART_BYTES]) if with_checksum else 0
    body = encode(
        msgspec.structs.replace(
            header, payload_bytes=payload.nbytes, checksum=checksum, frame=frame, part=part
        )
    )
    return _PREFIX.pack(_MAGIC, FRAME_VERSION, 0, len(body)) + body


def as_bytes(payload: Payload) -> memoryview:
    """The payload as a flat view of bytes, without a copy."""
    view = memoryview(payload)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def parse_prefix(prefix: bytes) -> int:
    """The header's length, from the first `_PREFIX.size` bytes. Raises `PeerFault`."""
    magic, version, reserved, header_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise PeerFault("bytes that are no frame")
    if version != FRAME_VERSION or reserved:
        raise PeerFault(
            f"a frame of version {version}.{reserved}; this peer speaks {FRAME_VERSION}"
        )
    if not 0 < header_bytes <= HEADER_LIMIT_BYTES:
        raise PeerFault(f"a frame header of {header_bytes} bytes, at most {HEADER_LIMIT_BYTES}")
    return int(header_bytes)


def parse_header(body: bytes, limits: FrameLimits) -> FrameHeader:
    """Decode a header and check all that it claims. Raises `PeerFault`."""
    header = decode(body, FrameHeader, HEADER_LIMIT_BYTES)
    for name in ("view_number", "step", "index", "checksum", "payload_bytes", "frame"):
        if not 0 <= getattr(header, name) < _NUMBER_LIMIT:
            raise PeerFault(f"a frame whose {name} is {getattr(header, name)}")
    if not -1 <= header.layer < 1 << 20:
        raise PeerFault(f"a frame whose layer is {header.layer}")
    if len(header.losses) not in (0, LOSSES_BYTES):
        raise PeerFault(f"a frame that tells {len(header.losses)} bytes of losses")
    if header.payload_bytes > limits.payload_bytes:
        raise PeerFault(
            f"a frame that claims {header.payload_bytes} bytes, more than the limit of "
            f"{limits.payload_bytes}"
        )
    _check_length(header, _element_count(header.shape))
    if header.part != WHOLE and not 0 <= header.part < -(-header.payload_bytes // PART_BYTES):
        raise PeerFault(f"part {header.part} of a frame of {header.payload_bytes} bytes")
    return header


def _element_count(shape: tuple[int, ...]) -> int:
    if len(shape) > _RANK_LIMIT:
        raise PeerFault(f"a tensor of {len(shape)} dimensions, at most {_RANK_LIMIT}")
    count = 1
    for dimension in shape:
        if not 0 <= dimension < _DIMENSION_LIMIT:
            raise PeerFault(f"a tensor with a dimension of {dimension}")
        count *= dimension
    return count


def _check_length(header: FrameHeader, count: int) -> None:
    item_bytes = ITEM_BYTES.get(header.dtype)
    if item_bytes is None:
        raise PeerFault(f"a tensor of the unknown type {header.dtype[:32]!r}")
    if header.codec in CODEC_ITEM_BYTES:
        due = count * (CODEC_ITEM_BYTES[header.codec] or item_bytes)
        if header.payload_bytes != due:
            raise PeerFault(
                f"{header.payload_bytes} bytes for a {header.dtype} tensor of shape "
                f"{list(header.shape)} in {header.codec}, where {due} are due"
            )
    elif header.codec in OTHER_CODEC_BYTES:
        if header.payload_bytes > count * OTHER_CODEC_BYTES[header.codec] + CODEC_ROOM_BYTES:
            raise PeerFault(f"{header.payload_bytes} bytes for {count} elements in {header.codec}")
    else:
        raise PeerFault(f"the unknown codec {header.codec[:32]!r}")


def patience_s(stall_s: float, size_bytes: int) -> float:
    """How long so many bytes may take to come, however steadily they come: half a frame holds
    memory that others need."""
    return stall_s + size_bytes / SLOWEST_BYTES_PER_S


class FrameReader:
    """Frames out of bytes as they come, holding at most one frame within `limits`."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._start = bytearray()
        self._header: FrameHeader | None = None
        self._payload = bytearray()
        self._due = 0
        self._filled = 0
        self._checksum = 0

    @property
    def header(self) -> FrameHeader | None:
        """The header of the frame whose payload comes next. Memory is taken when its first byte is
        here."""
        return self._header

    @property
    def inside_frame(self) -> bool:
        """Whether a frame has begun and not ended, so that an end of the stream here tears it."""
        return bool(self._start) or self._header is not None

    def feed(self, data: Payload) -> list[tuple[FrameHeader, bytearray]]:
        """The frames that `data` completes. Raises `PeerFault`, after which the reader is of no
        use."""
        frames: list[tuple[FrameHeader, bytearray]] = []
        view = as_bytes(data)
        while True:
            view = view[self._take(view) :]
            if self._header is None or self._filled < self._due:
                assert not len(view), "a reader that needs more data has used what it had"
                return frames
            frames.append(self._finish())

    def wanted_bytes(self) -> int:
        """How many bytes the present part of the frame still needs."""
        if self._header is not None:
            return self._due - self._filled
        if len(self._start) < _PREFIX.size:
            return _PREFIX.size - len(self._start)
        return _PREFIX.size + parse_prefix(bytes(self._start[: _PREFIX.size])) - len(self._start)

    def _take(self, view: memoryview) -> int:
        """Use bytes of `view` until a frame is complete or they run out; returns how many."""
        used = 0
        while self._header is None and used < len(view):
            part = view[used : used + self.wanted_bytes()]
            self._start += part
            used += len(part)
            if len(self._start) >= _PREFIX.size and self.wanted_bytes() == 0:
                header = parse_header(bytes(self._start[_PREFIX.size :]), self._limits)
                self._start.clear()
                self._header, self._due = header, header.following_bytes
                self._filled = self._checksum = 0
        if self._header is not None and used < len(view):
            if not self._filled:
                self._payload = bytearray(self._due)
            part = view[used : used + self._due - self._filled]
            self._payload[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._checksum = zlib.crc32(part, self._checksum)
            used += len(part)
        return used

    def _finish(self) -> tuple[FrameHeader, bytearray]:
        header, payload = self._header, self._payload
        assert header is not None
        self._header, self._payload, self._due = None, bytearray(), 0
        if self._checksum != header.checksum:
            raise PeerFault(f"a {header.kind} frame whose checksum does not match its payload")
        return header, payload


async def read_frame(
    reader: asyncio.StreamReader,
    limits: FrameLimits,
    stall_s: float,
    admit: Callable[[FrameHeader], Awaitable[None]] | None = None,
) -> tuple[FrameHeader, bytearray] | None:
    """The next frame, or None at a clean end. Between frames it waits for as long as it takes.

    `admit` sees each header before memory is taken for what follows it; it may wait, or raise.

    Raises `PeerFault` for a wrong frame and `EOFError` for a torn one. Raises `TimeoutError` when
    nothing comes for `stall_s` in the middle of a frame, or all of it takes longer than
    `patience_s`.
    """
    frames = FrameReader(limits)
    is_admitted = False
    ends_s = math.inf
    while True:
        wanted_bytes = min(frames.wanted_bytes(), _READ_BYTES)
        if frames.inside_frame:
            async with asyncio.timeout(min(stall_s, ends_s - now.monotonic_s())):
                data = await reader.read(wanted_bytes)
        else:
            data = await reader.read(wanted_bytes)
        if ends_s == math.inf:
            ends_s = now.monotonic_s() + patience_s(stall_s, HEADER_LIMIT_BYTES)
        if not data:
            if frames.inside_frame:
                raise EOFError("the stream ended inside a frame")
            return None
        done = frames.feed(data)
        header = done[0][0] if done else frames.header
        if header is not None and not is_admitted:
            if admit is not None:
                await admit(header)
            is_admitted = True
            ends_s = now.monotonic_s() + patience_s(stall_s, header.following_bytes)
        if done:
            return done[0]
