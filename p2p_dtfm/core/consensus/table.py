"""Which message goes where, in which phase: each pair is handled, or refused with a reason.

`docs/agreement.md` holds this table in words; `tests/core/test_agreement_table.py` writes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.core.consensus.actions import Verdict, refused
from p2p_dtfm.core.consensus.machines import Machines
from p2p_dtfm.core.consensus.phase import ATTEMPTING, MEMBERS, NEWCOMERS, Phase
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    Spread,
    Standing,
    Synced,
    Tidings,
)


@dataclass(frozen=True)
class Handler:
    """`run` takes the machines, the sender's peer id, the message and the time."""

    does: str
    run: Callable[[Machines, str, Any, int], Verdict]


@dataclass(frozen=True)
class Refusal:
    """Nothing is done about the message in this phase."""

    reason: str


def _heartbeat(machines: Machines, sender: str, message: Heartbeat, now_ns: int) -> Verdict:
    machines.syncing.note_progress(message, now_ns)
    answer = machines.outsiders.answer(message.sender, now_ns)
    answer += machines.passing_on.heard(message, now_ns)
    return Verdict(answer, "it lives; it hears of the view if it is in another one")


JOIN = Handler(
    "the next planned view may let it in; Standing to one that is in another view, or asks while a "
    "failure is dealt with",
    lambda machines, sender, message, now_ns: machines.requests.receive(sender, message, now_ns),
)
GATHER = Handler(
    "adds to what is known, and is answered by Gather; or begins this peer's part, if its number "
    "is higher and it counts this peer in; or its sender is told what it lacks: Ready, Active with "
    "the certificate, Standing",
    lambda machines, _, message, now_ns: machines.reception.receive(message, now_ns),
)
SPREAD = Handler(
    "in a swarm of many: Gather and Ready of several, which this peer passes on to its neighbours",
    lambda machines, _, message, now_ns: machines.spread_reception.receive(message, now_ns),
)
TIDINGS = Handler(
    "in a view of many: Synced and Active of several, which this peer passes on to its neighbours; "
    "of few the answer to who asks for them",
    lambda machines, _, message, now_ns: machines.tidings_reception.receive(message, now_ns),
)
READY = Handler(
    "counts, once for each contributor; the last one makes the view agreed",
    lambda machines, _, message, now_ns: machines.gathering.receive_ready(message, now_ns),
)
SYNCED = Handler(
    "counts for the agreed view; of the present one, its sender lacks Active, and is told again",
    lambda machines, _, message, now_ns: machines.syncing.receive(message),
)
ACTIVE = Handler(
    "those of all members let the ledger commit, and who asks is answered; of another view: that "
    "was taken over, or missed",
    lambda machines, _, message, now_ns: machines.activity.receive_as_member(message, now_ns),
)
ACTIVE_TO_NEWCOMER = Handler(
    "the agreed view is taken over; one that was given up is asked for in a new life",
    lambda machines, _, message, now_ns: machines.activity.receive_as_newcomer(message, now_ns),
)
STANDING = Handler(
    "goes over to a view that counts more, or tells its sender of the present one",
    lambda machines, _, message, now_ns: machines.meeting.receive_as_member(message, now_ns),
)
STANDING_TO_NEWCOMER = Handler(
    "there is a view: asks its sender to be let in, unless members gather with it already, and "
    "neither have gone on without it nor show that the run is complete since",
    lambda machines, _, message, now_ns: machines.meeting.receive_as_newcomer(message, now_ns),
)
HEARTBEAT = Handler(
    "it lives; says who gets on with its states, and whose Prepared it lacks, which it is given; "
    "Standing to an outsider",
    _heartbeat,
)

NO_ATTEMPT = Refusal("no attempt is under way")
NOTHING_AGREED = Refusal("has agreed on no view that anybody could be synced for")
NO_FELLOWS = Refusal("is in no view")
IS_OUTSIDE = Refusal("is in no view any more, until its next life")

Row = Handler | Refusal
Table = dict[tuple[Phase, type], Row]
MESSAGES = (JoinRequest, Gather, Spread, Ready, Synced, Active, Tidings, Standing, Heartbeat)
INSIDE = NEWCOMERS | MEMBERS
WAITS_FOR_VIEW = MEMBERS | {Phase.NEWCOMER_AGREED}


def _in(phases: frozenset[Phase], message: type, row: Row) -> Table:
    return {(phase, message): row for phase in phases}


HANDLERS: Table = {
    **{(Phase.OUTSIDE, message): IS_OUTSIDE for message in MESSAGES},
    **_in(INSIDE, JoinRequest, JOIN),
    **_in(INSIDE, Gather, GATHER),
    **_in(INSIDE, Spread, SPREAD),
    **_in(INSIDE, Tidings, TIDINGS),
    **_in(ATTEMPTING, Ready, READY),
    **_in(INSIDE - ATTEMPTING, Ready, NO_ATTEMPT),
    **_in(WAITS_FOR_VIEW, Synced, SYNCED),
    **_in(INSIDE - WAITS_FOR_VIEW, Synced, NOTHING_AGREED),
    **_in(MEMBERS, Active, ACTIVE),
    **_in(NEWCOMERS, Active, ACTIVE_TO_NEWCOMER),
    **_in(MEMBERS, Standing, STANDING),
    **_in(NEWCOMERS, Standing, STANDING_TO_NEWCOMER),
    **_in(MEMBERS, Heartbeat, HEARTBEAT),
    **_in(NEWCOMERS, Heartbeat, NO_FELLOWS),
}
"""Each pair of a phase and a message."""


def dispatch(
    machines: Machines, phase: Phase, sender: str, message: AgreementMessage, now_ns: int
) -> Verdict:
    """What comes of a message that arrives in a phase. Raises `PeerFault`."""
    row = HANDLERS[phase, type(message)]
    if isinstance(row, Refusal):
        return refused(row.reason)
    return row.run(machines, sender, message, now_ns)
