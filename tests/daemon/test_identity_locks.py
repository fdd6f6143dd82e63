"""Locks of identities lie beside all of the machine's temporary files, and none stays there."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine import locks
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.locks import hold_identity

AN_HOUR_S = 3600.0


def test_a_daemon_that_ends_leaves_no_lock_of_its_identity(tmp_path: Path) -> None:
    """Each newcomer has an identity of its own: a machine that had hundreds had as many files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for number in range(3):
        home = Home(tmp_path / f"home-{number}", folder)
        home.acquire()
        assert len([*folder.iterdir()]) == 1
        home.release()
    assert not [*folder.iterdir()]


def test_the_next_daemon_removes_locks_of_killed_ones_and_no_others(tmp_path: Path) -> None:
    def begun(name: str, before_s: float) -> Home:
        home = Home(tmp_path / name, folder)
        home.acquire()
        assert home._identity_lock is not None
        at_s = time.time() - before_s
        os.utime(home._identity_lock.name, (at_s, at_s))
        return home

    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "p2p-dtfm-cuda:0.lock").touch()
    alive, killed, just_killed = begun("a", AN_HOUR_S), begun("b", AN_HOUR_S), begun("c", 0.0)
    for home in (killed, just_killed):
        assert home._identity_lock is not None
        home._identity_lock.close()
    begun("d", 0.0)
    assert len([*folder.iterdir()]) == 4, "of all but the killed one, and of the device"
    with pytest.raises(UserError, match="speaks as this very peer"):
        hold_identity(alive.identity, tmp_path / "copy", folder)


def test_a_lock_that_goes_as_it_is_taken_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ends between the opening and the locking. Who comes next would make a new file,
    and lock that: there would be two."""
    identity = tmp_path / "identity.key"
    identity.write_bytes(b"key")
    before = hold_identity(identity, tmp_path, tmp_path)
    assert before is not None
    really = fcntl.flock

    def flock(file: object, operation: int) -> None:
        monkeypatch.setattr(locks.fcntl, "flock", really)
        locks.let_go_of_identity(before)
        really(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    held = hold_identity(identity, tmp_path, tmp_path)
    assert held is not None
    with pytest.raises(UserError, match="speaks as this very peer"):
        hold_identity(identity, tmp_path / "another", tmp_path)
    held.close()


def test_who_looks_whether_a_lock_is_a_dead_ones_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "identity.key"
    identity.write_bytes(b"key")
    first = hold_identity(identity, tmp_path, tmp_path)
    assert first is not None
    really = fcntl.flock

    def flock(file: object, operation: int) -> None:
        try:
            really(file, operation)  # type: ignore[arg-type]
        except BlockingIOError:
            first.close()
            raise

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    held = hold_identity(identity, tmp_path, tmp_path)
    assert held is not None
    held.close()
