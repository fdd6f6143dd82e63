"""What a daemon tells while it is away: what keeps it away is wrong, a pause that is wanted is
not."""

import errno
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.node.returning import TRY_AGAIN_S, in_vain, shown_while_away
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.web.metrics import metrics_text
from p2p_dtfm.web.state import DashboardState, Live, Problem

SHOWN = DashboardState(Live(1.0, "0", "", "training", "", 0.0))


def told(home: Path, state: State, reason: str) -> tuple[Problem, ...]:
    """What is wrong, by page, metrics and `status --json` alike."""
    status = Status()
    status.say(state, reason)
    shown = shown_while_away(SHOWN, status, Seen())
    problems = shown.live.problems
    assert f"p2p_dtfm_problems {len(problems)}.0" in metrics_text(lambda: shown).decode()
    as_json = Resident(Settings(home=home, dashboard="off"))._status_json(status)
    assert [it["what"] for it in as_json["problems"]] == [it.what for it in problems]
    return problems


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "life.json"),
        UserError("no memory is left for it (3 MiB of 4 GiB; others use it)", "close something"),
    ],
)
def test_what_keeps_a_daemon_away_is_wrong(tmp_path: Path, error: UserError | OSError) -> None:
    """A full disk kept it away for days. The page said "Nothing that this peer knows of", and the
    metrics that there is no problem."""
    reason = in_vain(error, tmp_path, has_begun=False, is_watched=False, pause_s=TRY_AGAIN_S)
    (problem,) = told(tmp_path, State.PAUSED, reason)
    assert reason.startswith(problem.what) and "tries again" not in problem.what
    assert problem.fix.endswith("it tries again in 5 minutes, or with p2p-dtfm resume")
    assert problem.name and not told(tmp_path, State.STARTING, reason)


def test_a_pause_that_is_wanted_is_no_problem(tmp_path: Path) -> None:
    for reason in ("its user asked for it; p2p-dtfm resume ends it", "runs on its battery"):
        assert not told(tmp_path, State.PAUSED, reason)
