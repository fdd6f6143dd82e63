"""Whether an attempt ends, by the Ready of those that have frozen it: a pure function of these."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.protocol.snapshot import Member, names_of


class Answers(StrEnum):
    """What the Ready of the contributors come to."""

    MISSING = "some have not said Ready yet"
    ALIKE = "all have said Ready to the same view"
    OTHER_VIEWS = "some know different things"
    OUTVOTED = "most planned it differently"
    SPLIT = "they planned it in several ways"
    OTHER_PLANS = "a few planned it differently"


@dataclass(frozen=True)
class ReadyVerdict:
    """`members`: those that the verdict is about. `reason` goes into the log."""

    answers: Answers
    reason: str
    members: tuple[Member, ...] = ()


def ready_verdict(attempt: Attempt) -> ReadyVerdict:
    """What follows from the Ready that this peer has, its own among them."""
    if attempt.snapshot is None or attempt.plan is None:
        return ReadyVerdict(Answers.MISSING, "the plan of the view is not there yet")
    contributors = attempt.snapshot.contributors
    missing = tuple(member for member in contributors if member not in attempt.ready)
    waits = ReadyVerdict(Answers.MISSING, f"waits for Ready from {names_of(missing)}", missing)
    mine = attempt.ready[attempt.me]
    answers = [attempt.ready[member] for member in contributors if member in attempt.ready]
    strays = tuple(theirs.sender for theirs in answers if theirs.view != mine.view)
    if strays:
        found = ReadyVerdict(Answers.OTHER_VIEWS, "members know different things", strays)
        return waits if missing else found
    others = [theirs for theirs in answers if not _says_the_same(theirs, mine)]
    if others:
        return _of_other_plans(attempt, others, answers) or waits
    return waits if missing else ReadyVerdict(Answers.ALIKE, "all say Ready to the same view")


def _voters(attempt: Attempt) -> set[Member]:
    """Contributors whose word decides what most say: in a planned view its members alone. Strangers
    that are to be let in may be more, and would make all members take themselves for wrong, and
    leave."""
    assert attempt.snapshot is not None
    contributors = attempt.snapshot.contributors
    if not attempt.planned:
        return set(contributors)
    return {it for it in contributors if attempt.opened[it].present is not None}


def _of_other_plans(
    attempt: Attempt, others: list[Ready], answers: list[Ready]
) -> ReadyVerdict | None:
    """The verdict where others planned the same snapshot differently; None: it is not clear yet who
    is wrong."""
    assert attempt.snapshot is not None and attempt.plan is not None
    voters = _voters(attempt)
    digests = Counter(item.plan_digest for item in others if item.sender in voters)
    plan_digest, count = max(digests.items(), key=lambda it: (it[1], it[0]), default=("", 0))
    due, answered = len(voters), sum(item.sender in voters for item in answers)
    alike = answered - digests.total()
    if 2 * count > due:
        reason = (
            f"{count} of {due} peers planned view {attempt.number} as {plan_digest[:12]}, "
            f"this peer as {attempt.plan.digest()[:12]}: perhaps it runs another version"
        )
        return ReadyVerdict(Answers.OUTVOTED, reason)
    if 2 * alike < due:
        decided = answered == due
        reason = "the peers planned it in several ways"
        return ReadyVerdict(Answers.SPLIT, reason) if decided else None
    members = tuple(item.sender for item in others)
    text = f"{names_of(members)} planned view {attempt.number} differently: perhaps another version"
    return ReadyVerdict(Answers.OTHER_PLANS, text, members)


def _says_the_same(theirs: Ready, mine: Ready) -> bool:
    return (theirs.plan_digest, theirs.members_digest) == (mine.plan_digest, mine.members_digest)
