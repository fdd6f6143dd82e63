"""What to do about an attempt that gets no further: a pure function of what is gathered in it."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.silence import silent_in
from p2p_dtfm.core.messages.agreement_messages import Accusation
from p2p_dtfm.core.protocol.snapshot import Member, names_of
from p2p_dtfm.core.recovery.view import View


class Remedy(StrEnum):
    """How an attempt that somebody keeps from its end goes on, or ends."""

    GO_ON_WITHOUT = "goes on without who is silent"
    KEEP_OUT = "newcomers are accused, and kept out of the next one if this one fails"
    ACCUSE = "members are accused, and lose their place in the next view"
    HELD_UP = "a planned one is given up or tried again, without who does it a second time"
    FOUND_AGAIN = "those that found a run try again, without who knew the same and said no Ready"
    GIVE_UP = "it is given up: a newcomer leaves it to the members"
    REOPEN = "it is opened again with a higher number"


@dataclass(frozen=True)
class StallVerdict:
    """`members` are at fault; `reason` goes into the log."""

    remedy: Remedy
    reason: str
    members: tuple[Member, ...]
    blames_newcomers: bool = False
    """The `members` are newcomers, which must not be in the next attempt."""


def stall_verdict(attempt: Attempt, view: View | None) -> StallVerdict:
    """Whom the attempt waits for, and whether it can do without them; `view`: the present one."""
    waits_for, is_gathering = attempt.waits_for, attempt.snapshot is None
    if is_gathering and _are_dispensable(waits_for, attempt):
        reason = f"goes on without {names_of(waits_for)}: silent during Gather({attempt.number})"
        return StallVerdict(Remedy.GO_ON_WITHOUT, reason, tuple(sorted(waits_for)))
    is_asked = view is not None or attempt.only_newcomers
    silent = tuple(silent_in(attempt, is_member=is_asked))
    reason = (
        f"view {attempt.number} had no answer from {names_of(waits_for or silent) or 'all alike'}"
    )
    if attempt.planned:
        return _of_planned(attempt, view, silent, reason)
    if is_gathering and silent and not _is_said_already(attempt, silent):
        return StallVerdict(Remedy.ACCUSE, reason, silent)
    remedy = Remedy.REOPEN if view is not None else _of_newcomer(attempt)
    return StallVerdict(remedy, reason, silent)


def _of_planned(
    attempt: Attempt, view: View | None, silent: tuple[Member, ...], reason: str
) -> StallVerdict:
    blamed = are_newcomers_links(silent, view)
    said = all(Accusation(attempt.me, member) in attempt.charges for member in silent)
    may_accuse = blamed and attempt.snapshot is None and not said  # a second time is in vain
    remedy = Remedy.KEEP_OUT if may_accuse else Remedy.HELD_UP
    return StallVerdict(remedy, reason, silent, blamed)


def _of_newcomer(attempt: Attempt) -> Remedy:
    founds = attempt.only_newcomers and attempt.snapshot is not None
    return Remedy.FOUND_AGAIN if founds else Remedy.GIVE_UP


def _are_dispensable(silent: set[Member], attempt: Attempt) -> bool:
    """Whether the attempt can go on without the silent. A planned one does not go on without a
    member: steps go on meanwhile."""
    return bool(silent) and not (attempt.planned and silent & attempt.members)


def _is_said_already(attempt: Attempt, silent: Collection[Member]) -> bool:
    """Whether, in a swarm of many, this peer has accused all of them already, and in vain.

    There not every peer watches every other. Peers that would have to accuse them, too, may be gone
    since they were heard.
    """
    if attempt.wide is None:
        return False
    return all(Accusation(attempt.me, member) in attempt.charges for member in silent)


def are_newcomers_links(silent: Collection[Member], view: View | None) -> bool:
    """Whether only newcomers are silent. Such evidence keeps a newcomer out, and cannot cost a
    member its place."""
    return bool(silent) and (view is None or not set(silent) & set(view.members))
