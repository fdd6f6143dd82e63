"""Blobs are what their names say, or they are not in the store."""

import errno
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.data import BlobStore, blob_store, file_digest


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "deep" / "blobs")


def names(store: BlobStore) -> set[str]:
    return {path.name for path in store.root.iterdir()}


def test_bytes_and_files_come_back(store: BlobStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"hello")
    assert digest == digest_bytes(b"hello")
    assert store.has(digest) and store.path(digest).read_bytes() == b"hello"
    file = tmp_path / "file"
    file.write_bytes(b"world" * 1_000_000)
    other = store.put_file(file)
    assert other == file_digest(file) == digest_bytes(file.read_bytes())
    assert store.path(other).stat().st_ino == file.stat().st_ino, "linked, not copied"
    assert store.digests() == sorted([digest, other])


def test_what_is_written_here_is_not_read_again(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is known by then; of a large one that took as long again."""
    monkeypatch.setattr(blob_store, "file_digest", None)
    monkeypatch.setattr(blob_store, "_CHUNK_BYTES", 2)
    told: list[object] = []
    digest = store.put_bytes(b"hello", lambda: told.append("a piece"), told.append)
    assert digest == digest_bytes(b"hello") and told == ["a piece"] * 3 + [digest]
    assert store.put_bytes(b"") == digest_bytes(b"")
    assert [store.held(it).read_bytes() for it in (digest, digest_bytes(b""))] == [b"hello", b""]


def test_putting_twice_leaves_one_file(store: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    digests = {store.put_file(file), store.put_file(file), store.put_bytes(b"x")}
    assert names(store) == digests and len(digests) == 1
    assert file.read_bytes() == b"x"
    assert store.put_file(store.path(*digests)) in digests
    assert names(store) == digests


def test_what_a_peer_sent_is_adopted_only_if_it_is_that(store: BlobStore) -> None:
    good = store.temporary_path()
    good.write_bytes(b"shard")
    assert store.adopt(good, digest_bytes(b"shard")).read_bytes() == b"shard"
    bad = store.temporary_path()
    bad.write_bytes(b"poison")
    with pytest.raises(PeerFault, match="hash"):
        store.adopt(bad, digest_bytes(b"another"))
    assert names(store) == {digest_bytes(b"shard")}
    assert not store.has(digest_bytes(b"another"))


def test_too_large_a_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", limit_bytes=10)
    temporary = store.temporary_path()
    temporary.write_bytes(b"x" * 11)
    with pytest.raises(PeerFault, match="limit"):
        store.adopt(temporary, digest_bytes(b"x" * 11))
    assert not names(store)


def test_what_this_peer_has_made_itself_may_be_of_any_size(tmp_path: Path) -> None:
    """A layer's state with more than 1 GiB, such as an embedding of 90 million parameters: each
    holder that was asked for it ended, one after the other; so did who founded a run of it."""
    store = BlobStore(tmp_path / "blobs", limit_bytes=10)
    file = tmp_path / "layer"
    file.write_bytes(b"x" * 11)
    assert store.put_bytes(b"x" * 11) == store.put_file(file) == digest_bytes(b"x" * 11)


@pytest.mark.parametrize(
    "digest",
    ["", "..", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 63 + "/", "a" * 64 + "\n"],
)
def test_malformed_digests(store: BlobStore, digest: str) -> None:
    temporary = store.temporary_path()
    for use in (store.path, store.has, store.verify, store.quarantine, store.remove):
        with pytest.raises(PeerFault, match="64 hexadecimal"):
            use(digest)
    with pytest.raises(PeerFault, match="64 hexadecimal"):
        store.adopt(temporary, digest)


def test_a_rotten_blob_is_put_aside_and_can_be_fetched_again(store: BlobStore) -> None:
    digest = store.put_bytes(b"sound")
    assert store.verify(digest)
    store.path(digest).write_bytes(b"s0und")
    assert not store.verify(digest)
    assert not store.has(digest)
    assert (store.root / "quarantine" / digest).read_bytes() == b"s0und"
    assert store.digests() == []
    assert store.put_bytes(b"sound") == digest and store.verify(digest)
    assert not store.verify(digest_bytes(b"never seen"))


def test_left_overs_of_a_crash_are_cleared(store: BlobStore) -> None:
    digest = store.put_bytes(b"kept")
    store.temporary_path()
    store.remove_temporary_files()
    assert names(store) == {digest}


def test_of_a_disk_that_cannot_be_looked_at_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever put a damaged shard aside ended, where its disk was away by then."""
    store = BlobStore(tmp_path)
    digest = store.put_bytes(b"sound")

    def away(path: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", away)
        assert not store.verify(digest) and store.quarantine(digest) is None
    assert store.verify(digest)
