"""What a storm of kills is judged by: nothing that a daemon leaves may go unseen."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.testbed import swarm_directory
from p2p_dtfm.testbed.kill_storm import KillStorm
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.storm_facts import LEAST_SAMPLES, StormFacts
from p2p_dtfm.testbed.swarm_directory import processes_left
from p2p_dtfm.testbed.watched_swarm import WatchedSwarm

NO_SUCH = 1 << 30
"""No process has this number."""


class _Process:
    def __init__(self, pid: int, ends_with: int | None = None) -> None:
        self.pid, self.returncode = pid, ends_with

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL

    def wait(self) -> None:
        """It has ended."""

    def send_signal(self, number: int) -> None:
        self.returncode = 1


def _child(home: Path, process: Any) -> Child:
    (home / "stderr").touch()
    return Child(home.name, home, process)


def test_two_processes_of_one_number_are_two(tmp_path: Path) -> None:
    """A thousand kills use up more numbers of processes and threads than Linux has by default. The
    next process of a number began with what the one before had come to, and all seemed well."""
    facts = StormFacts({7: [100] * LEAST_SAMPLES})
    facts.forget_killed(7)
    facts.resident_bytes[7] = [50] * (LEAST_SAMPLES - 3) + [100] * 3
    growth = facts.growth()
    assert growth is not None and growth.survivors == 2 and growth.worst == 1.0


def test_who_has_the_number_of_a_killed_process_was_not_killed_by_us(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path)
    swarm.children.append(_child(tmp_path, _Process(7)))
    watched = WatchedSwarm(swarm, {"id": tmp_path.name}, 100)
    watched.kill(tmp_path.name)
    assert not watched.wrong_ends()
    swarm.children.append(_child(tmp_path, _Process(7, -signal.SIGKILL)))
    assert len(watched.wrong_ends()) == 1, "as of one that had taken all memory"


def test_all_that_a_daemon_has_beside_its_home_is_its_own_to_remove(tmp_path: Path) -> None:
    """hivemind's client listens at a socket of its own. Of p2pd's alone nothing ever stays: it
    removes that itself."""
    folder, path = tmp_path / "temporary", tmp_path / "hivemind-p2pclient-x.sock"
    folder.mkdir()
    home = Home(tmp_path / "home", folder)
    home.acquire()
    child = _child(home.root, _Process(os.getpid()))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        (facts := StormFacts(lock_folder=folder)).sample([child])
    (lock,) = folder.iterdir()
    assert facts.files_left() == sorted(map(str, (path, lock)))
    facts.forget_killed(os.getpid(), facts.used_again(home.root))
    assert lock.exists(), "who starts again in this home finds it as the kill has left it"
    assert not path.exists() and not facts.files_left()
    facts._files[os.getpid()] = {path, lock}
    facts.forget_killed(os.getpid())
    assert not lock.exists() and not facts.files_left()
    home.release()


def test_a_storm_spares_one_daemon_so_that_what_each_kill_leaves_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly any other of eight lives through fifty kills, and little per kill went unseen."""
    swarm, started = LocalSwarm(tmp_path), list[str]()
    for name in ("peer-0", "peer-1", "peer-2"):
        (tmp_path / name).mkdir()
        swarm.children.append(_child(tmp_path / name, _Process(NO_SUCH)))

    def start_again(name: str, addresses: tuple[str, ...]) -> Child:
        started.append(name)
        (tmp_path / name).mkdir(exist_ok=True)
        swarm.children.append(_child(tmp_path / name, _Process(NO_SUCH)))
        return swarm.children[-1]

    monkeypatch.setattr(WatchedSwarm, "addresses", lambda _: ())
    monkeypatch.setattr(KillStorm, "_until_whole", lambda *_, **__: True)
    monkeypatch.setattr(KillStorm, "_until", lambda *_: True)
    KillStorm(swarm, {}, start_again, lambda *_: None, 1, 9).run(40)
    assert len(started) == 40
    assert swarm.children[2].process.returncode == 1, "told to leave in the end, and not killed"


def test_a_p2pd_that_outlives_its_daemon_is_a_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_directory, "LEFT_AFTER_S", 0.0)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    p2pd = subprocess.Popen([*sleeps, f"-id={tmp_path}/peer-0/identity.key"])
    try:
        assert processes_left(tmp_path) == 1
    finally:
        p2pd.kill()
        p2pd.wait()
    assert processes_left(tmp_path) == 0


def test_a_daemon_that_ends_with_an_error_as_the_last_one_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nobody ran any more, nobody was looked at any more."""
    swarm = LocalSwarm(tmp_path)
    swarm.children.append(_child(tmp_path, _Process(7)))
    storm = KillStorm(swarm, {"id": tmp_path.name}, lambda *_: pytest.fail(), lambda *_: None, 1, 9)
    storm.stop()
    monkeypatch.setattr(storm, "_until_whole", lambda *_, **__: False)
    (wrong,) = storm.run(3).wrong
    assert f"{tmp_path.name} ended with code 1" in wrong


def test_goodput_ends_where_all_are_told_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last steps are of the few that have not left yet, and counted as what kills had cost."""
    told_s = list[float]()
    monkeypatch.setattr(WatchedSwarm, "end_all", lambda watched: told_s.append(time.time()))
    monkeypatch.setattr(KillStorm, "_until_whole", lambda *_, **__: False)
    swarm = LocalSwarm(tmp_path)
    storm = KillStorm(swarm, {}, lambda *_: pytest.fail(), lambda *_: None, 1, 9)
    began_s = time.time()
    assert began_s <= storm.run(3).ends_s <= told_s[0]


def test_the_memory_of_a_daemon_is_also_that_of_its_p2pd(tmp_path: Path) -> None:
    """It has a sixth of it, and grows with each peer that came and went."""
    home = Home(tmp_path / "home", tmp_path)
    home.acquire()
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p2pd:
        assert p2pd.stdout is not None
        p2pd.stdout.readline()
        facts = StormFacts(lock_folder=tmp_path)
        facts.sample([_child(home.root, _Process(os.getpid()))])
        theirs = psutil.Process(p2pd.pid).memory_info().rss
        own = psutil.Process().memory_info().rss
        p2pd.kill()
    (sample,) = facts.resident_bytes[os.getpid()]
    assert sample > own + theirs // 2
    home.release()
