"""Limits and ports are typed at each start. A user who leaves out what was typed before is told."""

import asyncio
from pathlib import Path

import pytest
import typer

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import run as running
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine.away import as_plain
from p2p_dtfm.daemon.machine.owner.allowed import FILE_NAME, NAMES, left_out
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.world import Machine
from p2p_dtfm.daemon.node.daemon import Daemon
from p2p_dtfm.daemon.peers.recall import Past

LIMITS = {
    "threads": 1,
    "memory_gib": 2.0,
    "uplink_mbps": 40.0,
    "hours": "22-07",
    "listen": ("/ip4/0.0.0.0/tcp/31330", "/ip6/::/tcp/31330"),
    "name": "Ada of B",
    "relay": False,
    "on_battery": True,
}


def began(home: Path, **typed: object) -> Settings:
    settings = Settings(home=home, **typed)
    Machine().note_typed(home, settings)
    return settings


def told(home: Path, **typed: object) -> str:
    """The message as the next start begins."""
    return left_out(Settings(home=home, **typed))


def test_where_the_page_was_is_told(tmp_path: Path) -> None:
    began(tmp_path, dashboard=8080)
    assert "--dashboard 8080" in told(tmp_path)


def test_who_comes_back_without_a_word_is_told_what_was_typed_before(tmp_path: Path) -> None:
    """The daemon took half of the cores, nearly all memory and the whole line, all day, on another
    port."""
    began(tmp_path, **LIMITS)
    assert (
        "--name 'Ada of B' --listen /ip4/0.0.0.0/tcp/31330 --listen /ip6/::/tcp/31330 --threads 1 "
        "--memory-gib 2 --uplink-mbps 40 --hours 22-07 --on-battery --no-relay before"
    ) in told(tmp_path)
    began(tmp_path)
    assert "--threads 1" in told(tmp_path), "as often as it is left out"
    assert not told(tmp_path, **LIMITS)
    but_hours = {name: value for name, value in LIMITS.items() if name != "hours"}
    said = told(tmp_path, **but_hours | {"threads": 3})
    assert "with --hours 22-07 before" in said
    began(tmp_path, threads=3)
    assert not told(tmp_path, threads=2), "who types another value knows of it"


def test_who_types_the_opposite_has_left_out_nothing(tmp_path: Path) -> None:
    """The user was told to have left something out, at that start and at each later one."""
    began(tmp_path, threads=2, relay=False)
    assert not told(tmp_path, threads=0, relay=True)
    assert "with --no-relay before" in told(tmp_path, threads=0)
    began(tmp_path, threads=0, relay=True)
    assert not told(tmp_path)


def test_who_types_only_what_is_usual_takes_that_back_and_nothing_else(tmp_path: Path) -> None:
    """The user was warned once, and the next bare start took the machine all day without a word."""
    began(tmp_path, threads=2, hours="22-07", relay=False)
    began(tmp_path, relay=True)
    assert "with --threads 2 --hours 22-07 before" in told(tmp_path)


def test_who_comes_back_from_a_pause_has_typed_no_more_than_before(tmp_path: Path) -> None:
    began(tmp_path, threads=2, relay=False)
    for typed in ({"threads": 3}, {}):
        handed_over = as_plain(Settings(home=tmp_path, **typed))
        Machine().note_typed(tmp_path, Settings.model_validate(handed_over))
        assert "--threads 3" in told(tmp_path)


def test_whoever_has_set_nothing_is_told_nothing(tmp_path: Path) -> None:
    began(tmp_path, run="tiny")
    assert not told(tmp_path) and not (tmp_path / FILE_NAME).exists()


def test_a_program_that_starts_it_is_told_nothing(tmp_path: Path) -> None:
    began(tmp_path, threads=2, until_stdin_closes=True)
    assert not told(tmp_path)
    began(tmp_path, threads=2)
    assert told(tmp_path) and not told(tmp_path, until_stdin_closes=True)


@pytest.mark.parametrize("damaged", [b"", b"[1]", b'{"threads": "many"}', b"{" * 9999])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damaged)
    assert not told(tmp_path)


def test_a_disk_that_takes_nothing_costs_no_start(tmp_path: Path) -> None:
    began(tmp_path / "is-not-there", threads=2)


def test_each_is_an_option() -> None:
    options = {name for it in typer.main.get_command(app).params for name in it.opts}
    assert {f"--{name.replace('_', '-')}" for name in NAMES} <= options


def test_a_daemon_writes_it_down_as_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends_at_once(*arguments: object) -> None:
        return None

    monkeypatch.setattr(Daemon, "_start", ends_at_once)
    settings = Settings(home=tmp_path / "new", run="tiny", dashboard="off", threads=2)
    daemon = Daemon(settings, DashboardHost())
    assert asyncio.run(daemon.run(Past([], None))) == 0
    assert "--threads 2" in told(tmp_path / "new")


def test_it_is_said_as_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "_to_the_end", lambda *arguments: 0)
    began(tmp_path, threads=2)
    assert running.run_daemon(Settings(home=tmp_path)) == 0
    assert "started with --threads 2 before" in capsys.readouterr().err
