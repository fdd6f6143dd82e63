"""How much the doctor says that this machine would add, within its owner's limits."""

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import doctor as doctor_command  # noqa: F401  (registers the command)
from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.core.protocol.records import Device, Link, PeerRecord
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers import doctor
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.daemon.peers.checks.this_machine import check_device
from p2p_dtfm.daemon.peers.doctor import Examination, check_worth
from p2p_dtfm.daemon.peers.facts import newcomer
from p2p_dtfm.daemon.peers.facts.newcomer import Newcomer, within_limits
from p2p_dtfm.daemon.peers.facts.own_place import OwnPlace
from p2p_dtfm.daemon.peers.facts.swarm_seen import SwarmSeen
from p2p_dtfm.daemon.peers.facts.worth import words, worth_of, worth_of_member
from p2p_dtfm.net.directory.facts import Facts
from p2p_dtfm.train.stage import measure
from tests.core.builders import device, record, run_spec

GIB = 1 << 30
SOMEBODY = "12D3KooWRbpEJ767DUrmMgm1PApxQQP6RGu8ZLY4XCYqd54AiwbL"
AT = f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"


def swarm_of(*records: PeerRecord) -> SwarmSeen:
    spec = run_spec()
    return SwarmSeen(spec, spec.digest(), (), {it.peer_id: Facts(it, None, 0) for it in records})


def linked(me: str, *others: str) -> PeerRecord:
    return record(me, links={it: Link(1_000_000, 10**9) for it in others})


def test_the_device_has_as_much_memory_as_its_owner_allows() -> None:
    found = check_device("cpu", 1, run_spec(), GIB // 4)
    assert found.verdict is Grade.OK and found.found.endswith("256 MiB to use")


def test_a_run_that_is_too_large_is_what_a_doctor_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a run ended the doctor, before it looked at anything else."""
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1 << 10)
    found = check_device("cpu", 1, run_spec())
    assert found.verdict is Grade.FAILED and "too large for this machine" in found.found
    assert found.fix


def test_a_thin_uplink_is_worth_less() -> None:
    seen = swarm_of(linked("member"))
    links = dict(linked("me", "member").links)
    gains = []
    for uplink in (0, 1000):
        me = Newcomer(lambda spec: device(), uplink_bytes_per_s=uplink)
        worth = worth_of(seen, "me", me, device(), links, OwnPlace("me"))
        assert worth is not None
        gains.append(worth.after - worth.before)
    assert gains[0] > 0 and gains[1] < gains[0] / 2


def test_who_takes_part_is_not_counted_twice() -> None:
    seen = swarm_of(linked("me", "member"), linked("member", "me"))
    worth = worth_of_member(seen, "me")
    assert worth.members == 1 and worth.after > 1.5 * worth.before > 0 and worth.layers
    assert words(worth).startswith("adds "), words(worth)
    alone = worth_of_member(swarm_of(record("me")), "me")
    assert alone.before == 0 and alone.after > 0 and alone.members == 0


def test_a_spare_without_room_is_told_that_it_has_none() -> None:
    """The spare's user was told that the swarm is as fast without it."""
    seen, little = swarm_of(linked("member")), device(memory_bytes=1 << 10)
    me = Newcomer(lambda spec: little)
    links = dict(linked("me", "member").links)
    worth = worth_of(seen, "me", me, little, links, OwnPlace("me"))
    assert worth is not None and not worth.layers
    assert words(worth).startswith("would be a spare: it offers 1.00 KiB for layers, and the least")
    tiny = msgspec.structs.replace(linked("me", "member"), device=little)
    member = worth_of_member(swarm_of(tiny, linked("member", "me")), "me")
    assert words(member).startswith("is a spare: it offers 1.00 KiB for layers"), words(member)


def test_the_device_is_measured_within_what_its_owner_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(spec: RunSpec, on: object, threads: int, limit_bytes: int | None) -> Device:
        asked.append((threads, limit_bytes))
        return device(memory_bytes=limit_bytes or 64 * GIB)

    monkeypatch.setattr(newcomer, "measure_device", measured)
    limits = Settings(memory_gib=2, resident_gib=6, uplink_mbps=8, downlink_mbps=16)
    allowed = within_limits(limits, "cpu", 1)
    assert (allowed.uplink_bytes_per_s, allowed.downlink_bytes_per_s) == (10**6, 2 * 10**6)
    assert 0 < allowed.measure(run_spec()).memory_bytes < 1.9 * GIB, "a third of the rest, nearly"
    assert asked == [(1, 2 * GIB)]
    all_of_it = within_limits(Settings(), "cpu", 2)
    assert all_of_it.measure(run_spec()).memory_bytes == 64 * GIB
    assert asked[1] == (2, None)
    of_two = within_limits(Settings(device="cpu,cpu", threads=2, uplink_mbps=8), "cpu", 1)
    assert of_two.measure(run_spec()).kind and asked[2] == (1, None)
    assert of_two.uplink_bytes_per_s == 10**6


def examined(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Examination:
    """The examination that the command asks for."""
    asked: list[Examination] = []

    async def note(what: Examination, tell: object) -> list[Check]:
        asked.append(what)
        return []

    monkeypatch.setattr(doctor, "examine", note)
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return asked[0]


def test_settings_reach_the_doctor_wherever_they_come_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = open_line("ab" * 32, [AT]).text()
    monkeypatch.setenv("P2P_DTFM_DOWNLINK_MBPS", "16")
    what = examined(
        monkeypatch, "--home", str(tmp_path), "--invite", line, "--uplink-mbps", "8",
        "--memory-gib", "2", "--resident-gib", "3", "--threads", "1",
    )  # fmt: skip
    assert what.newcomer("cpu", 1).uplink_bytes_per_s == 10**6
    assert what.newcomer("cpu", 1).downlink_bytes_per_s == 2 * 10**6
    assert what.run_digest == "ab" * 32 and what.invitation is None and what.threads == 1
    assert what.takes_lines, "calls come in by them, whatever the line may carry"
    named = examined(
        monkeypatch, "--home", str(tmp_path), "--initial-peers", AT, "--run-digest", "cd" * 32
    )
    assert named.run_digest == "cd" * 32
    monkeypatch.setenv("P2P_DTFM_DIRECT_LINES", "no")
    assert not examined(monkeypatch, "--home", str(tmp_path)).takes_lines


def test_of_a_run_by_invitation_nothing_is_promised(tmp_path: Path) -> None:
    machine = partial(within_limits, Settings())
    line = open_line("ab" * 32, [AT])
    what = Examination(tmp_path, (), (), (AT,), "cpu", 1, run_spec(), machine, invitation=line)
    (check,) = asyncio.run(check_worth(None, what))  # type: ignore[arg-type]  # nobody is asked
    assert check.verdict is Grade.SKIPPED
    assert "its members tell only who has joined" in check.found
