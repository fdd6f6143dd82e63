"""What an owner allows: hours, disk, and one daemon on an accelerator."""

import asyncio
import errno
import os
import time
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine import disk
from p2p_dtfm.daemon.machine.disk import CHECKPOINTS_KEPT, size_of, trim
from p2p_dtfm.daemon.machine.home import Home, all_below
from p2p_dtfm.daemon.machine.hours import Hours, for_a_while
from p2p_dtfm.daemon.machine.locks import only_daemon_on
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.train.model.checkpoint import layer_path, list_checkpoints, put_aside
from p2p_dtfm.train.model.initial_state import InitialFile, InitialState
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import run_spec
from tests.train.saved_layers import save_layers

# hours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, inside, outside",
    [
        ("22-07", ["22:00", "23:59", "00:00", "06:57"], ["21:59", "06:59", "07:00", "12:00"]),
        ("9-17", ["09:00", "16:57"], ["08:59", "16:59", "17:00", "00:00"]),
        ("21:30-06:15", ["21:30", "06:12"], ["21:29", "06:15"]),
        ("20-24", ["20:00", "23:57"], ["23:59", "00:00", "19:59"]),
        ("00:00-00:04", ["00:00", "00:02"], ["00:03", "00:04", "23:59"]),
    ],
)
def test_hours_end_early_enough_to_hand_over(
    text: str, inside: list[str], outside: list[str]
) -> None:
    hours = Hours.parse(text)
    assert hours is not None
    for clock, expected in [*((c, True) for c in inside), *((c, False) for c in outside)]:
        now = datetime.fromisoformat(f"2026-03-01T{clock}:30")
        assert hours.contain(now) is expected, clock


def test_hours_left() -> None:
    hours = Hours.parse("22-07")
    assert hours is not None and str(hours) == "22:00-07:00"
    assert hours.left(datetime(2026, 1, 1, 6, 0)) == timedelta(minutes=58)
    assert hours.left(datetime(2026, 1, 1, 8, 0)) < timedelta(0)


def test_hours_go_by_the_time_where_the_machine_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that was taken along trained by day. `TZ` stands here for /etc/localtime, which no
    test may write. The C library reads either anew only when it is told to."""
    resident = Resident(Settings(home=tmp_path))
    try:
        monkeypatch.setenv("TZ", "UTC0")
        assert resident._now().utcoffset() == timedelta(0)
        monkeypatch.setenv("TZ", "XYZ-5:30")
        assert resident._now().utcoffset() == timedelta(hours=5, minutes=30)
        assert "05:30;" in for_a_while(0.0, 0.0)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_always_is_no_hours() -> None:
    assert Hours.parse("") is Hours.parse("0-24") is Hours.parse("7-7") is None
    assert Hours.parse("00:00-24:00") is None


@pytest.mark.parametrize(
    "text", ["25-7", "22", "22-7-9", "10:60-11", "night", "22 - 07", "00:30-24:30", "22-24:01"]
)
def test_wrong_hours_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="hours"):
        Settings(hours=text)


# disk -------------------------------------------------------------------------------------------


def checkpoint(
    home: Path, run: str, step: int, age_s: int, layers: Collection[int] = (1,), seed: int = 0
) -> Path:
    spec = run_spec(total_steps=100, seed=seed)
    states = [LayerState.genesis(spec, layer) for layer in layers]
    for state in states:
        state.version = step
    directory = save_layers(home / "runs" / run / "checkpoints", spec, step, 0, states)
    os.utime(directory, (1e9 - age_s, 1e9 - age_s))
    return directory


def blob(home: Path, run: str, name: str, size_bytes: int, age_s: int) -> Path:
    path = home / "runs" / run / "blobs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size_bytes))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_two_checkpoints_of_a_run_stay_whatever_lies_beside_them(tmp_path: Path) -> None:
    """Somebody had put those of another run there. As the newer ones they alone stayed."""
    own = [checkpoint(tmp_path, "mine", step, 100 - step) for step in (10, 20, 30)]
    foreign = [checkpoint(tmp_path, "mine", step, 0, seed=1) for step in (40, 50)]
    trim(tmp_path, tmp_path / "runs" / "mine", 1)
    assert [path.exists() for path in own] == [False, True, True]
    assert all(path.exists() for path in foreign)


def test_the_oldest_goes_first_and_two_checkpoints_of_each_run_stay(tmp_path: Path) -> None:
    mine = tmp_path / "runs" / "mine"
    checkpoints = [checkpoint(tmp_path, "mine", step, 100 - step) for step in (10, 20, 30, 40)]
    old = [checkpoint(tmp_path, "old", step, 1000 - step) for step in (5, 6, 7)]
    shard = blob(tmp_path, "old", "a" * 64, 3 << 20, 85)
    kept = [
        blob(tmp_path, "old", "b" * 64, 1000, 5000),  # a tokenizer, say
        blob(tmp_path, "mine", "c" * 64, 3 << 20, 5000),
    ]
    (tmp_path / "identity.key").write_bytes(b"precious")
    everything = size_of(tmp_path)

    assert trim(tmp_path, mine, everything) == everything
    assert trim(tmp_path, mine, everything - 1) < everything
    assert not old[0].exists() and checkpoints[0].exists(), "the very oldest only"
    trim(tmp_path, mine, size_of(tmp_path) - 1)
    assert not checkpoints[0].exists() and shard.exists() and checkpoints[1].exists()
    left = trim(tmp_path, mine, 1)
    assert left == size_of(tmp_path) > 1, "what must stay stays, and it says how much that is"
    assert not shard.exists()
    assert all(path.exists() for path in (*kept, *old[1:], *checkpoints[2:]))
    assert (tmp_path / "identity.key").exists()
    assert len(list_checkpoints(mine / "checkpoints")) == CHECKPOINTS_KEPT


def test_the_fullest_checkpoint_stays_beside_newer_parts(tmp_path: Path) -> None:
    """The newer checkpoints still lack layers of others. The only whole one was removed first."""
    whole = checkpoint(tmp_path, "mine", 10, 100, (0, 1, 2))
    parts = [checkpoint(tmp_path, "mine", step, 100 - step) for step in (20, 30, 40)]
    trim(tmp_path, tmp_path / "runs" / "mine", 1)
    assert [path.exists() for path in (whole, *parts)] == [True, False, True, True]


def test_a_checkpoint_that_is_fetched_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of a layer during its fetch looked like a disk that does not take the whole
    model."""
    steps = [checkpoint(tmp_path, "mine", step, 100 - step, (0, 1)) for step in (10, 20, 30, 40)]
    steps += [checkpoint(tmp_path, "mine", 5, 200, (0, 1, 2))]
    in_use, trimmed = [steps[1]], asyncio.Event()
    really = disk.trim

    def trim_once(*given: Any) -> int:
        left = really(*given)
        loop.call_soon_threadsafe(trimmed.set)
        return left

    async def looks() -> None:
        keeping = asyncio.create_task(
            disk.keep_under(tmp_path, tmp_path / "runs" / "mine", 1, lambda: in_use)
        )
        await asyncio.wait_for(trimmed.wait(), 20)
        keeping.cancel()

    monkeypatch.setattr(disk, "trim", trim_once)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(looks())
    assert [path.exists() for path in steps] == [False, True, True, True, True]


def test_models_that_a_run_started_from_are_no_shards(tmp_path: Path) -> None:
    """The run's checkpoints of adapters are of no use without them."""
    layers = [blob(tmp_path, "tuned", f"{n:064x}", 2 << 20, 500) for n in range(3)]
    files = tuple(InitialFile(path.name, 2 << 20) for path in layers)
    named = blob(tmp_path, "tuned", "e" * 64, 0, 500)
    named.write_bytes(InitialState(1, files).to_bytes())
    manifest = blob(tmp_path, "tuned", "f" * 64, 0, 500)
    manifest.write_bytes(disk.MANIFEST_STARTS_WITH + bytes(2 << 20))
    shard = blob(tmp_path, "tuned", "a" * 64, 3 << 20, 85)
    trim(tmp_path, tmp_path / "runs" / "mine", 1)
    assert all(path.exists() for path in (*layers, named, manifest)) and not shard.exists()


def test_what_is_of_no_use_any_more_of_other_runs_goes_and_no_only_copy(tmp_path: Path) -> None:
    """Useless files of other runs counted, and nothing ever removed them. Newer checkpoints went in
    their place."""
    mine = tmp_path / "runs" / "mine"
    of_no_use = ("offers/state", "blobs/quarantine/shard", "checkpoints/damaged-step-00000001/a",
                 "checkpoints/step-00000002/torn")  # fmt: skip
    kept = [checkpoint(tmp_path, "mine", 10, 9000), checkpoint(tmp_path, "old", 10, 100, (0, 1))]
    for run in ("mine", "old", "torn"):
        for name in of_no_use:
            path = tmp_path / "runs" / run / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(5000))
            os.utime(path.parent, (1e9 - 9000, 1e9 - 9000))
    for run, layers in (("mine", (0, 1)), ("old", (1,)), ("old", (0, 2)), ("torn", (0, 1))):
        aside = checkpoint(tmp_path, "aside", len(layers), 9000, layers)
        place = tmp_path / "runs" / run / "set-aside" / aside.name
        place.parent.mkdir(exist_ok=True)
        aside.rename(place)
        kept += [place] if layers != (1,) else []
    left = trim(tmp_path, mine, 1)
    assert left == size_of(tmp_path)
    stay = {run: [(tmp_path / "runs" / run / name).exists() for name in of_no_use]
            for run in ("mine", "old", "torn")}  # fmt: skip
    assert stay == {"mine": [True] * 4, "old": [False] * 4, "torn": [False, False, True, True]}
    assert all(path.exists() for path in kept), "as what nothing else has"
    assert [it.name[-1] for it in (tmp_path / "runs/old/set-aside").iterdir()] == ["2"]


def test_of_another_run_what_cannot_be_read_is_not_taken_for_torn(tmp_path: Path) -> None:
    """A failed read took a run's newest model, where its disk failed for a moment or a newer
    version had written it. It also took the only copy of layers of which a part was damaged."""
    mine = tmp_path / "runs" / "mine"
    checkpoint(tmp_path, "old", 10, 100, (0, 1))
    newest, partial = (checkpoint(tmp_path, "old", step, 50, (0, 1, 2)) for step in (20, 30))
    (newest / "manifest.json").write_text('{"format":2}')
    layer_path(partial, 1).rename(partial / "away")
    only, copied = (
        checkpoint(tmp_path, "old", step, 50, layers)
        for step, layers in ((40, (1, 2)), (50, (0, 1)))
    )
    aside = put_aside([only, copied])
    unread = aside[0].with_name("damaged-step-00000060")
    unread.mkdir()
    (unread / "manifest.json").write_text('{"format":2}')
    trim(tmp_path, mine, 1)
    there = [path.exists() for path in (newest, partial, *aside, unread)]
    assert there == [True, True, True, False, True]


def test_data_that_somebody_else_has_prepared_there_stay(tmp_path: Path) -> None:
    """A founder's own data, which its run spec names, went with the corpus that comes along."""
    names = ("python-standard-library", "digits", "mine")
    for name in names:
        (tmp_path / "prepared" / name).mkdir(parents=True)
        (tmp_path / "prepared" / name / "shard").write_bytes(bytes(5000))
    assert trim(tmp_path, tmp_path / "runs" / "mine", 1) == 5000
    assert [(tmp_path / "prepared" / name).exists() for name in names] == [False, False, True]


def test_of_many_shards_all_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removal looked at all files again: with a hundred thousand files that took half a
    day."""
    shards = [blob(tmp_path, "old", f"{n:064x}", 1 << 20, 100 - n) for n in range(12)]
    os.link(shards[0], tmp_path / "runs" / "another-name")
    whole = []

    def walked(directory: Path, but: Path | None = None) -> Iterator[Path]:
        whole.extend([directory] if directory == tmp_path else [])
        return all_below(directory, but)

    monkeypatch.setattr(disk, "all_below", walked)
    left = trim(tmp_path, tmp_path / "runs" / "mine", 3 << 20)
    assert len(whole) == 1
    assert left == size_of(tmp_path) == 3 << 20
    assert [shard.exists() for shard in shards] == [False] * 10 + [True] * 2


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(5000))
    os.link(tmp_path / "one", tmp_path / "two")
    assert size_of(tmp_path) == 5000


def test_what_other_devices_keep_below_this_home_is_under_limits_of_their_own(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "runs" / "mine"
    checkpoints = [checkpoint(tmp_path, "mine", step, 100 - step) for step in (10, 20, 30)]
    everything = size_of(tmp_path)
    blob(tmp_path / "devices" / "2", "mine", "c" * 64, 3 << 20, 5000)
    assert trim(tmp_path, mine, everything) == everything
    assert all(path.exists() for path in checkpoints)


@pytest.fixture
def goes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that another thread or process removes as soon as it is to be read."""
    gone = tmp_path / "runs" / "mine" / "checkpoints" / "step-00000010"
    gone.mkdir(parents=True)
    really = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == gone and gone.exists():
            gone.rmdir()
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return gone


def test_a_checkpoint_that_is_pruned_while_it_is_counted_ends_nothing(
    tmp_path: Path, goes_meanwhile: Path
) -> None:
    """Both happen at once, when there is a new checkpoint."""
    (tmp_path / "one").write_bytes(bytes(5000))
    assert size_of(tmp_path) == 5000
    assert not goes_meanwhile.exists(), "else this test tests nothing"


def test_nor_does_one_of_another_device_while_a_daemon_comes_to_its_home(
    tmp_path: Path, goes_meanwhile: Path
) -> None:
    (tmp_path / "runs").chmod(0o755)  # else nothing in it is looked at
    home = Home(tmp_path, tmp_path / "locks")
    home.acquire()
    home.release()
    assert not goes_meanwhile.exists(), "else this test tests nothing"


def test_a_disk_that_cannot_be_looked_at_for_a_moment_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be another machine's, or an old run may be being removed. A daemon that trained
    ended, and that was called a bug."""
    looked: list[int] = []

    def trim(*_: object) -> int:
        looked.append(1)
        if len(looked) in (2, 3):
            raise OSError(errno.ESTALE, "Stale file handle")
        return 0

    monkeypatch.setattr(disk, "trim", trim)
    monkeypatch.setattr(disk, "COUNT_EVERY_S", 0.01)
    monkeypatch.setattr(disk, "LOOK_EVERY_S", 0.001)

    async def looks() -> None:
        keeping = asyncio.create_task(disk.keep_under(tmp_path, tmp_path / "run", 1))
        async with asyncio.timeout(20):
            while len(looked) < 5 and not keeping.done():
                await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(looks())
    assert caplog.text.count("Stale file handle") == 1, "once, as long as it lasts"


# device -----------------------------------------------------------------------------------------


def test_an_accelerator_has_one_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with only_daemon_on("cuda-1"):
        with (
            pytest.raises(UserError, match="already running on the device cuda-1") as caught,
            only_daemon_on("cuda-1"),
        ):
            pass
        assert caught.value.exit_code == 3 and "--device" in caught.value.fixes[0]
        with only_daemon_on("cuda-2"), only_daemon_on(None), only_daemon_on(None):
            pass
    with only_daemon_on("cuda-1"):
        pass
