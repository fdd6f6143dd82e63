"""Real daemons as child processes: they train what one machine would, and come and go cleanly."""

import json
import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from p2p_dtfm.daemon.telemetry.contribution import FILE, KeptTallies
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.model.gpt import layer_count
from tests.conftest import DemoRun
from tests.e2e.helpers import (
    DEADLINE_S,
    assert_nothing_is_left,
    losses,
    step_of,
    wait_until,
    write_spec,
)
from tests.e2e.parity import assert_equals_the_plain_loop
from tests.e2e.walking_daemon import MODULE


def digests_by_view(child: Child) -> dict[int, tuple[str, str]]:
    views = [event for event in child.events() if event["event"] == "view"]
    return {event["view"]: (event["snapshot"], event["plan"]) for event in views}


def offers_of(swarm: LocalSwarm) -> list[Path]:
    return [path for child in swarm.children for path in child.home.glob("runs/*/offers/*")]


def test_peers_join_and_leave_mid_run_and_the_loss_is_that_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for half the model each makes pipelines; one daemon joins late, and one leaves early.
    They walk, and slowly, so few steps, which cost processor time, pass until the late one has
    come."""
    monkeypatch.setenv("RESTS_S", "0.5")
    steps = 70
    spec = write_spec(
        tmp_path,
        total_steps=steps,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        evaluation={"every_steps": 50, "sequences": 4},
        # gentle steps: otherwise rounding differences grow tenfold every ten steps, as chaos does
        optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
    )
    half = ["--memory-gib", "0.0049"]
    arguments = ["--threads", "1", "--exit-when-done"]
    with LocalSwarm(tmp_path, arguments, MODULE) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "3", *half])
        leaver = swarm.join(address, half)
        third = swarm.join(address, half)
        wait_until(lambda: step_of(founder) >= 10, "ten steps")
        late = swarm.join(address, half)
        wait_until(lambda: len(digests_by_view(late)) > 0, "the late joiner takes part")
        assert step_of(founder) < steps - 20, "it joined in the middle of the run"
        wait_until(lambda: not any(offers_of(swarm)), "the states it was offered are removed")
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.process.wait(DEADLINE_S) == 0, leaver.log_tail()
        for child in (founder, third, late):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert step_of(leaver) < steps - 1, "it left before the end"
    logs = [(child.home / "stderr").read_text() for child in swarm.children]
    assert any("direct lines to" in log for log in logs), "the founder may be a spare"
    for child in swarm.children:
        assert not list(child.home.glob("runs/*/offers/*")), "followers' states are gone"
    assert_equals_the_plain_loop(founder, steps)
    assert losses(late).items() <= losses(founder).items()
    assert losses(leaver).items() <= losses(founder).items()
    all_views: dict[int, set[tuple[str, str]]] = {}
    for child in swarm.children:
        for view, digests in digests_by_view(child).items():
            all_views.setdefault(view, set()).add(digests)
    assert len(all_views) >= 3
    assert all(len(digests) == 1 for digests in all_views.values()), all_views


def test_the_demo_ends_with_one_json_object(demo_run: DemoRun) -> None:
    (line,) = demo_run.done.stdout.splitlines()
    result = json.loads(line)
    assert result["steps"] == 40
    assert result["peers"] == 4
    assert 0 < result["held_out_loss"] < 4.0
    assert result["tokens_per_s"] > 0
    assert result["agreed"] is True
    assert result["processes_left"] == 0
    assert [view["view"] for view in result["views"]] == sorted(v["view"] for v in result["views"])
    assert len(result["views"][-1]["members"]) == 4
    assert result["snapshot"] == result["views"][-1]["snapshot"]
    assert result["plan"] == result["views"][-1]["plan"]


def test_a_complete_run_leaves_equal_boards_and_a_report_at_each_peer(demo_run: DemoRun) -> None:
    homes = sorted(path.parent for path in demo_run.directory.glob("*/runs"))
    assert len(homes) == 4
    boards = []
    for home in homes:
        (path,) = home.glob(f"runs/*/{FILE}")
        tallies = msgspec.json.decode(path.read_bytes(), type=KeptTallies).tallies
        assert tallies.step_count == 40
        boards.append(tallies.board())
        (report,) = home.glob("runs/*/report.html")
        page = report.read_text()
        assert "Who took part" in page and "p2p-dtfm generate" in page
        assert "What it wrote as it learned" in page, "the last text is always written"
        log = (home / "stderr").read_text()
        assert "is complete: 40 steps" in log and "next: p2p-dtfm export" in log
    assert all(board == boards[0] for board in boards)
    spec = read_run_spec("tiny")
    assert sum(boards[0].values()) == 40 * spec.tokens_per_step * layer_count(spec)


def test_p2pd_is_gone_within_two_seconds_of_kill_9(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, ["--threads", "1"]) as swarm:
        founder, _ = swarm.found(["--run", str(write_spec(tmp_path))])
        family = psutil.Process(founder.process.pid).children(recursive=True)
        p2pd = [process for process in family if "p2pd" in process.name()]
        assert p2pd, "the daemon runs a p2pd"
        os.kill(founder.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, p2pd)), "p2pd is gone", deadline_s=2.0)


def test_daemons_end_when_their_parent_dies(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, ["--threads", "1"]) as swarm:
        founder, _ = swarm.found(["--run", str(write_spec(tmp_path))])
        assert founder.process.stdin is not None
        founder.process.stdin.close()
        assert founder.process.wait(DEADLINE_S) in (0, 130), "130: not in time to hand over"


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def no_daemon_is_left(tmp_path: Path):
    yield
    assert_nothing_is_left(tmp_path)


@pytest.mark.nightly
def test_a_replica_stands_in_for_a_killed_peer(tmp_path: Path) -> None:
    """Memory allows only two pipelines of two; one daemon is killed in the middle of a step."""
    steps = 24
    spec = write_spec(
        tmp_path,
        total_steps=steps,
        model={"layers": 2, "width": 128, "heads": 2, "context": 128, "vocabulary": 256},
        batch={"global_batch": 64, "microbatch": 4},
        evaluation={"every_steps": 3, "sequences": 8},
        optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
    )
    half = ["--memory-gib", "0.012"]
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done"]) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "4", *half])
        others = [swarm.join(address, half) for _ in range(3)]
        wait_until(lambda: step_of(founder) >= 6, "six steps")
        layers = [tuple(child.status()["layers"]) for child in swarm.children]
        assert sorted(layers) == [(0, 1), (0, 1), (2, 3), (2, 3)]
        os.kill(others[0].process.pid, signal.SIGKILL)
        for child in (founder, *others[1:]):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert_equals_the_plain_loop(founder, steps)
    views = [event for event in founder.events() if event["event"] == "view"]
    mended = [view for view in views if view.get("stand_ins")]
    assert mended and mended[0]["kept_microbatches"] > 0, views
    assert "stand_ins" not in views[-1], "planned anew"
