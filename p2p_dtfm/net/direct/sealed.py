"""Bytes over a connection in sealed records, with keys that its two ends agreed on inside TLS.

    length u32 · the sealed bytes · their tag of 16 bytes

A record is sealed with AES-256-GCM. Its number is the nonce, and its length is sealed with it. So a
record that is changed, left out, doubled or put elsewhere ends the connection. Either direction has
keys of its own. After `RECORDS_OF_A_KEY` records it has a new key, made of the last. A payload is
opened straight into the memory where it is to be.
"""

import contextlib
import hashlib
import socket
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2p_dtfm.net.direct.kernel_figures import KernelFigures, figures_of

PIECE_BYTES = 1 << 18
"""The most bytes that a record holds."""
SECRET_BYTES = 32
RECORDS_OF_A_KEY = 1 << 18
KEPT_BUFFERS = 8
_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_RECORD_BYTES = _LENGTH.size + PIECE_BYTES + _TAG_BYTES
FAR_S = 0.02
"""From this round trip on the congestion control is chosen here. Below it any will do."""
FAR_CONTROL = b"bbr"
"""It goes by rate and round trip. Others take each lost packet for a sign of a full line."""
_AHEAD_BYTES = 24 << 10
"""Bytes read beyond the record that is due, because small records come many together."""
Bytes = bytes | bytearray | memoryview


class RecordBuffers:
    """Memory of sealed records, lent to connections that are in the middle of one."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """A buffer for one record. Called from any thread."""
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(_RECORD_BYTES + _AHEAD_BYTES)

    def give_back(self, buffer: bytearray) -> None:
        """Take a buffer back. Called from any thread."""
        if len(self._free) < KEPT_BUFFERS:
            self._free.append(buffer)


_BUFFERS = RecordBuffers()


class Keys:
    """The keys of one direction, in the order of its records."""

    def __init__(self, secrets: bytes, direction: bytes) -> None:
        """`secrets`: those of both sides, told inside TLS."""
        self._secret = hashlib.blake2b(key=secrets, digest_size=32, person=direction).digest()
        self._cipher = AESGCM(self._secret)
        self._number = 0

    def next(self) -> tuple[AESGCM, bytes]:
        """Cipher and nonce of the next record."""
        if self._number == RECORDS_OF_A_KEY:
            self._secret = hashlib.blake2b(self._secret, digest_size=32, person=b"next").digest()
            self._cipher, self._number = AESGCM(self._secret), 0
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return self._cipher, nonce


class SealedSocket:
    """A connection that does not block. One thread at a time uses it."""

    def __init__(self, connection: socket.socket, sending: Keys, receiving: Keys) -> None:
        self._connection = connection
        self._sending = sending
        self._receiving = receiving
        self._sealed: bytearray | None = None
        self._unsent = memoryview(b"")
        self._arrived: bytearray | None = None
        self._begin = self._end = 0
        """The bytes of `_arrived` that have come and are not yet opened."""
        self._opened = memoryview(b"")
        """The rest of a record that was longer than the read."""
        self._is_false = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def figures(self) -> KernelFigures | None:
        """The kernel's figures of the connection. May be asked from any thread."""
        return figures_of(self._connection)

    def suit_distance(self) -> None:
        """Choose `FAR_CONTROL` for a distant peer, where the kernel has it and lets this process
        choose it. The kernel keeps the buffers, and makes them grow: a size that is set ends
        that."""
        name = getattr(socket, "TCP_CONGESTION", None)
        figures = self.figures()
        if name is not None and figures is not None and (figures.round_trip_s or 0.0) >= FAR_S:
            with contextlib.suppress(OSError):
                self._connection.setsockopt(socket.IPPROTO_TCP, name, FAR_CONTROL)

    def send(self, piece: Bytes) -> None:
        """Send at most `PIECE_BYTES`. Raises `BlockingIOError` while the kernel does not take all
        of the piece. The caller then passes the same piece again."""
        if not self._unsent:
            self._unsent = self._seal(piece)
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        if self._sealed is not None:
            _BUFFERS.give_back(self._sealed)
            self._sealed = None

    def recv_into(self, target: memoryview) -> int:
        """How many bytes of `target` were filled; 0 at a clean end. Raises `BlockingIOError`, and
        `ConnectionError` for a record that is not as it was sealed."""
        if self._is_false:  # a retry with the next nonce would hide an omission
            raise ConnectionAbortedError("a record that is not as it was sealed")
        while not self._opened:
            length = self._length()
            if length is None or self._end - self._begin < _LENGTH.size + length + _TAG_BYTES:
                if not self._receive(length):
                    return 0
            elif length <= len(target):
                self._open(length, target[:length])
                return length
            else:
                room = memoryview(bytearray(length))
                self._open(length, room)
                self._opened = room
        count = min(len(target), len(self._opened))
        target[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    def _seal(self, piece: Bytes) -> memoryview:
        size_bytes = len(piece)
        assert 0 < size_bytes <= PIECE_BYTES, f"a record of {size_bytes} bytes"
        cipher, nonce = self._sending.next()
        self._sealed = _BUFFERS.take()
        record = memoryview(self._sealed)[: _LENGTH.size + size_bytes + _TAG_BYTES]
        length = _LENGTH.pack(size_bytes)
        record[: _LENGTH.size] = length
        cipher.encrypt_into(nonce, piece, length, record[_LENGTH.size :])
        return record

    def _length(self) -> int | None:
        """The length of the record that is due, once it is known."""
        if self._arrived is None or self._end - self._begin < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._arrived, self._begin)[0]
        if not 0 < length <= PIECE_BYTES:
            raise ConnectionAbortedError(f"a record of {length} bytes")
        return length

    def _receive(self, length: int | None) -> bool:
        """Receive not much more than the record that is due, so that few bytes are moved. False at
        the end."""
        if self._arrived is None:
            self._arrived = _BUFFERS.take()
        held, memory = self._end - self._begin, memoryview(self._arrived)
        memory[:held] = memory[self._begin : self._end]
        self._begin, self._end = 0, held
        due = 0 if length is None else _LENGTH.size + length + _TAG_BYTES
        try:
            count = self._connection.recv_into(memory[held : due + _AHEAD_BYTES])
        except BlockingIOError:
            self._rest()
            raise
        if not count and held:
            raise ConnectionResetError("the connection ended inside a record")
        self._end += count
        return count > 0

    def _rest(self) -> None:
        """Give back the memory while no record has begun to come."""
        if self._arrived is not None and self._begin == self._end:
            _BUFFERS.give_back(self._arrived)
            self._arrived, self._begin, self._end = None, 0, 0

    def _open(self, length: int, target: memoryview) -> None:
        assert self._arrived is not None
        cipher, nonce = self._receiving.next()
        begin = self._begin + _LENGTH.size
        record = memoryview(self._arrived)
        end = begin + length + _TAG_BYTES
        try:
            cipher.decrypt_into(
                nonce, record[begin:end], bytes(record[self._begin : begin]), target
            )
        except InvalidTag as error:
            self._is_false = True
            raise ConnectionAbortedError("a record that is not as it was sealed") from error
        self._begin = end
