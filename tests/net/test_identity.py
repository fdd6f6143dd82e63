"""A peer's key stays private, damage to it is found, and its signatures are checked from the peer
id alone."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts import identity
from p2p_dtfm.net.contacts.identity import Identity, effort_spent, is_peer_id, verify


def test_created_once_then_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    first, second = Identity.load_or_create(path), Identity.load_or_create(path)
    assert first.peer_id == second.peer_id
    assert first.peer_id.startswith("12D3Koo") and len(first.peer_id) == 52
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_programs_in_one_new_home_both_have_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """The program that waited for the other one's writing once kept a key that no file had any
    more."""
    path, others = tmp_path / "identity.key", list[str]()
    real = tempfile.mkstemp

    def another_is_faster(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(tempfile, "mkstemp", real)
        others.append(Identity.load_or_create(path).peer_id)
        return real(*arguments, **named)

    def no_links(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(tempfile, "mkstemp", another_is_faster)
    mine = Identity.load_or_create(path).peer_id
    assert mine == Identity.load_or_create(path).peer_id
    assert (others == [mine]) == has_links
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]


@pytest.mark.parametrize("damage", [b"", b"x", b"\x08\x01\x12\x40" + b"\x01" * 64])
def test_damaged_file_names_itself_and_the_fix(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(damage)
    with pytest.raises(UserError) as error:
        Identity.load_or_create(path)
    assert str(path) in error.value.cause and "mv " in error.value.render()
    assert path.read_bytes() == damage


def test_a_full_disk_is_not_taken_for_a_directory_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot write the identity") as found:
        Identity.load_or_create(tmp_path / "key")
    assert found.value.fixes == ("free space on that disk",)


def test_truncated_and_flipped_keys_are_found(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    good = path.read_bytes()
    for damaged in (good[:-1], good + b"x", good[:10] + bytes([good[10] ^ 1]) + good[11:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            Identity.load_or_create(path)


@pytest.mark.parametrize("is_own", [True, False])
def test_signature_holds_for_its_peer_and_payload_only(tmp_path: Path, is_own: bool) -> None:
    one = Identity.load_or_create(tmp_path / "1")
    two = Identity.load_or_create(tmp_path / "2")
    signature = one.sign(b"payload")
    if not is_own:  # as if another process had signed it
        identity._signed.clear()
    assert verify(one.peer_id, b"payload", signature)
    assert not verify(two.peer_id, b"payload", signature)
    assert not verify(one.peer_id, b"payloae", signature)
    assert not verify(one.peer_id, b"payload", signature[:-1] + b"\x00\x00")
    assert is_peer_id(one.peer_id) and not is_peer_id(one.peer_id[:-1])
    assert not is_peer_id("1" + one.peer_id), "a second text for one peer"


def test_what_this_process_has_signed_is_not_verified_and_nothing_else_passes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender pays as for all that is new here: budgets are the same in whatever process."""

    class Looked(Exception):
        pass

    class Key:
        def verify(self, signature: bytes, payload: bytes) -> None:
            raise Looked

    signer, other = (Identity.load_or_create(tmp_path / name) for name in ("1", "2"))
    signature = signer.sign(b"payload")
    monkeypatch.setattr(identity, "_key_of", lambda peer_id: Key())
    before = effort_spent()
    assert verify(signer.peer_id, b"payload", signature)
    assert effort_spent() == before + 1
    assert verify(signer.peer_id, b"payload", signature)
    assert effort_spent() == before + 1
    flipped = bytes([signature[0] ^ 1]) + signature[1:]
    for who, payload, signed in (
        (signer, b"payloae", signature),
        (other, b"payload", signature),
        (signer, b"payload", flipped),
    ):
        with pytest.raises(Looked):
            verify(who.peer_id, payload, signed)


def test_of_what_was_signed_only_so_much_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_VERIFIED_LIMIT", 4)
    monkeypatch.setattr(identity, "_signed", {})
    signer = Identity.load_or_create(tmp_path / "identity.key")
    for number in range(10):
        signature = signer.sign(b"%d" % number)
        assert verify(signer.peer_id, b"%d" % number, signature)
    assert len(identity._signed) == 4


@given(peer_id=st.text(), payload=st.binary(), signature=st.binary())
def test_verify_never_raises(peer_id: str, payload: bytes, signature: bytes) -> None:
    assert verify(peer_id, payload, signature) is False


def test_what_is_remembered_as_signed_is_no_other_text(tmp_path: Path) -> None:
    """What a peer signs holds text of others. Cut elsewhere, the same bytes are another text, under
    a signature that goes on where the real one ends."""
    signer = Identity.load_or_create(tmp_path / "identity.key")
    ours, theirs = b"p2p-dtfm/1\x00heard of another: ", b"p2p-dtfm/1\x00revocation"
    signature = signer.sign(ours + b"\x00" + theirs)
    assert verify(signer.peer_id, ours + b"\x00" + theirs, signature)
    assert not verify(signer.peer_id, theirs, signature + b"\x00" + ours)


def test_names_that_are_no_ids_are_not_remembered() -> None:
    """Up to 4,096 texts of any length were remembered. A member that took back invitations of such
    a name, twice a second, took half a MB each time."""
    identity._key_of.cache_clear()
    for number in range(10):
        assert not verify(f"{number}" + "x" * 500_000, b"payload", b"")
        assert not is_peer_id(f"{number}" + "1" * 65)
    assert identity._key_of.cache_info().currsize == 0
