"""What a daemon tells of itself: problems while they last, events once each, ids cut short."""

import asyncio
import logging
from collections.abc import Iterator

import msgspec
import pytest

from p2p_dtfm.core.agreement import Agreement
from p2p_dtfm.core.plan import NoPlan
from p2p_dtfm.core.snapshot import Member
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon import observer as module
from p2p_dtfm.daemon.dashboard_host import stored_token
from p2p_dtfm.daemon.observer import Observer, shortened
from p2p_dtfm.daemon.status import State, Status
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot, workload

PEER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyLG"
log = logging.getLogger("p2p_dtfm")


@pytest.fixture
def observed() -> Iterator[tuple[Status, Observer]]:
    status = Status()
    observer = Observer(status)
    yield status, observer
    observer.close()


def test_a_warning_is_a_problem_and_one_event(observed: tuple[Status, Observer]) -> None:
    _, observer = observed
    for _ in range(3):
        log.warning("disconnected %s: a frame that is not due", PEER)
    assert [problem.what for problem in observer.live().problems] == [
        "disconnected …FXCyLG: a frame that is not due"
    ]
    assert [event.kind for event in observer.state().events] == ["fault"]
    assert observer.state().events is observer.state().events, "unchanged: the same object"


def test_after_its_end_nothing_is_heard(observed: tuple[Status, Observer]) -> None:
    _, observer = observed
    observer.close()
    log.warning("something")
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
    assert "waits for …FXCyLG" in problem.what and problem.fix
    status.say(State.SPARE, "the plan is faster without this peer")
    assert not observer.live().problems, "a spare waits for nobody"


def test_views_tell_who_came_and_who_went(observed: tuple[Status, Observer]) -> None:
    _, observer = observed

    def view(*numbers: int) -> View:
        shot = snapshot([Peer() for _ in range(max(numbers) + 1)], workload())
        kept = tuple(record for at, record in enumerate(shot.records) if at in numbers)
        shot = msgspec.structs.replace(shot, records=kept)
        return View(shot, NoPlan("for the test"))

    async def live() -> None:
        spec, me = run_spec(), Member(name_of(0), 1)
        agreement = Agreement(me, "run", workload(), lambda _: b"", lambda *_: True)
        observer.trains(spec, "run", workload(), agreement)
        observer.view_took_over(view(0, 1), 0)
        observer.view_took_over(view(0, 2), 5)
        async with asyncio.timeout(10):
            while len(observer.state().view.peers) != 2 or observer.state().view.from_step != 5:
                await asyncio.sleep(0.01)

    asyncio.run(live())
    told = [(event.kind, event.text) for event in reversed(observer.state().events)]
    assert [kind for kind, _ in told] == ["view", "joined", "left", "view"]
    assert told[1][1].startswith(name_of(2)) and told[2][1].startswith(name_of(1))
    assert observer.state().history.view_step == (0, 5)


def test_steps_make_history(observed: tuple[Status, Observer]) -> None:
    status, observer = observed
    status.facts["tokens_per_s"] = 123.0
    observer.step_committed(StepOutcome(0, 1.0, 5.5, 10, None, None))
    assert observer.live().committed_here == 1
    assert observer.state().history.tokens_per_s == (123.0,)


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
