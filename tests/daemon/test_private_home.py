"""A home's contents are for its user alone, and the dashboard's token is on no command line."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import dashboard as dashboard_command
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine import home as home_module
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.web.api import LocalApi, make_app


@pytest.fixture(autouse=True)
def restored_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_all_that_is_in_a_home_is_private(tmp_path: Path) -> None:
    root = tmp_path / "home"
    older = root / "runs" / "ab" / "checkpoints" / "layer.safetensors"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"weights")
    (root / "identity.key").write_bytes(b"key")
    home = Home(root)
    home.acquire()
    try:
        (home.run_directory("cd" * 32) / "events.jsonl").write_text("{}")
        home.next_life()
        for path in (root, *root.rglob("*")):
            assert _mode(path) == (0o700 if path.is_dir() else 0o600), path
    finally:
        home.release()


def test_a_folder_that_nobody_else_may_enter_is_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start and each pause changed every file of all runs, and nobody was answered
    meanwhile."""
    shards = tmp_path / "home" / "runs" / ("ab" * 8) / "blobs"
    shards.mkdir(parents=True)
    home, gone_through = Home(tmp_path / "home"), list[Path]()

    really = home_module.all_below

    def all_below(folder: Path) -> Iterator[Path]:
        gone_through.append(folder)
        return really(folder)

    monkeypatch.setattr(home_module, "all_below", all_below)
    for _ in range(2):
        home.acquire()
        home.release()
    assert gone_through.count(home.root / "runs") == 1
    home.root.joinpath("runs").chmod(0o755)
    shards.chmod(0o755)
    home.acquire()
    home.release()
    assert _mode(shards) == 0o700, "as of a home that was copied"


def test_a_directory_of_other_things_keeps_its_mode(tmp_path: Path) -> None:
    """With `--home .` in a project, scripts below its own `runs` could no longer be executed."""
    (tmp_path / "letter.txt").write_text("mine")
    script, kept = tmp_path / "runs" / "first" / "again.sh", tmp_path / "runs" / ("ab" * 8) / "x"
    for path in (script, kept):
        path.parent.mkdir(parents=True)
        path.write_text("...")
        path.chmod(0o755)
    tmp_path.chmod(0o755)
    home = Home(tmp_path)
    home.acquire()
    home.release()
    assert _mode(tmp_path) == 0o755 and _mode(tmp_path / "letter.txt") == 0o644
    assert _mode(script) == 0o755 and _mode(kept) == 0o600
    assert _mode(tmp_path / "daemon.lock") == 0o600


def test_a_browser_is_given_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, opened = DashboardHost(), list[str]()

    async def scenario() -> dict[str, str | None]:
        await host.start("auto", tmp_path)
        try:
            return host.invitation()
        finally:
            await host.close()

    invitation = asyncio.run(scenario())
    token = (tmp_path / "dashboard.token").read_text().strip()
    page = tmp_path / "dashboard.html"
    assert _mode(page) == 0o600 and f"#token={token}" in page.read_text()
    monkeypatch.setattr(dashboard_command, "call_daemon", lambda *_: invitation)
    monkeypatch.setattr(dashboard_command.webbrowser, "open", opened.append)
    done = CliRunner().invoke(app, ["dashboard", "--open"])
    assert done.exit_code == 0
    assert opened == [page.as_uri()] and token not in opened[0]
    assert "may not read that file, open the address above" in done.stderr, "as one of snap"
    assert invitation["address_with_token"] in done.stdout


def _far_down(root: Path) -> Home:
    """A home whose path is too long for a socket: the socket lies where all users write."""
    home = Home(root / ("x" * 100))
    home.root.mkdir()
    assert not home.socket.is_relative_to(home.root)
    return home


def test_another_users_socket_is_not_spoken_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can guess a home's path can be there before its daemon. That user's program would
    be told to leave, say which page a browser opens, and answer for the daemon."""
    home = _far_down(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    asked = threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(home.socket))
    listener.listen()

    def answer() -> None:
        with contextlib.suppress(OSError):
            caller, _ = listener.accept()
            caller.settimeout(5)
            if caller.recv(1):
                asked.set()
            caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            caller.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(UserError, match="another user"):
            call_daemon(home.root, "leave", "POST")
        thread.join(10)
        assert not asked.is_set()
    finally:
        listener.close()
        home.socket.unlink()


def test_a_socket_whose_place_is_taken_is_told(tmp_path: Path) -> None:
    home = _far_down(tmp_path)
    home.acquire()
    home.socket.mkdir()
    try:
        api = LocalApi(make_app({}, {}), home.socket)
        with pytest.raises(UserError, match=f"cannot use {home.socket}"):
            asyncio.run(api.start())
        asyncio.run(api.close())
        home.release()
    finally:
        home.socket.rmdir()


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EPERM, "whose disk takes sockets"), (errno.ENOSPC, "free space on that disk")],
)
def test_a_home_on_a_disk_that_takes_no_socket_is_told_why(
    number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT and exFAT, as of most sticks, take none. Who had a home there was told to see what lies
    at the socket's place, where nothing did, and to choose a shorter path."""

    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(UserError) as caught:
        asyncio.run(LocalApi(make_app({}, {}), tmp_path / "daemon.sock").start())
    assert fix in " ".join(caught.value.fixes)
    assert all("remove it" not in each for each in caught.value.fixes)
