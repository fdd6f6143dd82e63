"""Finds those that keep an attempt from ending."""

from collections.abc import Collection

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import Accusation
from p2p_dtfm.core.protocol.snapshot import Member


def silent_in(attempt: Attempt, is_member: bool) -> list[Member]:
    """Those that have not been heard lately. If there are none: the few that know something else
    than most, or have not said Ready.

    Only a member may say of others that they know something else, and it says so once.
    """
    due = attempt.snapshot.contributors if attempt.snapshot else attempt.participants
    if attempt.wide is not None and attempt.snapshot is None:
        # only neighbours say what they know; the others have answered once they have contributed
        return sorted(attempt.waits_for) or list(attempt.dissenting)
    silent = [member for member in due if member != attempt.me and _is_silent(attempt, member)]
    if silent:
        return silent
    if attempt.snapshot is not None:
        missing = [m for m in due if m not in attempt.ready]
        return missing if are_few(missing, attempt, len(due)) else []
    return _dissenting(attempt, len(due)) if is_member else []


def are_few(members: Collection[Member], attempt: Attempt, due_count: int) -> bool:
    """Whether these are so few that the others are right. In a planned attempt newcomers alone
    always are: however many come, they keep no member from its end."""
    newcomers_alone = attempt.planned and not attempt.members & set(members)
    return newcomers_alone or 2 * len(members) < due_count


def _is_silent(attempt: Attempt, member: Member) -> bool:
    clock = attempt.clock
    if clock.heard_ns.get(member, -1) >= clock.progress_ns or member in attempt.ready:
        return False
    said = attempt.digests.get(member, (0, ""))[1]
    if attempt.snapshot is not None:
        return said != ""
    is_accused = Accusation(attempt.me, member) in attempt.charges
    return not is_accused and said != attempt.own_digest


def _dissenting(attempt: Attempt, due_count: int) -> list[Member]:
    accused = {item.of for item in attempt.charges if item.by == attempt.me}
    dissenting = [member for member in attempt.dissenting if member not in accused]
    return dissenting if are_few(dissenting, attempt, due_count) else []
