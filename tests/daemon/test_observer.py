"""A daemon's account of itself: problems while they last, events once each, ids cut short."""

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.agreement_state import RunConstants
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.names import generated_name
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard import judged
from p2p_dtfm.daemon.dashboard.dashboard_host import stored_token
from p2p_dtfm.daemon.dashboard.observer import Observer, shortened
from p2p_dtfm.daemon.telemetry import problems as module
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from tests.core.audit.parts import PLAN
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot, workload

PEER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyLG"
CALLED = generated_name(PEER)
log = logging.getLogger("p2p_dtfm")


def agreement_of(spec: RunSpec) -> Agreement:
    """The agreement of a peer in no view."""
    terms = terms_of(spec)
    constants = RunConstants("run", workload(), lambda _: b"", lambda *_: True, terms)
    return Agreement(Member(name_of(0), 1), constants)


@pytest.fixture
def observed() -> Iterator[tuple[Status, Observer]]:
    status = Status()
    observer = Observer(status)
    observer.begin()
    yield status, observer
    observer.close()


def test_a_warning_is_one_event_and_no_problem(observed: tuple[Status, Observer]) -> None:
    _, observer = observed
    for _ in range(3):
        log.warning("disconnected %s: a frame that is not due", PEER)
    assert not observer.live().problems, "it is dealt with, and nobody has to do anything"
    (event,) = observer.state().events
    assert (event.kind, event.text) == ("fault", f"disconnected {CALLED}: a frame that is not due")
    assert observer.state().events is observer.state().events, "unchanged: the same object"


def test_a_warning_of_another_day_is_another_event(observed: tuple[Status, Observer]) -> None:
    """A warning on Monday and again on Thursday was told for Monday alone."""
    _, observer = observed
    first = log.makeRecord("p2p_dtfm", logging.WARNING, "", 0, "the line broke", (), None)
    for after_s in (0.0, 300.0, 800.0, 90_000.0):
        record = log.makeRecord("p2p_dtfm", logging.WARNING, "", 0, "the line broke", (), None)
        record.created = first.created + after_s
        log.handle(record)
    times = [event.time_s - first.created for event in observer.state().events]
    assert times == pytest.approx([90_000.0, 0.0], abs=0.01)


def test_before_it_begins_nothing_is_heard() -> None:
    """A daemon that ends before it begins, as with impossible settings, hears nothing more."""
    observer = Observer(Status())
    log.warning("something")
    assert not observer.state().events


def test_after_its_end_nothing_is_heard(observed: tuple[Status, Observer]) -> None:
    _, observer = observed
    observer.close()
    log.warning("something")
    assert not observer.state().events


def test_what_somebody_must_see_to_is_a_problem_until_it_is_over(
    observed: tuple[Status, Observer],
) -> None:
    status, observer = observed
    status.troubles.tell("disk", "the disk is full", "free space")
    assert [(each.what, each.fix) for each in observer.live().problems] == [
        ("the disk is full", "free space")
    ]
    status.troubles.over("disk")
    assert not observer.live().problems


def test_whom_the_others_have_left_tells_of_no_failure_that_is_dealt_with(
    observed: tuple[Status, Observer],
) -> None:
    """It waits for minutes, or for room on its disk. Meanwhile it told that the members agree on
    how to go on without a peer that it had missed before, and nothing was to be done."""
    status, observer = observed
    status.say(State.WAITING, "this start cannot be noted in the home: no space; free space")
    agreement: Any = SimpleNamespace(
        view=SimpleNamespace(plan=None),
        next_view=None,
        attempting=False,
        frozen=True,
        is_outside=False,
        suspected=(PEER,),
        watched=(),
        step=3,
    )
    observer._agreement = agreement
    (problem,) = observer.live().problems
    assert "until the members agree" in problem.what
    agreement.is_outside = True
    assert not observer.live().problems


def test_a_late_step_is_a_problem_that_names_whom_it_waits_for(
    observed: tuple[Status, Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, observer = observed
    status.say(State.TRAINING, "step 3 of 9")
    status.facts |= {"waits_for": [PEER], "step": 3}
    assert not observer.live().problems, "not yet"
    monkeypatch.setattr(module, "LATE_S", 0.0)
    (problem,) = observer.live().problems
    assert f"waits for {CALLED}" in problem.what and problem.fix
    status.say(State.SPARE, "the plan is faster without this peer")
    assert not observer.live().problems, "a spare waits for nobody"


def test_a_long_first_step_of_a_view_is_no_problem(
    observed: tuple[Status, Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of steps was forgotten with the last step of the view before, which commits as the
    next view begins."""
    status, observer = observed
    monkeypatch.setattr(module, "LATE_S", 0.0)
    status.say(State.TRAINING, "step 3 of 9")
    observer.trains(run_spec(), "run", workload(), agreement_of(run_spec()))
    assert observer.live().problems
    observer._view_state = msgspec.structs.replace(observer._view_state, predicted_step_ns=10**10)
    assert not observer.live().problems, "by the plan"
    observer._view_state = msgspec.structs.replace(observer._view_state, predicted_step_ns=0)
    for step, rate in enumerate((1.0, None)):
        status.facts["tokens_per_s"] = rate
        observer.step_committed(StepOutcome(step, 1.0, 5.5, 10, None, None))
        assert not observer.live().problems, "by what is usual"
    assert observer.state().history.tokens_per_s == (1.0, None)


def test_a_clock_that_is_set_makes_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a clock of its own begins in 1970. A second after it began to ask, its user
    heard that nobody had let it in for half a century."""
    wall_s, monotonic_s = 0.0, 0.0
    monkeypatch.setattr(now, "wall_s", lambda: wall_s)
    status = Status(clock_s=lambda: monotonic_s)
    observer = Observer(status)
    status.say(State.JOINING, "asks to be let in")
    wall_s, monotonic_s = 1_800_000_000.0, 1.0
    assert not observer.problems()
    monotonic_s = 120.0
    (problem,) = observer.problems()
    assert problem.what.startswith("for 2 min nobody has let this peer in")
    observer.close()


def test_who_is_barred_is_not_told_to_look_at_its_connection() -> None:
    """A bar lasts for hundreds of steps. After a minute and a half of it the page, and a webhook,
    said twice that the peer is barred, the first time with advice that helps nobody."""
    monotonic_s = 0.0
    status = Status(clock_s=lambda: monotonic_s)
    observer = Observer(status)
    what = "this peer is barred until step 400, 380 steps from now"
    status.say(State.JOINING, what)
    status.troubles.tell("barred", what, "nothing before that step")
    monotonic_s = 600.0
    (problem,) = observer.problems()
    assert (problem.name, problem.fix) == ("barred", "nothing before that step")
    status.troubles.over("barred")
    assert "doctor" in observer.problems()[0].fix
    observer.close()


def test_views_tell_who_came_and_who_went(observed: tuple[Status, Observer]) -> None:
    _, observer = observed

    def view(*numbers: int) -> View:
        shot = snapshot([Peer() for _ in range(max(numbers) + 1)], workload())
        kept = tuple(record for at, record in enumerate(shot.records) if at in numbers)
        shot = msgspec.structs.replace(shot, records=kept)
        return View(shot, NoPlan("for the test"))

    async def live() -> None:
        spec, agreement = run_spec(), agreement_of(run_spec())
        observer.trains(spec, "run", workload(), agreement)
        observer.view_took_over(spec, view(0, 1), 0)
        observer.view_took_over(spec, view(0, 2), 5)
        async with asyncio.timeout(10):
            while len(observer.state().view.peers) != 2 or observer.state().view.from_step != 5:
                await asyncio.sleep(0.01)

    asyncio.run(live())
    told = [(event.kind, event.text) for event in reversed(observer.state().events)]
    assert [kind for kind, _ in told] == ["view", "joined", "left", "view"]
    assert told[1][1].startswith(generated_name(name_of(2)))
    assert told[2][1].startswith(generated_name(name_of(1)))
    assert observer.state().history.view_step == (0, 5)


def test_of_hundreds_that_come_at_once_a_few_are_named(observed: tuple[Status, Observer]) -> None:
    """Otherwise these names fill all of the two hundred events."""
    _, observer = observed
    shot = snapshot([Peer() for _ in range(300)], workload())
    few = View(msgspec.structs.replace(shot, records=shot.records[:1]), NoPlan("for the test"))

    async def live() -> None:
        for at, view in enumerate((few, View(shot, NoPlan("for the test")), few)):
            observer.view_took_over(run_spec(), view, at)

    asyncio.run(live())
    told = [(event.kind, event.text) for event in reversed(observer.state().events)]
    assert [kind for kind, _ in told] == ["view", *["joined"] * 9, "view", *["left"] * 9, "view"]
    assert told[9][1] == "291 others take part" and told[19][1] == "291 others take part no more"


def test_three_friends_with_unlike_processors_hear_that_nobody_audits(
    observed: tuple[Status, Observer],
) -> None:
    status, observer = observed
    facts = {"next_view": None, "attempting": False, "frozen": False, "suspected": ()}
    agreement: Any = SimpleNamespace(view=SimpleNamespace(plan=PLAN), **facts)
    observer.trains(run_spec(audit={"rate": 1.0}), "run", workload(), agreement)
    status.say(State.TRAINING, "step 3 of 9")
    assert not observer.problems(), "all have the same layers, and more is not known yet"
    holders = PLAN.stage_holders()
    status.facts["arithmetics"] = dict.fromkeys(holders, "cpu-1")
    assert not observer.problems()
    status.facts["arithmetics"] = {peer: f"cpu-{peer}" for peer in holders}
    (problem,) = observer.problems()
    assert "audited by nobody: whoever has its layers has another processor" in problem.what
    status.facts["arithmetics"] = {peer: "cpu-1" if peer in holders[:2] else "" for peer in holders}
    assert any("one other only" in each.what for each in observer.problems())


def test_who_judges_whom_is_found_once_for_a_plan(
    observed: tuple[Status, Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open page asks each second, and among hundreds of members the answer takes a good part
    of a second."""
    status, observer = observed
    asked: list[Any] = []
    real = judged.few_judges
    monkeypatch.setattr(judged, "few_judges", lambda *it: asked.append(it) or real(*it))
    facts = {"next_view": None, "attempting": False, "frozen": False, "suspected": ()}
    agreement: Any = SimpleNamespace(view=SimpleNamespace(plan=PLAN), **facts)
    observer.trains(run_spec(audit={"rate": 1.0}), "run", workload(), agreement)
    status.say(State.TRAINING, "step 3 of 9")
    for _ in range(5):
        status.facts["arithmetics"] = dict.fromkeys(PLAN.stage_holders(), "cpu-1")
        assert not observer.problems()
    assert len(asked) == 1
    status.facts["arithmetics"] = {}
    agreement.view.plan = msgspec.structs.replace(PLAN, predicted_step_ns=7)
    assert not observer.problems() and len(asked) == 2


def test_a_complete_run_says_what_can_be_typed_next(observed: tuple[Status, Observer]) -> None:
    status, observer = observed
    spec = run_spec().model_copy(update={"total_steps": 4000})
    observer.trains(spec, "run", workload(), agreement_of(spec))
    status.facts["step"] = 1990
    status.say(State.TRAINING, "step 1,990 of 4,000")
    assert "the end of the run after step 4,000" in observer.live().next
    status.facts["step"] = 4000
    status.say(State.DONE, "all 4,000 steps are committed")
    assert observer.live().next == ()
    commands = ("p2p-dtfm generate --prompt 'def '", "p2p-dtfm export --out my-model")
    observer.ends_with(commands)
    assert observer.live().next == commands
    status.say(State.LEAVING, "its user asked for it")
    assert observer.live().next == ()


def test_states_for_an_undo_are_checkpoints_too(observed: tuple[Status, Observer]) -> None:
    """What comes next was the checkpoint after step 100, though one was written each 15 steps."""
    status, observer = observed
    spec = run_spec(total_steps=4000, audit={"rate": 0.1, "undo_steps": 30})
    observer.trains(spec, "digest", workload(), agreement_of(spec))
    status.say(State.TRAINING, "step 17 of 4,000")
    status.facts["step"] = 16
    (told,) = [it for it in observer.live().next if "checkpoint" in it]
    at = next(step for step in range(17, 4000) if spec.saves_at(step))
    assert told == f"a checkpoint after step {at}" and at == 30


def test_steps_make_history(observed: tuple[Status, Observer]) -> None:
    status, observer = observed
    status.facts["tokens_per_s"] = 123.0
    observer.step_committed(StepOutcome(0, 1.0, 5.5, 10, None, None))
    assert observer.live().committed_here == 1
    assert observer.state().history.tokens_per_s == (123.0,)


def test_the_last_look_at_the_model_is_no_step_that_was_seen(
    observed: tuple[Status, Observer],
) -> None:
    """Of a run of 3 steps its founder had seen 4. A daemon that was started again when all was done
    had seen one, and wrote the report anew, with nothing in it."""
    _, observer = observed
    for step in range(3):
        observer.step_committed(StepOutcome(step, 1.0, 5.0, 100, None, None))
    observer.step_committed(StepOutcome(3, 0.0, None, 0, 4.5, None))
    assert observer.live().committed_here == 3
    assert observer.state().history.held_out_loss == (4.5,)


def test_peer_ids_are_cut_wherever_they_stand() -> None:
    assert shortened(f"{PEER} asks; {PEER}: no") == "…FXCyLG asks; …FXCyLG: no"
    assert shortened("12D3KooWshort stays") == "12D3KooWshort stays"


def test_the_token_is_kept_and_only_its_user_can_read_it(tmp_path) -> None:
    path = tmp_path / "dashboard.token"
    token = stored_token(path)
    assert len(token) >= 32 and path.stat().st_mode & 0o777 == 0o600
    assert stored_token(path) == token
    path.chmod(0o644)
    other = stored_token(path)
    assert other != token, "whoever may have read it can act no more"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("short")
    assert len(stored_token(path)) >= 32


def test_what_a_peer_adds_is_measured_or_not_known(observed: tuple[Status, Observer]) -> None:
    status, observer = observed
    settled = False
    observer.measures_with(lambda: settled)
    status.facts["tokens_per_s"] = 500.0
    observer._view_state = msgspec.structs.replace(observer._view_state, me=0)
    assert observer.live().worth is None, "a founder has nothing to compare with"
    observer.came_to(400, 2, 7)
    worth = observer.live().worth
    assert worth is not None
    assert (worth.before_tokens_per_s, worth.before_members) == (400, 2)
    assert worth.now_tokens_per_s is None, "the first steps of a view say nothing"
    settled = True
    worth = observer.live().worth
    assert worth is not None and worth.now_tokens_per_s == 500.0
    observer.came_to(0, 1, 0)
    assert observer.live().worth is None, "the swarm had not measured itself"


def test_a_newcomer_shows_the_step_of_the_others_before_it_takes_part() -> None:
    observer = Observer(Status())
    assert observer.step() == 0
    observer.came_to(400, 2, 1532)
    assert observer.step() == 1532
    observer.close()


def test_who_joins_a_swarm_that_began_again_shows_the_step_that_it_is_at() -> None:
    """All members had lost the run's first steps. The newcomer went on telling the steps that it
    had heard of before."""
    status = Status()
    observer = Observer(status)
    observer.came_to(0, 2, 7)
    status.facts["step"] = 0
    assert observer.step() == 0
    observer.close()
