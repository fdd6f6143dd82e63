"""A home's memory of its runs, on disk: written whole or not at all, bounded, and never fatal."""

import asyncio
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers import home_memory
from p2p_dtfm.daemon.peers.home_memory import (
    ACQUAINTANCES_LIMIT,
    ADDRESSES_LIMIT,
    FILE_NAME,
    NAMES,
    Acquaintance,
    Memory,
    acquaintance,
    read_memory,
    remembered_runs,
    write_memory,
)
from p2p_dtfm.net.contacts.first_contacts import reach_any
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.values import sign_run
from tests.core.builders import run_spec


def memory_of(directory: Path, spec: RunSpec | None = None, used_s: int = 1) -> Memory:
    identity = Identity.load_or_create(directory / "identity.key")
    payload = (spec or run_spec()).canonical_bytes()
    return Memory(sign_run(payload, identity.peer_id, identity.sign), used_s, "here")


def place_of(home: Path, memory: Memory) -> Path:
    directory = home / "runs" / memory.run_digest[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def peer_ids(directory: Path, count: int) -> list[str]:
    return [Identity.load_or_create(directory / f"{n}.key").peer_id for n in range(count)]


def test_what_is_written_is_read_and_for_no_other_eyes(tmp_path: Path) -> None:
    (one, two) = peer_ids(tmp_path, 2)
    memory = memory_of(tmp_path).met(
        [
            acquaintance(one, ["/ip4/192.0.2.7/tcp/4001"], 5),
            acquaintance(two, [f"/ip4/192.0.2.8/tcp/4001/p2p/{two}"], 5),
        ]
    )
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    assert read_memory(directory) == memory
    assert memory.addresses() == (
        f"/ip4/192.0.2.7/tcp/4001/p2p/{one}",
        f"/ip4/192.0.2.8/tcp/4001/p2p/{two}",
    )
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600


def test_whoever_was_seen_last_comes_first_and_all_is_bounded(tmp_path: Path) -> None:
    memory = memory_of(tmp_path)
    for second in range(3 * ACQUAINTANCES_LIMIT):
        at = [f"/ip4/192.0.2.7/tcp/{port}" for port in range(1, 30)]
        memory = memory.met([acquaintance(f"peer-{second}", at, second)])
    assert len(memory.members) == ACQUAINTANCES_LIMIT
    assert memory.members[0].peer_id == f"peer-{3 * ACQUAINTANCES_LIMIT - 1}"
    assert all(len(item.addresses) == ADDRESSES_LIMIT for item in memory.members)


def test_what_a_newer_program_remembers_is_left_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older program uses the home once, and says nothing wrong of its memory."""
    identity = Identity.load_or_create(tmp_path / "identity.key")
    values = decode(run_spec().canonical_bytes(), dict[str, Any])
    payload = encode({**values, "colour": "blue"})
    memory = Memory(sign_run(payload, identity.peer_id, identity.sign), 1, "here")
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    assert remembered_runs(tmp_path) == []
    assert "a newer p2p-dtfm" in caplog.text and "damaged" not in caplog.text
    assert (directory / FILE_NAME).exists(), "an update brings the run back"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" * 100,
        lambda data: b"[]",
        lambda data: data.replace(b'"used_s"', b'"used"'),
        lambda data: b" " * (5 << 20),
        lambda data: b'{"x":' + b"[" * 5000,
    ],
)
def test_a_damaged_memory_is_set_aside_and_told_once(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = memory_of(tmp_path)
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    path = directory / FILE_NAME
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert remembered_runs(tmp_path) == []
        assert remembered_runs(tmp_path) == []
    assert len(caplog.records) == 1 and "set aside" in caplog.text
    assert (directory / "memory.damaged").exists()


@pytest.mark.parametrize("torn", [0, 1])
def test_of_two_that_were_written_one_may_be_torn(torn: int, tmp_path: Path) -> None:
    """A disk that lies keeps half of the newest file. The wall clock was put back between the
    two."""
    (one,) = peer_ids(tmp_path, 1)
    older = memory_of(tmp_path, used_s=9)
    met = older.met([acquaintance(one, ["/ip4/192.0.2.7/tcp/4001"], 5)])
    newer = msgspec.structs.replace(met, used_s=3, written=1)
    directory = place_of(tmp_path, older)
    for memory in (older, newer):
        write_memory(directory, memory)
    assert read_memory(directory) == newer
    path = directory / NAMES[torn]
    path.write_bytes(path.read_bytes()[:100])
    assert read_memory(directory) == (newer, older)[torn]


def test_a_spec_that_its_signer_did_not_sign_is_damage(tmp_path: Path) -> None:
    memory = memory_of(tmp_path)
    other = memory_of(tmp_path, run_spec(seed=8))
    directory = place_of(tmp_path, other)
    write_memory(directory, memory)
    assert read_memory(directory) is None, "it is of another run than its directory"
    forged = Memory(
        type(memory.signed_spec)(
            memory.signed_spec.peer_id,
            memory.signed_spec.kind,
            other.signed_spec.payload,
            memory.signed_spec.signature,
        ),
        1,
        "here",
    )
    write_memory(directory, forged)
    assert read_memory(directory) is None


def test_a_person_who_edits_it_loses_only_what_is_wrong(tmp_path: Path) -> None:
    (one, two) = peer_ids(tmp_path, 2)
    right = acquaintance(one, ["/ip4/192.0.2.7/tcp/4001"], 5)
    wrong = acquaintance(two, ["/ip4/192.0.2.999/tcp/4001"], 5)
    memory = memory_of(tmp_path).met([right, wrong])
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    found = read_memory(directory)
    assert found is not None and found.members == (right,)


def test_an_address_that_was_remembered_and_is_none_goes_alone(tmp_path: Path) -> None:
    """A member's own words were written down, and each later start of this peer ended because of
    them."""
    (one, two) = peer_ids(tmp_path, 2)
    bad = tuple(f"/ip4/192.0.2.7/tcp/0000019999999/p2p/{peer}" for peer in (one, two))
    good = f"/ip4/192.0.2.7/tcp/4001/p2p/{one}"
    memory = memory_of(tmp_path).met(
        [Acquaintance(one, (bad[0], good), 5), Acquaintance(two, (bad[1],), 5)]
    )
    memory = msgspec.structs.replace(memory, meeting_points=(bad[0], good))
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    found = read_memory(directory)
    assert found is not None and found.members == (Acquaintance(one, (good,), 5),)
    assert found.addresses() == (good,)
    assert acquaintance(one, [*bad, good], 5).addresses == (good,), "nor is it written again"


def test_who_is_killed_while_writing_has_the_memory_before(tmp_path: Path) -> None:
    memory = memory_of(tmp_path)
    directory = place_of(tmp_path, memory)
    write_memory(directory, memory)
    (directory / "memory.partial").write_bytes(b"{")
    assert read_memory(directory) == memory


def test_the_run_used_last_is_the_one_to_take_up(tmp_path: Path) -> None:
    for seed, used_s in ((1, 5), (2, 9), (3, 7)):
        memory = memory_of(tmp_path, run_spec(seed=seed), used_s)
        write_memory(place_of(tmp_path, memory), memory)
    assert [memory.spec.seed for memory in remembered_runs(tmp_path)] == [2, 3, 1]


def test_of_very_many_runs_those_used_last_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs were chosen by name, so the one left out could be the newest, which is the one to take
    up."""
    monkeypatch.setattr(home_memory, "RUNS_LIMIT", 3)
    for seed in range(8):
        memory = memory_of(tmp_path, run_spec(seed=seed), used_s=seed)
        directory = place_of(tmp_path, memory)
        write_memory(directory, memory)
        for path in (directory / NAMES[0], directory):
            os.utime(path, (seed, seed))
    assert [memory.spec.seed for memory in remembered_runs(tmp_path)] == [7, 6, 5]


def test_a_new_founding_of_a_spec_is_another_run() -> None:
    spec = run_spec()
    new = spec.model_copy(update={"founding": "00112233aabbccdd"})
    assert new.digest() != spec.digest() and new.unmarked == spec.unmarked
    assert RunSpec.from_canonical_bytes(new.canonical_bytes()) == new
    assert b"founding" not in spec.canonical_bytes(), "runs that were not founded anew keep names"


def test_an_address_that_a_peer_made_up_ends_no_search() -> None:
    host = SimpleNamespace(peer_id="me")
    made_up = ("/ip4/192.0.2.999/tcp/1/p2p/x", "nonsense")
    assert asyncio.run(reach_any(cast(Any, host), made_up, 1.0)) == ()


def test_a_container_is_the_same_machine_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has another host name at each start, and no number of its own. At each start the
    user was told that the home had been on another machine."""
    mark, names = tmp_path / ".containerenv", iter(["a1b2", "c3d4", "e5f6", "a7b8"])
    monkeypatch.setattr(home_memory, "MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(home_memory, "CONTAINER_MARKS", (mark,))
    monkeypatch.setattr("platform.node", lambda: next(names))
    assert home_memory.this_machine() != home_memory.this_machine()
    mark.touch()
    assert home_memory.this_machine() == home_memory.this_machine()
    (tmp_path / "machine-id").write_text("12ab")
    of_its_own = home_memory.this_machine()
    mark.unlink()
    assert of_its_own == home_memory.this_machine()
