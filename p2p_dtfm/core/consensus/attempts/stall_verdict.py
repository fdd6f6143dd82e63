"""What to do about an attempt that gets no further: a pure function of what is gathered in it."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.silence import silent_in
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View


class Remedy(StrEnum):
    """How an attempt goes on, or ends, that somebody keeps from its end."""

    GO_ON_WITHOUT = "goes on without who is silent"
    KEEP_OUT = "newcomers are accused, and kept out of the next one if this one fails"
    ACCUSE = "members are accused, and lose their place in the next view"
    HELD_UP = "a planned one is tried again, and without who does it a second time"
    GIVE_UP = "it is given up; what called for it may open another one"
    REOPEN = "it is opened again with a higher number"


@dataclass(frozen=True)
class StallVerdict:
    """`members` are at fault; `reason` goes into the log."""

    remedy: Remedy
    reason: str
    members: tuple[Member, ...]
    blames_newcomers: bool = False
    """They must not be in the next attempt."""


def stall_verdict(attempt: Attempt, view: View | None) -> StallVerdict:
    """Whom the attempt waits for, and whether it can do without; `view`: the present one."""
    waits_for, is_gathering = attempt.waits_for, attempt.snapshot is None
    if is_gathering and waits_for and (not attempt.planned or not waits_for & attempt.members):
        reason = f"goes on without {_names(waits_for)}: silent during Gather({attempt.number})"
        return StallVerdict(Remedy.GO_ON_WITHOUT, reason, tuple(sorted(waits_for)))
    silent = silent_in(attempt, is_member=view is not None)
    names = _names(waits_for or silent) or "all alike"
    reason = f"view {attempt.number} had no answer from {names}"
    if attempt.planned:
        blamed = are_newcomers_links(silent, view)
        remedy = _of_planned(is_gathering, blamed)
        return StallVerdict(remedy, reason, tuple(silent), blamed)
    if is_gathering and silent:
        return StallVerdict(Remedy.ACCUSE, reason, tuple(silent))
    remedy = Remedy.GIVE_UP if view is None else Remedy.REOPEN
    return StallVerdict(remedy, reason, tuple(silent))


def _of_planned(is_gathering: bool, blames_newcomers: bool) -> Remedy:
    """It costs no member its place: steps go on meanwhile."""
    if not is_gathering:
        return Remedy.HELD_UP
    return Remedy.KEEP_OUT if blames_newcomers else Remedy.GIVE_UP


def are_newcomers_links(silent: Collection[Member], view: View | None) -> bool:
    """Evidence that keeps a newcomer out, and cannot cost a member its place."""
    return bool(silent) and (view is None or not set(silent) & set(view.members))


def _names(members: Collection[Member]) -> str:
    return ", ".join(sorted(member.peer_id for member in members))
