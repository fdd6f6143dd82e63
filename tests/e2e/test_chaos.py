"""`p2p-dtfm chaos`: real daemons, a seeded schedule, and a verdict that can be bad."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dtfm.cli.scenarios.chaos_case import ChaosCase, chaos_case
from p2p_dtfm.testbed.chaos_schedule import KINDS, chaos_schedule
from p2p_dtfm.testbed.chaos_verdict import judge
from p2p_dtfm.testbed.recovery.times import Inflicted
from tests.documentation.pages import blocks_of
from tests.e2e.helpers import Program, run_program, write_spec

WITHIN_S = 180.0
NAMES = tuple(f"peer-{number}" for number in range(8))


@pytest.mark.nightly
def test_a_small_swarm_bears_its_faults(tmp_path: Path) -> None:
    """The command of docs/chaos.md: its seed corrupts a stream and kills a peer."""
    (block,) = blocks_of("docs/chaos.md")
    (words,) = block.commands()
    began_s = time.monotonic()
    done = run_program(*words[1:], "--json")
    assert time.monotonic() - began_s < WITHIN_S, "whoever reads the page waits for it"
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"], (report["violations"], done.stderr[-2000:])
    assert done.returncode == 0
    assert set(report["recovery_s"]) == {"corrupt", "kill"}
    assert report["lost_samples"] == report["duplicated_samples"] == 0
    assert report["max_loss_difference"] < 1e-4
    assert report["committed_steps"] == report["total_steps"] > 30
    told = [entry["what"] for entry in report["timeline"]]
    assert sum(what.startswith("view ") for what in told) == report["views"] > 1
    redone = sum(int(n) for what in told for n in re.findall(r" (\d+) redone", what))
    assert redone == report["redone_microbatches"]
    held = tmp_path / "run.json"
    held.write_text(json.dumps({**report, "schedule": report["schedule"] + [{}]}))
    refused = run_program("chaos", "--replay", held)
    assert refused.returncode == 2 and "p2p-dtfm chaos --json" in refused.stderr


PLAYED = """
name = "lively"

[[group]]
name = "near"
count = 3
measured = true

[[group]]
name = "far"
count = 1
measured = true

[[link]]
from = "*"
to = "*"
latency_ms = 5.0
bandwidth_mbps = 800.0

[[fault]]
at_step = 4
kind = "join"
peer = "far-1"

[[fault]]
at_step = 8
kind = "cut"
peer = "far-1"
seconds = 16

[[fault]]
at_step = 12
kind = "degrade"
peer = "near-2"
factor = 4.0
steps = 4
"""


@pytest.mark.nightly
def test_a_scenario_is_played_with_its_own_faults(tmp_path: Path) -> None:
    """A newcomer is cut off. Alone it is too few, so it waits, and comes back when links heal."""
    scenario, kept = tmp_path / "lively.toml", tmp_path / "kept"
    scenario.write_text(PLAYED)
    spec = write_spec(tmp_path, limits={"min_members": 2})
    done = run_program("chaos", scenario, "--run", spec, "--keep", kept, "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"], (report["violations"], done.stderr[-2000:])
    assert set(report["recovery_s"]) == {"join", "partition", "degrade"}
    assert "far-1" not in report["peers"] and not report["emulated"]
    under_way = 1  # the newcomer's last Prepared may have come to one side alone
    assert report["given_up_steps"] <= under_way, "who is cut off alone does not train"
    log = (kept / "far-1" / "stderr").read_text()
    (history,) = (kept / "far-1").glob("runs/*/events.jsonl")
    events = map(json.loads, history.read_text().splitlines())
    views = [event for event in events if event["event"] == "view"]
    counts = [len(view["members"]) for view in views]  # the last views are of those that leave
    assert 1 in counts and "waiting: " in log, log[-2000:]
    assert 4 in counts[counts.index(1) :], "and it is back"


def case_of(tmp_path: Path, text: str, faults: int | None = None) -> ChaosCase:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return chaos_case(str(path), None, None, faults, "tiny")


def test_the_case_of_a_scenario(tmp_path: Path) -> None:
    case = case_of(tmp_path, PLAYED)
    assert case.peers == ("near-1", "near-2", "near-3") and case.newcomers == ("far-1",)
    assert [fault.kind for fault in case.schedule] == ["join", "partition", "degrade"]
    assert case.schedule[1].lasts_s == 16 and case.schedule[2].lasts_steps == 4
    assert case.schedule[2].factor == 4.0
    for_good = case_of(tmp_path, PLAYED.replace("seconds = 16", "")).schedule[1]
    assert for_good.lasts_s is None
    by_chance = case_of(tmp_path, PLAYED, faults=40)
    assert len(by_chance.schedule) == 40 and len(by_chance.peers) == 4
    played = by_chance.played()
    assert played is not None and by_chance.newcomers
    names = [peer.name for peer in played.peers]
    assert names == [*by_chance.peers, *by_chance.newcomers]
    links = {played.link(one, two) for one in names for two in names if one != two}
    assert len(links) == 1


def test_no_option_is_dropped_without_a_word(program: Program) -> None:
    for arguments, reason in (
        (("--replay", "run.json", "--run", "tiny"), "--replay does not go with --run"),
        (("two-cities", "--replay", "run.json"), "--replay does not go with a scenario"),
        (("two-cities", "--peers", "4"), "a scenario says which peers there are"),
        (("three-homes", "--seed", "3"), "three-homes states its faults"),
    ):
        code, _, said = program("chaos", *arguments)
        assert code == 2 and reason in said, said


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
    failed = {**view(2, "t", "q"), "kept_microbatches": 5, "redone_microbatches": 3}
    redone = judge({"a": [*good, failed], "b": [*good, failed]}, [], 10, 32, None)
    assert (redone.kept_microbatches, redone.redone_microbatches) == (5, 3), "once for each view"
    other_plan = [view(1, "s", "q"), *good[1:]]
    assert "2 plans" in judge({"a": good, "b": other_plan}, [], 10, 32, None).violations[0]
    gap = [event for event in good if event.get("step") != 4]
    lost = judge({"a": gap}, [], 10, 32, None)
    assert lost.lost_samples == 32 and "never committed" in lost.violations[0]
    twice = [*good, step(3, 11.0)]
    assert judge({"a": twice}, [], 10, 32, None).duplicated_samples == 32
    split = [Inflicted("partition", ("a",), 2, 2.0, 4.0)]
    assert not judge({"a": twice}, split, 10, 32, None).ok, "nobody else has stayed elsewhere"
    wrong = [*good[:-1], step(9, 9.0, loss=1.001)]
    assert "step 9 at a" in judge({"a": wrong}, [], 10, 32, lambda n: 1.0).violations[0]


def test_steps_since_the_newest_whole_cut_may_be_repeated_as_was_said() -> None:
    lagging = {**view(1, "s", "p"), "step": 0, "may_repeat_steps": 4}
    before = [{**step(n, float(n)), "safe_step": 5 if n > 6 else 0} for n in range(9)]
    after = [step(n, n + 10.0) for n in range(5, 12)]
    back = {**view(3, "t", "q"), "step": 5}
    kept = judge({"a": [lagging, *before, back, *after]}, [], 12, 32, None)
    assert kept.ok and (kept.repeated_steps, kept.duplicated_samples) == (4, 0)
    one = [lagging, *before[:6], {**back, "step": 5}, step(5, 15.0), *after[1:]]
    assert judge({"a": one}, [], 12, 32, None).ok, "of one step, too"
    waits = {**view(2, "w", "x"), "step": 9, "no_plan": "no member holds layers 2 any more"}
    late = judge({"a": [lagging, *before, waits, back, *after]}, [], 12, 32, None)
    assert late.ok and late.repeated_steps == 4, "what was said stands while layers are lost"
    too_far = [lagging, *before, {**back, "step": 4}, step(4, 14.0), *after]
    assert judge({"a": too_far}, [], 12, 32, None).duplicated_samples, "older than the whole cut"
    unsaid = [view(1, "s", "p"), *before, back, *after]
    assert judge({"a": unsaid}, [], 12, 32, None).duplicated_samples, "guardians did not lag"
    many = [{**step(n, 30.0 * n), "safe_step": 0} for n in range(40)]
    back = {**back, "step": 2}
    rest = [step(n, 2000.0 + n) for n in range(2, 40)]
    far = judge({"a": [lagging, *many, back, *rest]}, [], 40, 32, None)
    assert "38 steps" in far.violations[0], "more than was said"


def test_a_stall_is_the_time_without_a_commit() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]
    history = [step(n, time_s) for n, time_s in enumerate(times)]
    fault = Inflicted("kill", ("b",), 3, 3.5, 5.0)
    verdict = judge({"a": history}, [fault], 8, 1, None)
    assert verdict.usual_step_s == 1.0
    assert verdict.recovery_s["kill"] == {"count": 1, "median": 3.5, "worst": 3.5}
    assert verdict.recovery_alone_s == verdict.recovery_s
    assert abs(verdict.goodput - 7 / 11) < 1e-9
    leaving = [step(8, 30.0), step(9, 60.0)]
    verdict = judge({"a": [*history, *leaving]}, [fault], 10, 1, None, ends_s=11.5)
    assert abs(verdict.goodput - 7 / 11) < 1e-9, "all were told to leave"
    assert verdict.recovery_s["kill"]["worst"] == 3.5


def test_faults_that_fall_together_are_told_from_those_that_come_alone() -> None:
    times = [0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 14.0, 15.0, 16.0, 17.0]
    history = [step(n, time_s) for n, time_s in enumerate(times)]
    kill, pause = Inflicted("kill", ("b",), 2, 2.5, 3.0), Inflicted("pause", ("c",), 2, 2.5, 5.0)
    later = Inflicted("kill", ("b",), 8, 11.5, 12.0)
    verdict = judge({"a": history}, [kill, pause, later], 13, 1, None)
    assert verdict.recovery_s["kill"] == {"count": 2, "median": 2.0, "worst": 2.5}
    assert verdict.recovery_alone_s == {"kill": {"count": 1, "median": 1.5, "worst": 1.5}}


def test_what_the_next_fault_holds_up_is_not_said_of_the_one_before() -> None:
    """In a storm each kill comes as soon as the last one is over. Of two in a row the longer time
    counted for both, so the median of all was too long."""
    times = [0.0, 1.0, 2.0, 4.0, 5.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    history = [step(n, time_s) for n, time_s in enumerate(times)]
    first, second = (
        Inflicted("kill", ("b",), 2, 2.5, 5.0),
        Inflicted("kill", ("c",), 4, 5.25, 11.0),
    )
    verdict = judge({"a": history}, [first, second], 11, 1, None)
    assert verdict.recovery_s["kill"] == {"count": 2, "median": 2.125, "worst": 3.75}
    assert not verdict.recovery_alone_s, "who knows"
    at_once = Inflicted("kill", ("c",), 2, 3.5, 11.0)
    verdict = judge({"a": history}, [replace(first, ended_s=3.0), at_once], 11, 1, None)
    assert verdict.recovery_s["kill"]["median"] == 4.0, "steps had not come back yet"


def test_time_without_a_plan_is_no_recovery() -> None:
    """No side of the split has all layers."""
    times = [0.0, 1.0, 2.0, 12.0, 13.0, 14.0, 15.0]
    split = Inflicted("partition", ("b",), 2, 2.5, 10.0)
    without = {**view(2, "t", "q"), "time_s": 8.0, "no_plan": "no member holds layer 1"}
    steps = [step(n, time_s) for n, time_s in enumerate(times)]
    verdict = judge({"a": [*steps, without]}, [split], 7, 1, None)
    assert verdict.could_not_go_on == 1 and not verdict.recovery_alone_s
    assert verdict.recovery_s["partition"] == {"count": 1, "median": 1.0, "worst": 1.0}
    with_plan = {**without, "event": "view"}
    del with_plan["no_plan"]
    verdict = judge({"a": [*steps, without], "b": [with_plan]}, [split], 7, 1, None)
    assert verdict.could_not_go_on == 0 and verdict.recovery_s["partition"]["worst"] == 8.5
