"""Two daemons of one identity on two machines: locks cannot show that, and the directory does."""

import resource
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.machine.locks import hold_identity
from p2p_dtfm.daemon.peers.facts.twin import DOUBT_S, Twin
from p2p_dtfm.net.directory.directory import PRESENCE_TTL_S
from p2p_dtfm.net.directory.values import Presence

ME = Member("me", 5)
BEGAN_S = 1000.0
IDENTITY = Path("/home/of/me/identity.key")


def presence(life: int, published_s: float, peer_id: str = "me") -> Presence:
    expires_ms = round((published_s + PRESENCE_TTL_S) * 1000)
    return Presence(peer_id, life, ("/ip4/192.0.2.7/tcp/1",), "00" * 32, expires_ms)


def test_the_older_of_two_with_one_identity_ends_and_says_where_the_other_is() -> None:
    with pytest.raises(UserError, match="speaks as this very peer") as caught:
        Twin(IDENTITY).require_none([presence(6, BEGAN_S + 60)], ME, BEGAN_S, BEGAN_S + 60)
    assert caught.value.exit_code == 3 and "192.0.2.7" in caught.value.cause
    assert str(IDENTITY) in caught.value.fixes[0]


def test_the_newer_one_others_and_a_predecessors_last_word_end_nobody() -> None:
    """A predecessor's life may be the higher one: its number was lost, and the clock was set."""
    for there in (
        presence(4, BEGAN_S + 60),
        presence(5, BEGAN_S + 60),
        presence(6, BEGAN_S + 60, "another"),
        presence(6, BEGAN_S - 20),
        presence(6, BEGAN_S + DOUBT_S / 2),
    ):
        Twin(IDENTITY).require_none([there], ME, BEGAN_S, BEGAN_S + 100)


def test_what_a_clock_that_was_ahead_has_left_ends_nobody_unless_it_goes_on() -> None:
    """A home was restored from before a life whose clock was ahead (seed 502294)."""
    twin, ahead = Twin(IDENTITY), presence(6, BEGAN_S + 3600)
    for later_s in (0, 20, 40):
        twin.require_none([ahead], ME, BEGAN_S, BEGAN_S + later_s)
    with pytest.raises(UserError, match="speaks as this very peer"):
        twin.require_none([presence(6, BEGAN_S + 3620)], ME, BEGAN_S, BEGAN_S + 60)


def test_an_identity_is_held_though_the_folder_for_temporary_files_is_full(tmp_path: Path) -> None:
    """The lock only says whose it is. A daemon with room in its own home did not begin for that."""
    (tmp_path / "identity.key").write_bytes(b"key")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        held = hold_identity(tmp_path / "identity.key", tmp_path, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(UserError, match="an unknown one"):
        hold_identity(tmp_path / "identity.key", tmp_path / "another", tmp_path)
    assert held is not None
    held.close()
