"""Who keeps an attempt from ending."""

from p2p_dtfm.core.consensus.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import Accusation
from p2p_dtfm.core.protocol.snapshot import Member


def silent_in(attempt: Attempt, is_member: bool) -> list[Member]:
    """Who has not been heard of late, or says that it knows something else than most: that only a
    member may say of others, as far as it has not said so yet."""
    due = attempt.snapshot.contributors if attempt.snapshot else attempt.participants
    mine = attempt.digests[attempt.me][1]
    silent = [
        member
        for member in due
        if member != attempt.me
        and attempt.heard_ns.get(member, -1) < attempt.progress_ns
        and member not in attempt.ready
        and (attempt.snapshot or Accusation(attempt.me, member) not in attempt.charges)
        and attempt.digests.get(member, (0, ""))[1] != (mine if not attempt.snapshot else "")
    ]
    if attempt.snapshot is not None:
        missing = [m for m in due if m not in attempt.ready]
        return missing if 2 * len(missing) < len(due) and not silent else silent
    if silent or not is_member:
        return silent
    accused = {item.of for item in attempt.charges if item.by == attempt.me}
    dissenting = [member for member in attempt.dissenting if member not in accused]
    return dissenting if 2 * len(dissenting) < len(due) else []
