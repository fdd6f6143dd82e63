"""The settings of each daemon, where one command starts several."""

import errno
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.devices import several, shares
from p2p_dtfm.daemon.machine.devices.several import SeveralDevices
from p2p_dtfm.daemon.machine.devices.shares import (
    devices_of,
    environment_of,
    is_several,
    shares_of,
)
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.life import SERVICE_VARIABLE, is_a_service
from p2p_dtfm.daemon.machine.owner.allowed import left_out
from p2p_dtfm.daemon.machine.settings import Settings, resolve
from p2p_dtfm.ports import now

GIB = 1 << 30


def told(**settings: object) -> Settings:
    return Settings.model_validate({"home": Path("/h"), **settings})


def test_one_device_is_not_several() -> None:
    assert not any(is_several(one) for one in ("auto", "cpu", "cuda:1", "emulated:1e12"))
    assert is_several("all") and is_several(" ALL ") and is_several("cpu,cpu")


def test_a_list_is_taken_as_it_is_written() -> None:
    assert devices_of("cuda:0, CUDA:1,cpu") == ("cuda:0", "cuda:1", "cpu")
    assert devices_of("cpu,cpu") == ("cpu", "cpu")


@pytest.mark.parametrize("wrong", ["cpu,", "cpu,all", "auto,cpu", "cuda,cpu", "cuda:0,cuda:0"])
def test_what_names_no_devices_is_refused_with_what_would(wrong: str) -> None:
    with pytest.raises(UserError) as refused:
        devices_of(wrong)
    assert "cuda:0,cuda:1" in refused.value.fixes[0]


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_LIST_DEVICES", "import time; time.sleep(60)")
    monkeypatch.setattr(shares, "LIST_LIMIT_S", 0.5)
    with pytest.raises(UserError, match="does not say which accelerators") as told_so:
        devices_of("all")
    assert "cuda:0,cuda:1" in told_so.value.fixes[1]


def test_what_the_machine_may_use_is_divided() -> None:
    settings = told(
        threads=6, uplink_mbps=30, disk_gib=9, memory_gib=8, run="tiny", name="shed",
        listen=("/ip4/0.0.0.0/tcp/4001",),
    )  # fmt: skip
    first, second, third = shares_of(settings, ("cuda:0", "cpu", "cpu"), 100 * GIB)
    for share in (first, second, third):
        assert (share.threads, share.uplink_mbps, share.disk_gib) == (2, 10, 3)
        assert share.until_stdin_closes
    assert [share.memory_gib for share in (first, second, third)] == [8, 4, 4]
    assert [share.device for share in (first, second, third)] == ["cuda:0", "cpu", "cpu"]
    assert [share.run for share in (first, second, third)] == ["tiny", "", ""]
    assert [share.name for share in (first, second, third)] == ["shed", "shed-2", "shed-3"]
    assert [str(share.home) for share in (first, second)] == ["/h", "/h/devices/2"]
    assert [share.listen[0][-4:] for share in (first, second, third)] == ["4001", "4003", "4005"]
    assert (first.expect_peers, second.expect_peers) == (3, 1)


def test_two_on_the_processor_take_together_what_one_would() -> None:
    shares = shares_of(told(), ("cpu", "cpu"), 10 * GIB)
    assert [share.memory_gib for share in shares] == [4.5, 4.5]
    assert [share.listen for share in shares] == [("/ip4/0.0.0.0/tcp/0",)] * 2


def test_a_daemon_reads_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_DTFM_DEVICE", "cpu,cpu")
    monkeypatch.setenv("P2P_DTFM_THREADS", "7")
    settings = told(nearby=False, listen=("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/3"), device="cpu")
    share = settings.model_copy(update={"until_stdin_closes": True, "memory_gib": 1.5})
    environment = environment_of(share)
    assert environment["P2P_DTFM_DEVICE"] == "cpu" and "P2P_DTFM_THREADS" not in environment
    monkeypatch.delenv("P2P_DTFM_THREADS")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve(None, {}).settings == share


def test_a_full_disk_ends_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon did not answer for a moment, so the file was written again, and all had to leave."""
    log = io.StringIO()
    parent = SeveralDevices(told(home=tmp_path), ("cpu", "cpu"), io.StringIO(), log)
    homes = [tmp_path, tmp_path / "devices/2"]
    homes[1].mkdir(parents=True)
    daemons: Any = [SimpleNamespace(root=root) for root in homes]
    parent._daemons = daemons
    monkeypatch.setattr(several, "ask_daemon", lambda root, what: {"peer_id": str(root)})
    room: list[bool] = []

    def write_whole(path: Path, payload: bytes) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(payload)

    monkeypatch.setattr(several.disk, "write_whole", write_whole)
    for _ in range(3):
        parent._tell_them_of_each_other()
    assert log.getvalue().count("No space left") == 1, "it is said, and once"
    room.append(True)
    parent._tell_them_of_each_other()
    assert all((root / several.BESIDE_FILE).exists() for root in homes), "once there is room"


def test_a_home_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any daemon that answered there was believed to be the first of them, and others were started
    beside it."""

    class Begun(Exception):
        pass

    def begin(*words: object, **rest: object) -> None:
        raise Begun

    monkeypatch.setattr(several.subprocess, "Popen", begin)
    monkeypatch.setattr(several.signal, "signal", lambda *what: None)
    settings = told(home=tmp_path / "new", device="cpu,cpu")
    parent = SeveralDevices(settings, ("cpu", "cpu"), io.StringIO(), io.StringIO())
    beside, holder = settings.home / several.BESIDE_FILE, Home(settings.home)
    holder.acquire()
    beside.write_text("[]")
    with pytest.raises(UserError, match="a daemon is already running in") as refused:
        parent.run()
    assert refused.value.exit_code == 3
    assert not left_out(told(home=settings.home)), "of a start that was refused"
    shutil.rmtree(settings.home)
    holder.release()
    with pytest.raises(Begun):
        parent.run()
    assert "--device cpu,cpu before" in left_out(told(home=settings.home)), "of the first one"
    beside.write_text("[]")
    holder.acquire()  # the daemon that it begins finds nobody in its home
    holder.release()
    assert beside.exists(), "it is not this one's, that has told nobody of others"


class Process:
    """The process of a daemon that lives, or has ended with a code."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code
        self.stdin, self.stdout, self.stderr = io.BytesIO(), io.BytesIO(), io.BytesIO()

    def poll(self) -> int | None:
        return self.code


@pytest.mark.parametrize("is_service", [True, False])
def test_one_of_a_service_that_fails_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_service: bool
) -> None:
    """None of the daemons knew that it belongs to a service. One that ended at log-in, as another
    program had the memory, was not started again while one of the others lived."""
    seconds, begun = [1000.0], []
    monkeypatch.setattr(now, "monotonic_s", lambda: seconds[0])

    def begin(command: list[str], env: dict[str, str], **rest: object) -> Process:
        begun.append((command[-1], env))
        return Process()

    monkeypatch.setattr(several.subprocess, "Popen", begin)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid() if is_service else os.getppid()))
    parent = SeveralDevices(told(home=tmp_path), ("cpu",) * 4, io.StringIO(), io.StringIO())
    codes = (None, 1, 5, -9)
    for number, code in enumerate(codes):
        daemon: Any = parent._begin(number, parent._shares[number])
        daemon.process = Process(code)
        parent._daemons.append(daemon)
    begun.clear()
    parent._begin_again()
    seconds[0] += several.BEGUN_AGAIN_S - 1
    parent._begin_again()
    assert not begun
    seconds[0] += 1
    parent._begin_again()
    parent._begin_again()
    homes = [str(tmp_path / "devices" / number) for number in ("2", "4")]
    assert [home for home, _ in begun] == (homes if is_service else [])
    for _, environment in begun:
        assert environment[SERVICE_VARIABLE] == str(os.getpid())
    assert is_a_service({SERVICE_VARIABLE: str(os.getppid())}) and not is_a_service({})
    parent._daemons[1].process = Process(1)  # type: ignore[assignment]
    parent._signals.append(15)
    parent._shares = []
    for each in parent._daemons:
        each.process.send_signal = lambda number: None  # type: ignore[method-assign]
    parent._pass_signals_on()
    seconds[0] += 1000
    parent._begin_again()
    assert len(begun) == (2 if is_service else 0), "it is to end"


def test_one_that_cannot_be_begun_again_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory was short for a moment, and the daemons that trained had to leave."""
    seconds, log, begun = [1000.0], io.StringIO(), []
    monkeypatch.setattr(now, "monotonic_s", lambda: seconds[0])
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))

    def begin(command: list[str], **rest: object) -> Process:
        begun.append(command[-1])
        if len(begun) == 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Process()

    monkeypatch.setattr(several.subprocess, "Popen", begin)
    parent = SeveralDevices(told(home=tmp_path), ("cpu", "cpu"), io.StringIO(), log)
    parent._daemons = [parent._begin(number, parent._shares[number]) for number in (0, 1)]
    parent._daemons[1].process = Process(1)  # type: ignore[assignment]
    for _ in range(4):
        parent._begin_again()
        seconds[0] += several.BEGUN_AGAIN_S
    assert begun[2:] == [str(tmp_path / "devices" / "2")] * 2
    assert log.getvalue().count("2 cpu cannot be begun again: ") == 1
    assert parent._daemons[1].process.poll() is None


def test_a_log_that_nobody_reads_any_more_holds_up_no_daemon(tmp_path: Path) -> None:
    """Behind `| head` nobody read what a daemon wrote, and it stood still once its pipe was
    full."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    parent = SeveralDevices(told(home=tmp_path), ("cpu", "cpu"), Closed(), Closed())
    lines = io.BytesIO(b"one\ntwo\nthree\n")
    parent._pass_lines(lines, Closed(), "1 cpu")
    assert lines.read() == b"", "all of it is taken"
