"""A disk that takes nothing does not keep this peer's states from others."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.train.data import BlobStore


def test_states_are_offered_from_memory_while_the_disk_takes_none(tmp_path: Path) -> None:
    offers = Offers(tmp_path / "offers", memory_limit_bytes=10)
    on_disk = offers.put(b"first")
    assert offers.find(on_disk) == tmp_path / "offers" / on_disk
    shutil.rmtree(tmp_path / "offers")
    large, small = offers.put(b"larger than all"), b"!"
    assert offers.find(large) == b"larger than all"
    with pytest.raises(OSError, match="offers"):
        offers.put(small)
    assert offers.put(b"larger than all") == large, "the same state takes no more room"
    offers.remove(large)
    assert offers.find(large) is None and offers.find(offers.put(small)) == small


def test_a_state_is_on_disk_again_once_there_is_room(tmp_path: Path) -> None:
    offers = Offers(tmp_path / "offers")
    shutil.rmtree(tmp_path / "offers")
    first = offers.put(b"first")
    (tmp_path / "offers").mkdir()
    second = offers.put(b"second")
    assert offers.find(first) == b"first"
    assert offers.find(second) == tmp_path / "offers" / second


def test_a_state_of_an_end_is_known_as_one_before_anybody_can_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers, known, name = Offers(tmp_path / "offers"), list[bool](), BlobStore._name

    def named(store: BlobStore, temporary: Path, digest: str) -> str:
        known.append(offers.is_of_ends(digest))
        return name(store, temporary, digest)

    monkeypatch.setattr(BlobStore, "_name", named)
    offers.put(b"of the first layer", True)
    offers.put(b"of another")
    assert known == [True, False]


def test_a_disk_that_has_become_read_only_ends_nobody_who_gives_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be removed, not even what is not there, the next commit after somebody had
    followed this peer ended its daemon."""
    offers = Offers(tmp_path / "offers")
    on_disk = offers.put(b"of the first layer", True)

    def read_only(*given: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, read_only)
    in_memory = offers.put(b"of another")
    for digest in (on_disk, in_memory):
        offers.remove(digest)
    assert offers.find(in_memory) is None
    assert offers.find(on_disk) is None or offers.is_of_ends(on_disk), "else all would be given it"
