"""Faults of others are told, and no peer fills a disk by making them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.on_the_wire import Unreadable
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.node import network
from p2p_dtfm.daemon.node.network import FAULTS_TOLD_EVERY_S, Network
from p2p_dtfm.daemon.peers import messenger
from p2p_dtfm.daemon.peers.messenger import REFUSALS_TOLD_EVERY_S, Messenger
from p2p_dtfm.daemon.peers.wire import Hello, unpack


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    caplog.clear()
    return records


def test_who_makes_one_fault_after_the_other_is_told_of_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former member may open eighty lanes a second, each for a frame that is impossible."""
    at_s, ended = [0.0], []
    monkeypatch.setattr(network, "now", SimpleNamespace(monotonic_s=lambda: at_s[0]))
    inside = SimpleNamespace(stream_lost=ended.append)
    part: Any = SimpleNamespace(inside=inside, faults_told_s={})
    for number in range(800):
        Network.on_fault(part, "flood", PeerFault(f"tensor {number}"))
        at_s[0] += FAULTS_TOLD_EVERY_S / 1_000
    assert _told(caplog) == ["disconnected flood: tensor 0"] and len(ended) == 800
    Network.on_fault(part, "other", PeerFault("a frame twice"))
    at_s[0] = FAULTS_TOLD_EVERY_S
    Network.on_fault(part, "flood", PeerFault("tensor 800"))
    assert _told(caplog) == ["disconnected other: a frame twice", "disconnected flood: tensor 800"]


def test_who_refuses_each_time_for_another_reason_is_told_of_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other peer words the reason, and is told something several times a second."""
    at_s = [0.0]
    monkeypatch.setattr(messenger, "now", SimpleNamespace(monotonic_s=lambda: at_s[0]))
    part: Any = SimpleNamespace(_refusals={})

    def refuses(cause: str) -> None:
        Messenger._log_refusal(part, "peer", Hello(1, ()), cause)

    for number in range(100):
        refuses(f"reason {number}")
    assert _told(caplog) == ["peer refuses a Hello: reason 0"]
    at_s[0] = REFUSALS_TOLD_EVERY_S
    refuses("reason 0")
    assert not _told(caplog), "it was told"
    refuses("no run yet")
    refuses("no run yet")
    assert _told(caplog) == ["peer refuses a Hello: no run yet"]


def test_who_does_not_understand_where_others_stand_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two swarms that had begun apart, of unlike versions, were silent about each other. Outsiders
    mostly refuse such messages because they have just begun."""
    part: Any = SimpleNamespace(_refusals={})
    sender = Member("somebody", 1)
    agreed = Certificate(ViewId(3, "ab" * 32), "", (sender,), ())
    standing = Standing(sender, agreed, True, 9, "")
    Messenger._log_refusal(part, "new", standing, "this peer does not take part in a run yet")
    assert not _told(caplog)
    payload = encode_for_wire((1, {"type": "standing", "said_otherwise": True}))
    with pytest.raises(Unreadable) as unreadable:
        unpack(payload)
    Messenger._log_refusal(part, "other", standing, unreadable.value.cause)
    (told,) = _told(caplog)
    assert told.endswith(": perhaps it is of another version")
