"""How long an attempt at a view may go without progress before somebody is at fault for it."""

from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.liveness.lateness import Lateness

DOUBLINGS_LIMIT = 2
"""A liar that skips numbers makes others wait four times as long for a silent peer, and no
longer."""
READY_FACTOR = 3
"""Others may plan on slower machines than this peer's, but not on slower ones than by this
factor."""


def patience_ns(
    attempt: Attempt, timing: AgreementTiming, is_member: bool, lateness: Lateness, view_number: int
) -> int:
    """How long the attempt may go without progress. `view_number`: of this peer's view.

    Newcomers alone hold up nobody for long. Nor do a few members once the rest is done, or a few of
    those that found a run. A peer that runs late itself waits longer.
    """
    in_time_ns = _in_time_ns(attempt, timing, is_member)
    if is_member or attempt.only_newcomers:  # a joiner has no number to count from
        in_time_ns <<= _doublings(attempt, view_number)
    # the crowd is all that answer, also those left out: nobody has to be judged for that
    return lateness.stretched_ns(in_time_ns, len(attempt.heard))


def _doublings(attempt: Attempt, view_number: int) -> int:
    """How often the time to gather doubles: in a swarm of many, once for each attempt that failed
    before.

    Where all are slow, one attempt after another would otherwise end too early, and add to the load
    that makes them slow. The number says how many have failed, since all know it. What failed at
    this peer alone does not count: the least patient peer ends the attempt for all.
    """
    if attempt.wide is None or attempt.snapshot is not None:
        return 0
    failed = (attempt.number - view_number - 1) // 2
    return min(max(failed, 0), DOUBLINGS_LIMIT)


def _in_time_ns(attempt: Attempt, timing: AgreementTiming, is_member: bool) -> int:
    if attempt.snapshot is None:
        return _gather_ns(attempt, timing) if is_member else timing.gather_ns
    if is_member or attempt.only_newcomers:
        return _ready_ns(attempt, timing)
    # members decide first; but they may have gone on without this newcomer, and nobody tells it
    return min(timing.ready_ns, _ready_ns(attempt, timing) + timing.gather_ns)


def _gather_ns(attempt: Attempt, timing: AgreementTiming) -> int:
    silent = attempt.waits_for
    missing = silent or set(attempt.dissenting)
    if not missing:
        return timing.gather_ns
    if missing & attempt.members:
        few = not silent and 2 * len(missing) < len(attempt.participants)
        return _short_ns(timing) if few else timing.gather_ns
    resends_ns = 0 if silent else 2 * timing.resend_ns
    return min(timing.gather_ns, timing.newcomer_ns + resends_ns)


def _ready_ns(attempt: Attempt, timing: AgreementTiming) -> int:
    assert attempt.snapshot is not None
    contributors = set(attempt.snapshot.contributors)
    due = contributors - set(attempt.ready)
    few = 2 * len(due) < len(contributors)
    counts = due if attempt.only_newcomers else due & attempt.members
    if attempt.plan is None or (counts and not few):
        return timing.ready_ns
    own_ns = attempt.clock.progress_ns - attempt.clock.frozen_ns
    grace_ns = timing.newcomer_sync_ns if attempt.planned else _short_ns(timing)
    return min(timing.ready_ns, grace_ns + READY_FACTOR * own_ns)


def _short_ns(timing: AgreementTiming) -> int:
    """Patience with those that have answered before and now keep all others waiting, steps perhaps
    too."""
    return timing.gather_ns * 2 // 3
