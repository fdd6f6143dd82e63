"""An auditor lacks what the audited member got, of whoever gave it."""

import pytest

from p2p_dtfm.core.liveness.chains import ChainEnd, Chains, WorkSaid
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.recovery.view import View
from tests.core.audit.parts import two_by_two
from tests.daemon.trainer_parts import view_of

VIEW = View(view_of(1, 2).snapshot, two_by_two())
"""A plan in which a and c begin, b and d end."""
FRAME = Lack("a", Kind.ACTIVATION, 1, 0)
"""A frame that went to b."""


@pytest.mark.parametrize("owed", list(Kind))
def test_only_for_what_is_said_of_others_works_and_only_where_there_are_audits(owed: Kind) -> None:
    audited, plain = PossibleWaits(VIEW, audits=True), PossibleWaits(VIEW)
    assert audited.allow(owed, "d", FRAME) == (owed in (Kind.AUDIT, Kind.PREPARED))
    assert not plain.allow(owed, "d", FRAME) and plain.allow(owed, "b", FRAME)


def test_nobody_lacks_what_its_maker_gives_to_nobody() -> None:
    audited = PossibleWaits(VIEW, audits=True)
    assert audited.allow(Kind.AUDIT, "d", Lack("c", Kind.PART, 0, 0))
    assert audited.allow(Kind.AUDIT, "c", Lack("b", Kind.GRADIENT, 1, 0))
    for lack in (Lack("a", Kind.GRADIENT, 1, 0), Lack("b", Kind.ACTIVATION, 1, 0)):
        assert not audited.allow(Kind.AUDIT, "d", lack)
    assert not audited.allow(Kind.AUDIT, "d", Lack("x", Kind.PART, 0, 0))


@pytest.mark.parametrize(("gives", "end"), [(True, "a"), (False, "")])
def test_who_says_that_it_gives_an_auditor_nothing_is_no_end_for_others(
    gives: bool, end: str
) -> None:
    """One of the two lies. All others accused the member that was named, whether it was asked or
    not."""
    owed = Lack("d", Kind.AUDIT)
    mine = Work(VIEW.id, 3, False, (owed,))
    said = {
        "d": WorkSaid(0, Work(VIEW.id, 3, False, (FRAME,))),
        "a": WorkSaid(0, Work(VIEW.id, 3, False, (owed,), ("d",) if gives else ())),
        "b": WorkSaid(0, mine),
    }
    possible = PossibleWaits(VIEW, audits=True)
    walk = Chains("c", mine, said, None, possible, lambda *_: False)
    walk.follow(owed, 3)
    assert walk.found == ({end: ChainEnd("a", travels=True)} if end else {})
    assert walk.owing == {"d"}, "they wait in a circle"
