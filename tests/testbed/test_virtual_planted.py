"""A planted bug is found by what it does to a daemon: neither the world nor the judge has it."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.testbed.virtual.planted.__main__ import BUGS, Search
from p2p_dtfm.testbed.virtual.planted.bug import Planted, planted
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.saved import checkpoint_roots, is_whole, layer_of, list_at
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.train.model.checkpoint import OpenCheckpoint, complete, layer_path

NOTHING = Planted("nothing", "nothing is planted", lambda patches: None)


def bug(name: str) -> Planted:
    return next(it for it in BUGS if it.name == name)


@pytest.mark.parametrize("is_of_the_world", [True, False])
def test_what_the_world_raises_finds_no_bug(is_of_the_world: bool) -> None:
    class Plays:
        """Takes the place of a player: the first play of a seed goes wrong."""

        def __init__(self) -> None:
            self.played = list[int]()

        def play(self, seed: int) -> Played:
            self.played.append(seed)
            problem = "" if self.played.count(seed) > 1 else f"of seed {seed}"
            wrong = bool(problem) and is_of_the_world
            return Played(Schedule((), (), ()), problem=problem, is_of_the_world=wrong)

    player: Any = Plays()
    found = Search(player).found(NOTHING, within=2, first=7)
    assert found == (None if is_of_the_world else (1, "of seed 7"))


def test_who_is_killed_lets_go_of_its_home_though_daemons_do_not(tmp_path: Path) -> None:
    with planted(bug("home-stays-locked")):
        for let_go in (Home.let_go, Home.release):
            held, other = (Home(tmp_path / let_go.__name__, tmp_path) for _ in range(2))
            held.acquire()
            let_go(held)
            if let_go is Home.let_go:
                other.acquire()
                other.let_go()
            else:
                with pytest.raises(UserError):
                    other.acquire()
            held.let_go()


def test_who_judges_looks_at_files_that_daemons_believe(tmp_path: Path) -> None:
    spec = RunSpec.model_validate_json(make_run(tmp_path, 4).read_text())
    root = tmp_path / "runs" / "a" / "checkpoints"
    root.parent.mkdir(parents=True)
    saving = OpenCheckpoint(root, spec, 4, 0)
    saving.begin()
    for layer in range(spec.model.layer_count):
        saving.add(layer, bytes([layer]) * 64)
    saving.end()
    (saved,) = (it for place in checkpoint_roots(tmp_path) for it in list_at(place, 4))
    with planted(bug("believed")):
        assert is_whole(saved) and complete(saved.directory)
        layer_path(saved.directory, 1).write_bytes(bytes(64))
        assert complete(saved.directory), "it is the bug"
        assert not is_whole(saved) and layer_of(saved, 1) is None
        layer_path(saved.directory, 2).unlink()
        assert not is_whole(saved) and layer_of(saved, 2) is None
