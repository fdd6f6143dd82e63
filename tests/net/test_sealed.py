"""Sealed records come whole, in their order and once each, and nothing else is taken."""

import os
import random
import socket
import struct

import pytest

from p2p_dtfm.net.direct import sealed
from p2p_dtfm.net.direct.sealed import PIECE_BYTES, Keys, SealedSocket

SECRETS = bytes(range(64))


def _ends() -> tuple[SealedSocket, SealedSocket, socket.socket]:
    """A sender, a receiver, and the socket by which the sender's bytes come to the receiver."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    one, other = b"one way", b"other way"
    sender = SealedSocket(ours, Keys(SECRETS, one), Keys(SECRETS, other))
    receiver = SealedSocket(theirs, Keys(SECRETS, other), Keys(SECRETS, one))
    return sender, receiver, ours


def _records(pieces: list[bytes]) -> list[bytes]:
    """The records of these pieces, as they travel."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    sender, found = SealedSocket(ours, Keys(SECRETS, b"one way"), Keys(SECRETS, b"")), []
    for piece in pieces:
        sender.send(piece)
        found.append(theirs.recv(1 << 20))
    return found


def _all_of(receiver: SealedSocket) -> bytes:
    """All that can be taken now."""
    target, found = memoryview(bytearray(1 << 20)), bytearray()
    try:
        while count := receiver.recv_into(target):
            found += target[:count]
    except BlockingIOError:
        pass
    return bytes(found)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_come_as_they_were_given_however_they_are_cut(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "RECORDS_OF_A_KEY", 5)
    chance = random.Random(seed)
    sizes = [1, 8, 1000, 16_384, PIECE_BYTES - 1, PIECE_BYTES]
    pieces = [os.urandom(chance.choice(sizes)) for _ in range(40)]
    sender, receiver, _ = _ends()
    sent, taken, due = 0, bytearray(), b"".join(pieces)
    target = memoryview(bytearray(PIECE_BYTES))
    while len(taken) < len(due):
        if sent < len(pieces):
            try:
                sender.send(pieces[sent])
                sent += 1
            except BlockingIOError:
                pass
        try:
            count = receiver.recv_into(target[: chance.choice(sizes)])
        except BlockingIOError:
            continue
        taken += target[:count]
    assert bytes(taken) == due


def test_what_was_changed_left_out_doubled_or_reordered_is_not_taken() -> None:
    first, second, third = _records([b"first", b"second", b"a third"])

    def taken(travelled: bytes) -> bytes:
        _, receiver, ours = _ends()
        ours.send(travelled)
        return _all_of(receiver)

    assert taken(first + second + third) == b"firstseconda third"
    flipped = bytearray(first)
    flipped[6] ^= 1
    shorter = struct.pack(">I", 4) + first[4:-1]
    for travelled in (second, first + first, first + third, second + first, flipped, shorter):
        with pytest.raises(ConnectionAbortedError, match="not as it was sealed"):
            taken(bytes(travelled))
    for length in (0, PIECE_BYTES + 1, 0xFFFFFFFF):
        with pytest.raises(ConnectionAbortedError, match=f"a record of {length} bytes"):
            taken(struct.pack(">I", length) + bytes(64))


def test_what_one_sends_cannot_be_given_back_to_it() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    peer = SealedSocket(theirs, Keys(SECRETS, b"one way"), Keys(SECRETS, b"other way"))
    peer.send(b"mine")
    ours.send(ours.recv(1 << 10))
    with pytest.raises(ConnectionAbortedError, match="not as it was sealed"):
        _all_of(peer)


def test_an_end_inside_a_record_is_no_clean_end() -> None:
    (record,) = _records([b"whole"])
    for travelled, is_clean in ((record, True), (record[:-1], False), (record[:2], False)):
        _, receiver, ours = _ends()
        ours.send(travelled)
        ours.close()
        if is_clean:
            assert _all_of(receiver) == b"whole"
        else:
            with pytest.raises(ConnectionResetError, match="inside a record"):
                _all_of(receiver)


def test_who_waits_between_records_holds_no_memory_for_them() -> None:
    sender, receiver, _ = _ends()
    sender.send(b"word")
    assert _all_of(receiver) == b"word"
    assert receiver._arrived is None and sender._sealed is None


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="of Linux")
@pytest.mark.parametrize("is_far", [True, False])
def test_who_is_far_away_gets_a_congestion_control_for_that_where_it_may_be_chosen(
    is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "FAR_S", 0.0 if is_far else 10.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, other = socket.create_connection(server.getsockname()), server.accept()[0]

    def control(connection: socket.socket) -> bytes:
        told: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return told.rstrip(b"\0")

    before = control(one)
    other_than_before = b"reno" if before != b"reno" else before
    for wanted in (b"there is none", other_than_before):
        monkeypatch.setattr(sealed, "FAR_CONTROL", wanted)
        line = SealedSocket(one, Keys(SECRETS, b""), Keys(SECRETS, b""))
        assert line.figures() is not None
        line.suit_distance()
        may_be_had = is_far and wanted == other_than_before
        assert control(one) == (other_than_before if may_be_had else before)
    one.close()
    other.close()
