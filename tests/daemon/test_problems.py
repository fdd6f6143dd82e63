"""Problems: none while nothing is wrong, and the right cause with one action while something is."""

import errno
import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.planner.planner import compute_plan, without_planning
from p2p_dtfm.core.protocol.plan import LAYERS_LOST, NoPlan
from p2p_dtfm.core.protocol.workload import Confined, Workload
from p2p_dtfm.daemon.telemetry import event_log
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.daemon.telemetry.problems import Sight, problems_in
from p2p_dtfm.daemon.telemetry.status import State, Status, Troubles
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot, workload

WELL = Sight(State.TRAINING, "step 3 of 9", 60.0, uncommitted_s=0.4, step_s=0.5)


def texts(sight: Sight) -> list[str]:
    found = list(problems_in(sight))
    assert all(problem.fix and "\n" not in problem.what + problem.fix for problem in found)
    return [problem.what for problem in found]


def test_nothing_is_wrong_while_it_trains_or_waits_for_its_turn() -> None:
    assert not texts(WELL)
    assert not texts(replace(WELL, uncommitted_s=9.0))
    assert not texts(replace(WELL, step_s=30.0, uncommitted_s=100.0)), "steps are that long"
    assert not texts(replace(WELL, state=State.WAITING, step_s=None, uncommitted_s=500.0))
    assert not texts(replace(WELL, state=State.JOINING, in_state_s=30.0))
    for state in (State.SPARE, State.PAUSED, State.LEAVING, State.DONE):
        assert not texts(replace(WELL, state=state, uncommitted_s=500.0, is_failing=True)), state


def test_a_late_step_names_who_is_silent_before_whom_it_waits_for() -> None:
    late = replace(WELL, uncommitted_s=12.0, waits_for=("…bbbbbb",))
    assert texts(late) == ["no step was committed for 12 s: this peer waits for …bbbbbb"]
    silent = replace(late, silent=(("…aaaaaa", 11.0), ("…cccccc", 14.0)))
    assert texts(replace(silent, uncommitted_s=4.0)), "nobody is silent for seconds"
    assert texts(silent) == ["no step was committed for 12 s: …cccccc was not heard of for 14 s"]


def test_the_first_step_of_a_view_is_late_by_the_plan() -> None:
    """Nothing is known of late: where steps take more than ten seconds the peer waited for "tensors
    of its neighbours", at the beginning of every view."""
    first = replace(WELL, step_s=None, predicted_s=20.0, uncommitted_s=70.0)
    assert not texts(first) and not texts(replace(first, step_s=1.0))
    assert texts(replace(first, uncommitted_s=110.0))
    assert not texts(replace(first, state=State.WAITING, uncommitted_s=500.0))


def test_who_is_alone_has_no_neighbours() -> None:
    (what,) = texts(replace(WELL, uncommitted_s=12.0, is_only_member=True))
    assert what.endswith("this peer computes it alone, and waits for nobody")


def test_who_waits_for_something_of_its_own_does_not_blame_its_neighbours() -> None:
    """A lone peer lacked data that only a killed peer had. It was told to look at its neighbours'
    computers."""
    why = "data shard 5bd6 is missing here (…aaaaaa: refused; …bbbbbb: refused)"
    reason = f"{why}; it is taken as soon as a peer has it"
    lacking = replace(WELL, state=State.WAITING, reason=reason, uncommitted_s=12.0)
    (problem,) = problems_in(lacking)
    assert problem.what == f"no step was committed for 12 s: {why}"
    assert problem.fix == "it is taken as soon as a peer has it"
    failed = replace(lacking, reason="a failure: the members agree on how to go on")
    (problem,) = problems_in(failed)
    assert problem.what == f"no step was committed for 12 s: {failed.reason}" and problem.fix
    assert "…cccccc was not heard of" in texts(replace(lacking, silent=(("…cccccc", 14.0),)))[0]


def test_a_failure_is_said_at_once() -> None:
    failing = replace(WELL, state=State.WAITING, is_failing=True, lost=("…aaaaaa",))
    (what,) = texts(failing)
    assert what.startswith("…aaaaaa fell silent, stands still or went on with others")
    assert not texts(replace(failing, lost=())), "a step is repeated, by itself and at once"


def test_no_plan_and_nobody_who_lets_one_in() -> None:
    assert "no steps happen" in texts(replace(WELL, state=State.WAITING, no_plan="too few"))[0]
    alone = replace(WELL, state=State.JOINING, in_state_s=120.0, reason="asks …aaaaaa")
    assert texts(alone)[0].startswith("for 2 min nobody has let this peer in")


def fix(plan: object, is_invited: bool = False) -> str:
    assert isinstance(plan, NoPlan)
    stuck = replace(WELL, state=State.WAITING, no_plan=plan.reason, is_invited=is_invited)
    (problem,) = problems_in(stuck)
    return problem.fix


def confined(**to: Any) -> Workload:
    return msgspec.structs.replace(workload(), confined=Confined(**to))


def test_what_helps_depends_on_why_there_is_no_plan() -> None:
    """The advice was another computer, whatever the reason, and an address even where only invited
    peers are let in."""

    short = [Peer(memory_bytes=64 << 20)]
    small = compute_plan(snapshot(short))
    assert "--initial-peers" in fix(small)
    assert "--initial-peers" not in fix(small, True) and "--invite" in fix(small, True)
    named = compute_plan(snapshot([Peer()], confined(ends=(name_of(7),))))
    assert "a computer that the run names" in fix(named)
    whole = compute_plan(snapshot(short, confined(one_stage=True)))
    assert "a computer with so much memory" in fix(whole)
    failing = without_planning(snapshot([Peer()]))
    assert "report it" in fix(failing) and "another computer" not in fix(failing)
    lost = NoPlan(f"{LAYERS_LOST} 2, 3 any more; waits for a peer that does")
    assert "that had them" in fix(lost)


@pytest.mark.parametrize("largest", [1030, 1000], ids=["one-has-room", "nobody-has"])
@pytest.mark.parametrize(
    ("named", "helps"),
    [((), "a computer with so much memory"), ((0, 1, 2), "a computer that the run names")],
)
def test_where_an_end_lacks_room_no_small_computer_helps(
    largest: int, named: tuple[int, ...], helps: str
) -> None:
    """Nor does one that may not have the end. The advice asked for any computer."""
    whole = confined(ends=tuple(map(name_of, named)))
    larger = msgspec.structs.replace(whole.embedding, state_bytes=1017 * MEBIBYTE)
    work = msgspec.structs.replace(whole, embedding=larger, head=larger)
    sizes = [largest, *[1000] * 4]
    refused = compute_plan(snapshot([Peer(memory_bytes=it * MEBIBYTE) for it in sizes], work))
    assert helps in fix(refused)


def test_a_trouble_lasts_until_it_is_over(tmp_path, caplog) -> None:
    troubles = Troubles()
    history = EventLog(tmp_path / "gone" / "events.jsonl", troubles)
    with caplog.at_level(logging.WARNING):
        history.write("step", step=1)
        history.write("step", step=2)
    ((what, fix),) = troubles.present()
    assert "history of this run cannot be written" in what and "free space" in fix
    assert len(caplog.records) == 1, "there is a line for each step, and a log fills disks, too"
    (tmp_path / "gone").mkdir()
    history.write("step", step=3)
    assert not troubles.present()
    (tmp_path / "gone" / "events.jsonl").unlink()
    (tmp_path / "gone").rmdir()
    with caplog.at_level(logging.WARNING):
        history.write("step", step=4)
    assert len(caplog.records) == 2, "another time"
    assert Status().troubles is not Status().troubles


def test_a_disk_that_became_read_only_is_not_to_be_emptied(tmp_path, monkeypatch) -> None:
    """A disk does so after an error, and training goes on. Its owner was told to free space."""

    def refuses(path: object, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(event_log.disk, "append", refuses)
    EventLog(tmp_path / "events.jsonl", troubles := Troubles()).write("step", step=1)
    ((what, fix),) = troubles.present()
    assert "Read-only file system" in what and "make it writable" in fix


def test_who_is_audited_by_one_other_only_is_told_while_it_trains() -> None:
    (what,) = texts(replace(WELL, unsure=("…aaaaaa", "…bbbbbb")))
    assert what.startswith("the work of …aaaaaa, …bbbbbb can be judged by one other only")
    assert not texts(replace(WELL, state=State.SPARE, unsure=("…aaaaaa",)))


def test_of_hundreds_a_few_are_named_and_the_others_counted() -> None:
    names = tuple(f"peer-{number}" for number in range(300))
    for sight in (
        replace(WELL, unsure=names),
        replace(WELL, alone=names),
        replace(WELL, unlike=names),
        replace(WELL, believed=names),
        replace(WELL, uncommitted_s=60.0, waits_for=names),
        replace(WELL, is_failing=True, lost=names),
    ):
        (what,) = texts(sight)
        assert "peer-6, peer-7 and 292 others" in what and "peer-8" not in what
    assert "peer-7 can" in texts(replace(WELL, unsure=names[:8]))[0]


def test_who_is_audited_by_nobody_is_told_and_why() -> None:
    alone, unlike = texts(replace(WELL, alone=("…aaaaaa",), unlike=("…bbbbbb",)))
    assert alone.startswith("the work of …aaaaaa is audited by nobody: nobody else has its layers")
    assert "…bbbbbb is audited by nobody" in unlike and "another processor or PyTorch" in unlike
    assert unlike.endswith("whatever it computes is believed"), "a liar may say so of itself"
    assert not texts(replace(WELL, state=State.SPARE, alone=("…aaaaaa",)))
