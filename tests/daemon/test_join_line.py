"""What a member passes on to newcomers, made of what other members say of themselves."""

from p2p_dtfm.core.protocol.invited.line import read_line
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.daemon.dashboard.view_facts import join_line, own_join_line
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


def test_what_a_shell_would_obey_is_left_out() -> None:
    evil = ("/ip4/1.2.3.4/tcp/1; rm -rf ~", "$(true)", "/a b", "/ip4/1.2.3.4/tcp/1\n", "")
    assert join_line([record("x", addresses=evil)], "me", "00" * 32) == ""
