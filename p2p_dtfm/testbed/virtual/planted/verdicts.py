"""Bugs in who is believed, and whose work is audited: for seeds in which some lie."""

from typing import Any

from p2p_dtfm.core.audit import accounts
from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.work import work_of
from p2p_dtfm.core.membership.accusers import Accusers
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import QUICK_LIES


def _every_accusation_is_believed(patches: Patches) -> None:
    """A member goes, and is barred, as soon as anybody says that its work is otherwise."""

    def findings(said: Any, plan: Any, segments: Any, *rest: Any) -> Any:
        found = right(said, plan, segments, *rest)
        for prepared in said.values():
            for peer_id, work in (prepared.audit.found if prepared.audit else {}).items():
                if peer_id in said and work != work_of(said[peer_id], segments):
                    found.liars.setdefault(peer_id, "is accused")
                    found.convicted.add(peer_id)
        return found

    from p2p_dtfm.core.commit import judgement

    right = patches.put(judgement, "findings", findings)


def _nobody_is_drawn(patches: Patches) -> None:
    patches.put(ClaimBook, "drawn", lambda book: {})


def _one_is_enough(patches: Patches) -> None:
    """A single auditor convicts."""

    def convict(stated: Any, holders: int, found: Any) -> None:
        for peer_id in stated:
            if any(work != stated[peer_id] for work in stated.values()):
                found.convicted.add(peer_id)
        right(stated, holders, found)

    right = patches.put(accounts, "_convict", convict)


def _audits_change_nothing(patches: Patches) -> None:
    """Findings are told, and the step commits all the same."""

    def findings(*said: Any) -> Any:
        return accounts.Findings({}, {}, set(), {})

    from p2p_dtfm.core.commit import judgement

    patches.put(judgement, "findings", findings)


def _doubts_are_forgotten(patches: Patches) -> None:
    patches.nothing(Accusers, "heed_doubts")


VERDICTS = (
    Planted(
        "every-accusation",
        "every accusation is believed",
        _every_accusation_is_believed,
        QUICK_LIES,
    ),
    Planted("never-drawn", "no audit is ever drawn", _nobody_is_drawn, QUICK_LIES),
    Planted("one-is-enough", "the verdict of one suffices", _one_is_enough, QUICK_LIES),
    Planted(
        "audits-unheeded", "what audits find is not heeded", _audits_change_nothing, QUICK_LIES
    ),
    Planted(
        "doubts-forgotten", "nobody remembers who was in doubt", _doubts_are_forgotten, QUICK_LIES
    ),
)
