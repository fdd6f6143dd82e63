"""Words about views that have not taken over here are kept within bounds. A peer in no view yet
lets everybody say them: thirty-two keys that claimed four steps each took 470 MB."""

import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest

from p2p_dtfm.core.messages.audit_messages import Claimed, Share
from p2p_dtfm.core.messages.prepared import Prepared, Statement
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.early_words import EACH_LIMIT, LIMIT_BYTES, EarlyWords
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from tests.core.audit.parts import VIEW
from tests.core.builders import run_spec

KEYS = 32


def audited_spec() -> SimpleNamespace:
    return SimpleNamespace(audit=SimpleNamespace(rate_millionths=20_000))


def test_claims_of_many_keys_do_not_fill_the_memory_of_who_is_in_no_view() -> None:
    state = SimpleNamespace(view=None)
    tools = SimpleNamespace(spec=audited_spec())
    audits = Audits(tools, None, state, None)  # type: ignore[arg-type]
    share = Share("", 1, {number: (b"",) * 500 for number in range(900)}, {})
    raw = encode_for_wire(Claimed(VIEW, 7, share, b"", b"", b""))
    assert len(raw) < 1 << 20, "as one message"
    tracemalloc.start()
    for key in range(KEYS):
        for _ in range(4):
            audits.receive(f"key {key}", msgspec.msgpack.decode(raw, type=Claimed))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 120_000_000


def prepared(name: str, size_bytes: int) -> Statement:
    said = Prepared(ViewId(9, "far"), 1, name, {}, 0.0, 0, 0.0, 0, None)
    return Statement(said, Signed(name, "", bytes(size_bytes), b""))


def test_so_are_prepared() -> None:
    mail = ViewMail("me", run_spec(), SimpleNamespace())  # type: ignore[arg-type]
    mail.keep_early(prepared("honest", 1000))
    with pytest.raises(PeerFault, match="does not know"):
        for number in range(1024):
            mail.keep_early(prepared(f"key {number}", 60_000))
    kept = mail.take_over(SimpleNamespace(id=VIEW, plan=None), None)  # type: ignore[arg-type]
    assert sum(len(it.signed.payload) for it in kept) <= LIMIT_BYTES
    assert kept[0].prepared.peer_id == "honest"


def test_of_each_the_newest_are_kept_and_all_are_given_once() -> None:
    words = EarlyWords[str]()
    for number in range(EACH_LIMIT + 3):
        assert words.keep("a", f"a{number}", 10)
    assert words.keep("b", "b0", 10)
    assert words.take() == [*(("a", f"a{n + 3}") for n in range(EACH_LIMIT)), ("b", "b0")]
    assert not words.take()


def test_who_says_most_makes_room_for_others() -> None:
    words, part = EarlyWords[str](), LIMIT_BYTES // EACH_LIMIT
    for number in range(EACH_LIMIT):
        assert words.keep("evil", f"large {number}", part)
    assert words.keep("honest", "small", 1000)
    assert [sender for sender, _ in words.take()] == ["evil"] * (EACH_LIMIT - 1) + ["honest"]
    assert words.keep("evil", "large", LIMIT_BYTES) and not words.keep("b", "b", LIMIT_BYTES)
    assert words.keep("b", "b", LIMIT_BYTES - 1)
    assert words.take() == [("b", "b")]
