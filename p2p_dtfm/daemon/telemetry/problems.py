"""What is wrong now, judged from what a daemon sees: nothing while nothing is wrong, and one action
for each problem."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import (
    LAYERS_LOST,
    LEFT_TO_SOME,
    ON_ONE_PEER,
    PLANNER_FAILS,
)
from p2p_dtfm.daemon.telemetry.estimate import in_words
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.web.state import Problem

LATE_STEPS = 5
LATE_S = 10.0
"""A step is late after this time and this many times what steps took of late, or the plan says."""
SILENT_S = 10.0
UNHEARD_S = 3.0
"""A member that was not heard for so long while no step commits may be what the step waits for."""
JOINING_LIMIT_S = 90.0
NAMES_TOLD = 8
"""Of more names only the count is said: there may be hundreds, and a chat takes two thousand
letters."""
NO_STEPS, NOT_LET_IN, BARRED = "no steps", "not let in", "barred"
"""Names of problems that stay the same while they last, though who is waited for, and how long,
changes."""
WAIT_OR_LOOK = "nothing, if it passes; else see whether the other computers run and are connected"
WAITS_FOR_NOBODY = (State.SPARE, State.DONE, State.LEAVING, State.STOPPED, State.PAUSED)


@dataclass(frozen=True)
class Sight:
    """What a daemon sees at one moment. Peers are named as its user reads them."""

    state: State
    reason: str
    in_state_s: float
    uncommitted_s: float
    """Since the last commit, or since the view began."""
    step_s: float | None
    """What a step took of late."""
    predicted_s: float = 0.0
    """What a step takes by the plan in force; 0 if there is none."""
    is_only_member: bool = False
    no_plan: str = ""
    is_invited: bool = False
    """The run is by invitation."""
    is_failing: bool = False
    """A failure ended the view; the members agree on how to go on."""
    is_barred: bool = False
    """A member says that this peer is barred, which is told by itself."""
    lost: Sequence[str] = ()
    """Members that this peer holds for lost."""
    waits_for: Sequence[str] = ()
    silent: Sequence[tuple[str, float]] = ()
    """Members that were not heard of for so many seconds."""
    overdue: Sequence[tuple[str, str, float]] = ()
    """A part of this daemon, where it waits, and for how many seconds, if that is longer than
    anybody should."""
    believed: Sequence[str] = ()
    """Members that have layers that nobody else has, and are audited."""
    unsure: Sequence[str] = ()
    """Members whose work only one other member can compute again, in a run with audits. Should the
    two disagree, nobody knows which is wrong."""
    alone: Sequence[str] = ()
    """Members whose layers nobody else has, so that their work is not audited."""
    unlike: Sequence[str] = ()
    """Members whose work nobody audits, since it has other bits on all that have their layers."""


def problems_in(sight: Sight) -> Iterator[Problem]:
    """What is wrong; the first is what matters most."""
    if sight.state in WAITS_FOR_NOBODY:
        return
    if sight.no_plan:
        fix = _for_a_plan(sight.no_plan, sight.is_invited)
        yield Problem(f"no steps happen: {sight.no_plan}", fix, NO_STEPS)
    elif sight.is_failing and sight.lost:  # else a step is repeated, by itself and at once
        yield _failing(sight)
    elif sight.state in (State.TRAINING, State.WAITING) and _is_late(sight):
        yield _late(sight)
    elif sight.state is State.JOINING and sight.in_state_s > JOINING_LIMIT_S:
        if not sight.is_barred:  # the way to the members is there
            yield _not_let_in(sight)
    elif sight.overdue and sight.uncommitted_s > sight.overdue[0][2]:
        yield _overdue(*sight.overdue[0])
    elif sight.state is State.TRAINING:
        yield from _audits(sight)


def _not_let_in(sight: Sight) -> Problem:
    return Problem(
        f"for {in_words(sight.in_state_s)} nobody has let this peer in: {sight.reason}",
        "look at the way to a member: p2p-dtfm doctor --initial-peers ADDRESS",
        NOT_LET_IN,
    )


def _for_a_plan(reason: str, is_invited: bool) -> str:
    """What would help, by why there is no plan: memory is not all that can lack."""
    if reason.startswith(PLANNER_FAILS):
        return "please report it, with the log of this peer: nothing that is started helps"
    if reason.startswith(LAYERS_LOST):
        return "start the computers that had them: they may have them on their disks"
    if LEFT_TO_SOME in reason:
        return "start p2p-dtfm on a computer that the run names, with memory for its part"
    what = "a computer with so much memory" if ON_ONE_PEER in reason else "another computer"
    how = "--initial-peers and this peer's address"
    if is_invited:
        how = "--invite and a line of p2p-dtfm invite, from the founder or who may invite"
    return f"start p2p-dtfm on {what} with {how}"


def _audits(sight: Sight) -> Iterator[Problem]:
    """Problems with the audits that the run asks for."""
    if sight.alone:
        yield Problem(
            f"the work of {_listed(sight.alone)} is audited by nobody: nobody else has its layers",
            "start p2p-dtfm on another computer, which can compute it again",
            "alone",
        )
    if sight.unlike:
        yield Problem(
            f"the work of {_listed(sight.unlike)} is audited by nobody: whoever has its layers "
            "has another processor or PyTorch, by what each says itself, and would come to other "
            "bits; whatever it computes is believed",
            "start p2p-dtfm on another computer of the same kind, on its processor (--device cpu)",
            "unlike",
        )
    if sight.believed:
        yield Problem(
            f"what {_listed(sight.believed)} makes of its layers is audited; what they are is "
            "its word, since nobody else has them",
            "start p2p-dtfm on another computer, which can have them, too",
            "believed",
        )
    if sight.unsure:
        yield _unsure(sight.unsure)


def _failing(sight: Sight) -> Problem:
    return Problem(
        f"{_listed(sight.lost)} fell silent, stands still or went on with others: the step is "
        "stopped until the members agree on how to go on",
        "nothing, if that computer was switched off: the others go on without it",
        NO_STEPS,
    )


def _unsure(names: Sequence[str]) -> Problem:
    return Problem(
        f"the work of {_listed(names)} can be judged by one other only: if the two disagree "
        "one of them has to go for a while, and it may be the honest one",
        "start p2p-dtfm on another computer, so that a third one can judge",
        "unsure",
    )


def _overdue(owner: str, place: str, waited_s: float) -> Problem:
    """While steps commit, such a wait holds up nobody who computes."""
    return Problem(
        f"for {in_words(waited_s)} {owner} has been waiting at {place}, and no step was committed",
        "look at what p2p-dtfm status --json says under waits; if it lasts, start p2p-dtfm again",
        NO_STEPS,
    )


def _is_late(sight: Sight) -> bool:
    if sight.state is State.WAITING and sight.step_s is None:
        return False  # for the first view; the reason says what for
    late_s = UNHEARD_S if sight.silent else LATE_S
    return sight.uncommitted_s > max(late_s, LATE_STEPS * max(sight.step_s or 0, sight.predicted_s))


def _late(sight: Sight) -> Problem:
    late = f"no step was committed for {in_words(sight.uncommitted_s)}"
    if sight.silent:
        name, silent_s = max(sight.silent, key=lambda item: item[1])
        return Problem(
            f"{late}: {name} was not heard of for {in_words(silent_s)}",
            "see whether that computer runs and is connected",
            NO_STEPS,
        )
    if sight.state is State.WAITING:  # not for its neighbours: the reason says for what
        what, fix = _parted(sight.reason)
        return Problem(f"{late}: {what}", fix or WAIT_OR_LOOK, NO_STEPS)
    if sight.is_only_member:
        return Problem(
            f"{late}: this peer computes it alone, and waits for nobody",
            "see whether this computer is busy with other programs, or sleeps now and then",
            NO_STEPS,
        )
    whom = _listed(sight.waits_for) or "tensors of its neighbours"
    return Problem(
        f"{late}: this peer waits for {whom}",
        "see whether those computers are busy with other programs, or their connections slow",
        NO_STEPS,
    )


def _parted(reason: str) -> tuple[str, str]:
    """What is waited for; and what comes of it or can be done, which stands last in the reason, if
    at all."""
    at = reason.find("; ", reason.rfind(")") + 1)  # between brackets are causes
    return (reason, "") if at < 0 else (reason[:at], reason[at + 2 :])


def _listed(names: Sequence[str]) -> str:
    told = ", ".join(names[:NAMES_TOLD])
    more = len(names) - NAMES_TOLD
    return f"{told} and {counted(more, 'other')}" if more > 0 else told
