"""What auditors have told, by what all account for.

An auditor tells all what a work comes to. A lying one may tell a few that a colluder's false work
is false, and the others that all is well. The few would find that it is so, and have to go for it,
as most were not told. But an auditor signs what it says, and all account for what they have heard.
So who says two things of a work convicts itself. What it has said to all counts, though it takes
that back in its Prepared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from p2p_dtfm.core.audit.judging import FEWEST_JUDGES, Judges
from p2p_dtfm.core.audit.work import EXCUSED, OWN_BYTES, SENT_OTHER, WORK_BYTES, changed_work
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Account, auditor_and_audited

UNLIKE_AUDITS = "has said one thing to some and another to others of a work that it was drawn for"


class AuditorsWords(NamedTuple):
    """What the auditors of one step have said."""

    said: dict[tuple[str, str], bytes]
    """By (auditor, maker): what the work comes to, where the auditor has said one thing."""
    unlike: set[tuple[str, str]]
    """(auditor, maker) where the auditor has said two things, each under its signature."""

    @property
    def convicted(self) -> list[str]:
        return sorted({auditor for auditor, _ in self.unlike})

    def of(self, peer_id: str) -> dict[str, bytes]:
        """By auditor: what this maker's work comes to."""
        return {by: work for (by, whose), work in self.said.items() if whose == peer_id}


def auditors_words(accounts: Mapping[str, Account]) -> AuditorsWords:
    """What these accounts say that auditors have told. Some accounts may be missing."""
    heard: dict[tuple[str, str], set[bytes]] = {}
    for account in accounts.values():
        holders = sorted(account.heard)
        for audit in account.audits:
            if (named := auditor_and_audited(audit, holders)) is not None:
                heard.setdefault(named, set()).add(audit.work)
    said = {it: min(works) for it, works in heard.items() if len(works) == 1}
    unlike = {it for it, works in heard.items() if len(works) > 1}
    return AuditorsWords({it: work for it, work in said.items() if work != COULD_NOT}, unlike)


class WorksWords(NamedTuple):
    """What members say of the works of a step, and the works as they are claimed."""

    accounts: Mapping[str, Account]
    works: Mapping[str, bytes]
    told: AuditorsWords
    judges_of: Callable[[str], Judges]

    def can_be_judged(self, peer_id: str) -> bool:
        return 1 + len(self.judges_of(peer_id).all) >= FEWEST_JUDGES

    def of(self, peer_id: str, length: int = WORK_BYTES) -> dict[str, bytes]:
        """What the work of `peer_id` comes to, by its maker and by all that may judge it. If no
        more than half of these come to the same, holders alone count. The others need room for the
        work: honest ones may have none, and liars need none."""
        judges, mine = self.judges_of(peer_id), {peer_id: self.works[peer_id][:length]}
        stated = self._found_by(judges.all, peer_id, length) | mine
        if 2 * max(Counter(stated.values()).values()) > 1 + len(judges.all):
            return stated
        return self._found_by(judges.holders, peer_id, length) | mine

    def agreeing(self, peer_id: str) -> int:
        """How many come to what is claimed, if they are most of `FEWEST_JUDGES` or more; else 0."""
        stated = self.of(peer_id)
        count = sum(work == self.works[peer_id] for work in stated.values())
        return count if len(stated) >= FEWEST_JUDGES and 2 * count > len(stated) else 0

    def _found_by(self, judges: Sequence[str], peer_id: str, length: int) -> dict[str, bytes]:
        """By judge: what it found the work to be, or, if it was drawn, what it has told. Others do
        not count: a peer that cannot have computed the work says what it likes."""
        each = {it: self.accounts[it].found.get(peer_id, SENT_OTHER) for it in judges}
        found = {it: its for it, its in each.items() if not is_mark(its, self.works[peer_id])}
        found |= {it: work for it, work in self.told.of(peer_id).items() if it in judges}
        return {it: work[:length] for it, work in found.items()}


def is_mark(found: bytes, work: bytes) -> bool:
    """Whether `found`, in an account, is a mark in place of what the work comes to. What an auditor
    tells is never a mark, whatever it looks like: else it could doubt any honest work, and nobody
    would hold it to that."""
    return found in (changed_work(work), SENT_OTHER) or found[:OWN_BYTES] == EXCUSED
