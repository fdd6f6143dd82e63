"""What auditors have told, by what all account for.

Whoever is drawn tells all what a work comes to here. One that told a few that a colluder's false
work is false, and the others that all is well, had these few go for it: they found that it is so,
and most were not told. But it signs what it says, and all account for what they have heard. So who
says two things of a work convicts itself; and by what it has said to all it is judged, though it
takes that back in its Prepared.
"""

from collections.abc import Mapping
from typing import NamedTuple

from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Account, auditor_and_audited

UNLIKE_AUDITS = "has said one thing to some and another to others of a work that it was drawn for"


class AuditorsWords(NamedTuple):
    """Of one step."""

    said: dict[tuple[str, str], bytes]
    """By auditor, and whose work: what that comes to, where it has said one thing."""
    unlike: set[tuple[str, str]]
    """Where it has said two things, each under its signature."""

    @property
    def convicted(self) -> list[str]:
        return sorted({auditor for auditor, _ in self.unlike})

    def of(self, peer_id: str) -> dict[str, bytes]:
        """By auditor, what this one's work comes to."""
        return {by: work for (by, whose), work in self.said.items() if whose == peer_id}


def auditors_words(accounts: Mapping[str, Account]) -> AuditorsWords:
    """Some accounts may be missing."""
    heard: dict[tuple[str, str], set[bytes]] = {}
    for account in accounts.values():
        holders = sorted(account.heard)
        for audit in account.audits:
            if (named := auditor_and_audited(audit, holders)) is not None:
                heard.setdefault(named, set()).add(audit.work)
    said = {it: min(works) for it, works in heard.items() if len(works) == 1}
    unlike = {it for it, works in heard.items() if len(works) > 1}
    return AuditorsWords({it: work for it, work in said.items() if work != COULD_NOT}, unlike)
