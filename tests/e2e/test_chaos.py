"""`p2p-dtfm chaos`: real daemons, a seeded schedule, and a verdict that can be bad."""

import json
from pathlib import Path

from p2p_dtfm.daemon.chaos_verdict import Inflicted, judge
from p2p_dtfm.sim.chaos_schedule import KINDS, chaos_schedule
from tests.documentation.pages import blocks_of
from tests.e2e.helpers import run_program

NAMES = tuple(f"peer-{number}" for number in range(8))


def test_a_small_swarm_bears_its_faults(tmp_path: Path) -> None:
    """The command of docs/chaos.md: its seed corrupts a stream and kills a peer."""
    (block,) = blocks_of("docs/chaos.md")
    (words,) = block.commands()
    done = run_program(*words[1:], "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"], (report["violations"], done.stderr[-2000:])
    assert done.returncode == 0
    assert set(report["recovery_s"]) == {"corrupt", "kill"}
    assert report["lost_samples"] == report["duplicated_samples"] == 0
    assert report["max_loss_difference"] < 1e-4
    assert report["committed_steps"] == report["total_steps"] > 30
    held = tmp_path / "run.json"
    held.write_text(json.dumps({**report, "schedule": report["schedule"] + [{}]}))
    refused = run_program("chaos", "--replay", held)
    assert refused.returncode == 2 and "p2p-dtfm chaos --json" in refused.stderr


def test_a_seed_is_a_schedule() -> None:
    assert chaos_schedule(NAMES, 5, 40) == chaos_schedule(NAMES, 5, 40)
    assert chaos_schedule(NAMES, 5, 40) != chaos_schedule(NAMES, 6, 40)
    kinds = {fault.kind for seed in range(20) for fault in chaos_schedule(NAMES, seed, 20)}
    assert kinds == set(KINDS)
    for seed in range(200):
        gone: set[str] = set()
        for fault in chaos_schedule(NAMES, seed, 30):
            assert not gone & set(fault.peers), "nothing happens to who has left"
            gone |= set(fault.peers) if fault.kind == "leave" else set()


def step(number: int, time_s: float, loss: float = 1.0, view: int = 1) -> dict[str, object]:
    return {"event": "step", "step": number, "time_s": time_s, "loss": loss, "view": view}


def view(number: int, snapshot: str, plan: str) -> dict[str, object]:
    return {"event": "view", "view": number, "snapshot": snapshot, "plan": plan, "time_s": 0.0}


def test_the_verdict_finds_what_is_wrong() -> None:
    good = [view(1, "s", "p"), *(step(n, float(n)) for n in range(10))]
    assert judge({"a": good, "b": good}, [], 10, 32, lambda n: 1.0).ok
    other_plan = [view(1, "s", "q"), *good[1:]]
    assert "2 plans" in judge({"a": good, "b": other_plan}, [], 10, 32, None).violations[0]
    gap = [event for event in good if event.get("step") != 4]
    lost = judge({"a": gap}, [], 10, 32, None)
    assert lost.lost_samples == 32 and "never committed" in lost.violations[0]
    twice = [*good, step(3, 11.0)]
    assert judge({"a": twice}, [], 10, 32, None).duplicated_samples == 32
    split = [Inflicted("partition", ("a",), 2, 2.0, 4.0)]
    healed = judge({"a": twice}, split, 10, 32, None)
    assert healed.ok and healed.given_up_steps == 1
    wrong = [*good[:-1], step(9, 9.0, loss=1.001)]
    assert "step 9 at a" in judge({"a": wrong}, [], 10, 32, lambda n: 1.0).violations[0]


def test_a_stall_is_the_time_without_a_commit() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]
    history = [step(n, time_s) for n, time_s in enumerate(times)]
    fault = Inflicted("kill", ("b",), 3, 3.5, 5.0)
    verdict = judge({"a": history}, [fault], 8, 1, None)
    assert verdict.usual_step_s == 1.0
    assert verdict.recovery_s["kill"] == {"count": 1, "median": 3.5, "worst": 3.5}
    assert abs(verdict.goodput - 7 / 11) < 1e-9
