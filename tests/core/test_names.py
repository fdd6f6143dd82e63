"""What peers are called: bounded, harmless, the same after a restart, and told apart."""

import msgspec
import pytest

from p2p_dtfm.core.protocol import names as protocol_names
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.names import distinct, fault_of_name, generated_name, sounds
from p2p_dtfm.core.protocol.records import open_record, sign_record
from p2p_dtfm.daemon.telemetry import names as telemetry_names
from p2p_dtfm.daemon.telemetry.names import Names
from tests.core.builders import record, run_spec

PEER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyLG"
OTHER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyMM"


def test_an_identity_makes_the_same_name_everywhere() -> None:
    assert generated_name(PEER) == "tidy-condor"
    made = {generated_name(f"{PEER}{n}") for n in range(300)}
    assert len(made) > 280, "and others other ones"
    assert not any(map(fault_of_name, made))


@pytest.mark.parametrize("name", ["Ada", "J\u00fcrgen's", "\u65e5\u672c", "a" * 24, "x.y_z-1"])
def test_names_for_people_are_taken(name: str) -> None:
    assert not fault_of_name(name)
    given = record(PEER, name=name)
    found = open_record(sign_record(given, lambda _: b""), run_spec().digest(), lambda *_: True)
    assert found.called == name


@pytest.mark.parametrize(
    "name",
    ["", "a" * 25, "two\nlines", "\x1b[31mred", "right\u202eleft", "zero\u200bwidth", "tab\t",
     " ahead", "two  spaces", "x\u00b7FXCyLG", "Z\u0300\u0301algo", "\u0300",
     "\ue000", "\U000e0041"],
)  # fmt: skip
def test_other_names_are_refused_at_decoding(name: str) -> None:
    assert fault_of_name(name)
    signed = sign_record(record(PEER, name=name), lambda _: b"")
    with pytest.raises(PeerFault, match="a name that must"):
        open_record(signed, run_spec().digest(), lambda *_: True)


def test_who_gives_no_name_says_nothing_of_it() -> None:
    """Nothing that is hashed therefore depends on the lists of words."""
    assert b"name" not in encode(record(PEER)).replace(b"names", b"").split(b"embedding")[-1]
    assert record(PEER).called == generated_name(PEER)
    assert "name" not in msgspec.to_builtins(record(PEER))


def test_two_alike_are_told_apart() -> None:
    called = distinct({PEER: "Ada", OTHER: "ada", "third": "Grace"})
    assert called == {PEER: "Ada\u00b7FXCyLG", OTHER: "ada\u00b7FXCyMM", "third": "Grace"}


def test_names_stand_for_ids_in_a_text_but_not_in_addresses() -> None:
    names = Names()
    names.learn([record(PEER, name="Ada")])
    address = f"/ip4/1.2.3.4/tcp/5/p2p/{OTHER}"
    assert names.in_text(f"{PEER} calls {OTHER} at {address}") == (
        f"Ada calls {generated_name(OTHER)} at {address}"
    )
    names.learn([record(OTHER, name="Grace")])
    assert (names.of(PEER), names.of(OTHER)) == ("Ada", "Grace"), "who has left is still spoken of"
    names.learn([record(OTHER, name="Ada")])
    assert names.of(PEER) == generated_name(PEER), "a member has that name now"


def test_what_others_say_before_they_are_members_is_heard_but_takes_no_name() -> None:
    names = Names()
    names.hear("first", "Ada")
    names.hear("second", "a\u200bda")
    names.hear("third", "ada")
    names.hear("fourth", "")
    assert names.of("first") == "Ada"
    assert names.of("second") == generated_name("second"), "what nobody may be called"
    assert names.of("third") == "ada·third" and names.of("fourth") == generated_name("fourth")
    names.learn([record(OTHER, name="Ada")])
    assert (names.of("first"), names.of(OTHER)) == (generated_name("first"), "Ada")
    names.own("me", "Grace")
    names.hear("me", "Mallory")
    assert names.of("me") == "Grace"
    for number in range(1000):
        names.hear(f"peer {number}", f"n{number}")
    assert names.of("peer 999") == "n999" and names.of("first") == generated_name("first")
    assert names.of("me") == "Grace"


def test_hearing_a_name_looks_at_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers say hundreds of them in one message."""
    looked_at: list[str] = []

    def counts(name: str) -> str:
        looked_at.append(name)
        return sounds(name)

    for module in (protocol_names, telemetry_names):
        monkeypatch.setattr(module, "sounds", counts)
    names = Names()
    for number in range(600):
        names.hear(f"peer {number}", f"n{number % 100}")
    assert len(looked_at) <= 4 * 600
    assert names.of("peer 399") == "n99" and names.of("peer 599") == "n99·er 599"
