"""What is appended to a file is there whole, or not at all."""

import resource
from pathlib import Path

import pytest

from p2p_dtfm.ports import disk


def test_a_line_for_which_there_is_no_room_spoils_not_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    disk.append(path, "first\n")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            disk.append(path, "torn, of which some bytes fit\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    disk.append(path, "next\n")
    assert path.read_text() == "first\nnext\n"


def test_the_machine_knows_how_much_room_is_left(tmp_path: Path) -> None:
    assert disk.free_bytes(tmp_path) > 0
    with pytest.raises(OSError, match="No such file"):
        disk.free_bytes(tmp_path / "nowhere")


def test_a_disk_that_forces_no_directories_keeps_a_home() -> None:
    """A start waited for ever for room, and no checkpoint was saved, where files are forced to the
    disk and directories cannot be, as in a folder that a virtual machine shares."""
    disk.sync_directory(Path("/proc"))
    with pytest.raises(OSError, match="No such file"):
        disk.sync_directory(Path("/nowhere/at/all"))
