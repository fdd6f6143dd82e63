"""A member's line for newcomers, made of what other members say of themselves."""

from p2p_dtfm.core.protocol.invited.line import open_line, read_line
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.daemon.dashboard.view_facts import join_line, own_join_line
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers.guests.pasted_line import addresses_of
from p2p_dtfm.net.contacts.identity import identity_of_seed
from tests.core.builders import record


def test_it_names_this_peer_and_two_others_that_can_be_called() -> None:
    members = [
        record(
            name, addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{name}", f"/ip4/192.0.2.7/tcp/1/p2p/{name}")
        )
        for name in ("a", "b", "c", "me")
    ]
    members[1] = record("b", addresses=("/dns4/b/tcp/1",), reachability=Reachability.RELAYED)
    line = join_line(members, "me", "ab" * 32)
    assert line.startswith("p2p-dtfm --invite p2pi1-")
    read = read_line(line.split()[-1])
    assert read.run_digest == "ab" * 32 and read.expires_s is None
    assert read.addresses == tuple(f"/ip4/192.0.2.7/tcp/1/p2p/{name}" for name in ("me", "a", "c"))


def test_the_public_one_leads_to_this_peer_alone() -> None:
    members = [record(name, addresses=(f"/ip4/8.8.4.4/tcp/1/p2p/{name}",)) for name in "ab"]
    line = own_join_line(members, "b", "ab" * 32)
    assert read_line(line.split()[-1]).addresses == ("/ip4/8.8.4.4/tcp/1/p2p/b",)
    home = record("b", addresses=("/ip4/192.168.1.7/tcp/1/p2p/b", "/ip4/8.8.4.4/tcp/2/p2p/b"))
    line = own_join_line([home], "b", "ab" * 32)
    assert read_line(line.split()[-1]).addresses == ("/ip4/8.8.4.4/tcp/2/p2p/b",)
    relayed = record("c", addresses=("/dns4/b/tcp/1",), reachability=Reachability.RELAYED)
    assert own_join_line([*members, relayed], "c", "ab" * 32) == ""


def test_an_address_that_nobody_could_call_spoils_no_line() -> None:
    """A user who pastes the line would be told that it is malformed."""
    bad = (
        "/ip4/8.8.4.4/tcp/0000019999999/p2p/b",
        "/ip4/8.8.4.4/p2p/b",
        "/ip4/8.8.4.4/tcp/1/p2p/another",
        "/ip4/8.8.4.4/tcp/1",
        "/x",
    )
    members = [record("b", addresses=bad), record("me", addresses=("/ip4/8.8.8.8/tcp/1/p2p/me",))]
    line = join_line(members, "me", "ab" * 32)
    assert read_line(line.split()[-1]).addresses == ("/ip4/8.8.8.8/tcp/1/p2p/me",)
    assert own_join_line([record("b", addresses=bad)], "b", "ab" * 32) == ""


def test_a_line_with_one_bad_address_leads_to_the_others() -> None:
    peer = identity_of_seed(bytes(32)).peer_id
    good, bad = (f"/ip4/8.8.4.4/tcp/{port}/p2p/{peer}" for port in ("1", "0000019999999"))
    for addresses, taken in (((bad, good), (good,)), ((bad,), (bad,))):
        settings = Settings(invite=open_line("ab" * 32, addresses).text())
        assert addresses_of(settings) == taken


def test_what_a_shell_would_obey_is_left_out() -> None:
    evil = ("/ip4/1.2.3.4/tcp/1; rm -rf ~", "$(true)", "/a b", "/ip4/1.2.3.4/tcp/1\n", "")
    assert join_line([record("x", addresses=evil)], "me", "00" * 32) == ""
