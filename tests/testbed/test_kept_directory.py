"""`--keep` of a demo and of chaos: where it cannot be kept, the user is told why."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.testbed.swarm_directory import kept_directory


def test_a_file_cannot_be_kept_in(tmp_path: Path) -> None:
    taken = tmp_path / "notes"
    taken.write_text("mine")
    with pytest.raises(UserError, match=r"cannot use .*notes"), kept_directory(taken):
        pass
    assert taken.read_text() == "mine"


def test_nor_can_a_directory_below_a_file(tmp_path: Path) -> None:
    taken = tmp_path / "notes"
    taken.write_text("mine")
    with pytest.raises(UserError, match=r"cannot use .*below"), kept_directory(taken / "below"):
        pass


def test_what_goes_wrong_within_is_not_the_directorys_fault(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the swarm"), kept_directory(tmp_path / "new"):
        raise OSError("of the swarm")
