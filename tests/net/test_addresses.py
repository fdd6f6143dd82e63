"""An address that people paste is taken, or the refusal explains it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.contacts.addresses import (
    WireAddress,
    check_listen_address,
    is_loopback,
    parse_address,
    usable_addresses,
)
from p2p_dtfm.net.contacts.calling import door_of
from p2p_dtfm.net.contacts.first_contacts import reach_any, reach_first_peers
from p2p_dtfm.net.errors import Unreachable, in_plain_words, nobody_listens

PEER = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"


@pytest.mark.parametrize(
    "base",
    [
        "/ip4/203.0.113.7/tcp/4001",
        "/ip6/2001:db8::1/tcp/4001",
        "/dns4/example.org/tcp/4001",
        "/ip4/203.0.113.7/udp/4001/quic-v1",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}/p2p-circuit",
    ],
)
def test_good_addresses(base: str) -> None:
    assert parse_address(f" {base}/p2p/{PEER}\n") == (PEER, base)
    assert WireAddress(base).to_bytes()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "empty"),
        ("203.0.113.7:4001", "does not begin with /"),
        ("p2pi1-eNqbekRh8fxvU3yETI4G9fa47FermO799lWh", "give it as --invite LINE"),
        ("/ip4/203.0.113.7/tcp/4001", "does not end in /p2p/"),
        (f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER[:-4]}", "cut off"),
        (f"/ip4/203.0.113.7/tcp/99999/p2p/{PEER}", "no port"),
        (f"/ip4/203.0.113.700/tcp/4001/p2p/{PEER}", "no IPv4 address"),
        (f"/ip4/203.0.113.7/p2p/{PEER}", "followed by /tcp/"),
        (f"/ip4/203.0.113.7/udp/4001/p2p/{PEER}", "write /tcp/ in place of /udp/"),
        (f"/p2p/{PEER}", "no host"),
        (f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}, /ip4/192.0.2.7/tcp/1/p2p/{PEER}", "once for each"),
        (f"/ipx/1/tcp/1/p2p/{PEER}", "unknown"),
        ("/" + "x" * 1000, "characters"),
    ],
)
def test_bad_addresses_get_cause_and_right_form(text: str, cause: str) -> None:
    with pytest.raises(UserError) as error:
        parse_address(text)
    assert cause in error.value.render()
    assert "/p2p/12D3KooW" in error.value.render()
    assert error.value.exit_code == 2


def test_host_and_port_get_the_address_they_meant() -> None:
    with pytest.raises(UserError, match=r"/ip4/203\.0\.113\.7/tcp/4001/p2p/"):
        parse_address("203.0.113.7:4001")
    with pytest.raises(UserError, match=r"/dns/example\.org/tcp/4001/p2p/"):
        parse_address("example.org:4001")


@given(st.text() | st.from_regex(r"(/(ip4|tcp|p2p|dns|quic)?[0-9a-z.]*){0,6}"))
def test_any_text_is_taken_or_explained(text: str) -> None:
    try:
        parse_address(text)
    except UserError as error:
        assert error.fixes


@pytest.mark.parametrize(
    "way",
    [
        "/ip4/203.0.113.7/tcp/0000019999999",
        "/ip4/203.0.113.7/tcp/65536",
        "/ip4/203.0.113.7/tcp/-1",
        "/ip4/203.0.113.7/tcp/１２",
        "/ip6/fe80::1%eth0/tcp/80",
        "/ip6/::1%/tcp/80",
        "/dns4/a b/tcp/80",
        "/dns4/a\x00b/tcp/80",
        "/dns4/a\ud800b/tcp/80",
        "/dns4/a..b/tcp/80",
        f"/dns4/{'a' * 64}.example/tcp/80",
        "/dns4/a\u2028b/tcp/80",
        "/ip4/203.0.113.7/tcp/80/p2p",
        "/ip4/203.0.113.7/tcp/80/p2p/x/p2p-circuit",
    ],
)
def test_what_libp2p_cannot_read_is_not_handed_to_it(way: str) -> None:
    """libp2p raises an error that nobody who connects expects, at each peer that hears of such an
    address."""
    assert usable_addresses([way]) == [] and door_of(way) is None
    with pytest.raises(UserError):
        parse_address(f"{way}/p2p/{PEER}")


@given(
    st.text()
    | st.from_regex(r"(/(ip4|ip6|tcp|udp|p2p|dns4|quic|p2p-circuit)/[^/]{0,9}){0,6}")
    | st.tuples(st.text(), st.text()).map(lambda them: "/dns4/{}/tcp/{}".format(*them))
    | st.text(st.characters(codec="utf-8"), min_size=1).map("/dns/{}/tcp/80".format)
)
def test_what_is_taken_can_be_said_to_libp2p(way: str) -> None:
    for address in usable_addresses([way]):
        assert address.to_bytes() and door_of(way) is not None


def test_what_is_remembered_of_one_keeps_this_peer_from_no_other() -> None:
    async def connect(peer_id: str, addresses: list[str], *rest: object, **options: object) -> None:
        if addresses == ["/ip4/192.0.2.1/tcp/1"]:
            raise ValueError("what hivemind makes of it")

    host = SimpleNamespace(peer_id="me", connect=connect)
    known = [f"/ip4/192.0.2.{number}/tcp/1/p2p/{PEER}" for number in (1, 2)]
    assert event_loop.run(reach_any(host, known, 1.0)) == (known[1],)


def test_listen_addresses_and_loopback() -> None:
    assert check_listen_address("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    with pytest.raises(UserError, match="leave out /p2p/"):
        check_listen_address(f"/ip4/0.0.0.0/tcp/0/p2p/{PEER}")
    assert is_loopback("/ip4/127.0.0.1/tcp/1") and is_loopback("/ip6/::1/tcp/1")
    assert not is_loopback("/ip4/10.0.0.1/tcp/1") and not is_loopback("/dns/a/tcp/1")


def test_why_an_address_was_not_reached_is_said_in_few_words() -> None:
    said = (
        "Connect failed. msg=failed to dial: failed to dial Qm: all dials failed   "
        "* [/ip4/10.0.0.1/tcp/1] dial tcp4 10.0.0.1:1: connect: connection refused   "
        "* [/ip4/10.0.0.2/tcp/1] dial tcp4 10.0.0.2:1: i/o timeout"
    )
    assert in_plain_words(said) == "connection refused; i/o timeout"
    assert in_plain_words("no answer within 10 s") == "no answer within 10 s"
    assert not nobody_listens(said), "one of its addresses may be cut off"
    assert nobody_listens(said.replace("i/o timeout", "connection refused"))
    assert not nobody_listens("no answer within 10 s")


@pytest.mark.parametrize(
    ("where", "cause", "fix"),
    [
        ("/ip4/0.0.0.0/tcp/1", "no machine's own address", "in the place of 0.0.0.0"),
        ("/dns4/mistypd.example/tcp/1", "the name mistypd.example is not known", "spelt right"),
        ("/ip6/fe80::1/tcp/1", "link-local", "another address"),
        ("/ip6/2001:db8::1/tcp/1", "cannot be called from here", "daemon is running"),
    ],
)
def test_what_libp2p_does_not_even_call_is_told_in_words(where: str, cause: str, fix: str) -> None:
    """Each of these errors was told as `failed to dial: no good addresses`, and blamed on the
    port."""

    async def connect(*arguments: object, **options: object) -> None:
        raise Unreachable(PEER, f"Connect failed. msg=failed to dial {PEER}: no good addresses")

    host = SimpleNamespace(peer_id="me", connect=connect)
    with pytest.raises(UserError) as error:
        event_loop.run(reach_first_peers(host, [f"{where}/p2p/{PEER}"]))
    assert cause in error.value.cause and "no good" not in error.value.cause
    assert fix in error.value.fixes[0]


def test_who_answers_in_the_place_of_the_peer_that_was_named_is_told_in_words() -> None:
    """The error was told as "expected 12D3..., but remote key matches 12D3...", and blamed on the
    firewall."""
    other = PEER[:-1] + "Y"

    async def connect(*arguments: object, **options: object) -> None:
        raise Unreachable(
            PEER,
            f"Connect failed. msg=failed to dial {PEER}: all dials failed * [/ip4/192.0.2.7/tcp/1] "
            "failed to negotiate security protocol: peer id mismatch: "
            f"expected {PEER}, but remote key matches {other}",
        )

    host = SimpleNamespace(peer_id="me", connect=connect)
    with pytest.raises(UserError) as error:
        event_loop.run(reach_first_peers(host, [f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}"]))
    assert f"({other} answers there: another peer)" in error.value.cause
    assert "anew" in error.value.fixes[0]
